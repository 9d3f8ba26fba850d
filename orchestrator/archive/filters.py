"""Which groups a reader is asked for: what the database can decide, and what only a look at the group can. Pure."""

from dataclasses import dataclass

from orchestrator.archive.records import ArchivedGroup, text_of

Bounds = int | tuple[int, int] | None
"""A number, or the first and the last of several."""


FEW_STEPS = 64
"""Up to so many steps their groups are looked up and sorted; of more, it is quicker to go through the groups in their order."""


@dataclass(frozen=True, slots=True)
class Filters:
    """What a group must be; None is anything."""

    env: str | None
    split: str | None
    step: Bounds
    version: Bounds
    min_reward: float | None
    max_reward: float | None
    outcome: str | None
    task: int | None
    contains: str | None
    readable: bool

    def sql(self) -> tuple[list[str], list[object]]:
        """Conditions on rows, and their values; they let through all that fits, and little else."""
        conditions, arguments = [], list[object]()
        few_steps = self.step is not None and _span(self.step) <= FEW_STEPS
        for column, value in (
            ("env", self.env),
            ("split", self.split),
            ("outcome", self.outcome),
            ("task_index", self.task),
        ):
            if value is not None:
                # With a plus in front the index of a column is not used, so that the order of rows stays that of a better one.
                conditions.append(f"{'+' if few_steps else ''}{column} = ?")
                arguments.append(value)
        if self.step is not None:
            conditions.append(f"{'' if few_steps else '+'}step BETWEEN ? AND ?")
            arguments += _pair(self.step)
        if self.version is not None:
            first, last = _pair(self.version)
            conditions.append("version_end >= ? AND version <= ?")
            arguments += [first, last]
        if self.min_reward is not None:
            conditions.append("max_reward >= ?")
            arguments.append(self.min_reward)
        if self.max_reward is not None:
            conditions.append("min_reward <= ?")
            arguments.append(self.max_reward)
        return conditions, arguments

    def fits(self, group: ArchivedGroup) -> bool:
        """Whether a group is what was asked for, but for what is said in it."""
        if self.readable and not group.has_text:
            return False
        for wanted, value in (
            (self.env, group.env),
            (self.split, group.split),
            (self.outcome, group.outcome),
            (self.task, group.task),
        ):
            if wanted is not None and wanted != value:
                return False
        if self.step is not None and (group.step is None or not _within(self.step, group.step, group.step)):
            return False
        if self.version is not None and not _within(self.version, group.version, group.version_end):
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        return any(
            (self.min_reward is None or reward >= self.min_reward)
            and (self.max_reward is None or reward <= self.max_reward)
            for reward in group.rewards
        )

    def speaks(self, group: ArchivedGroup) -> bool:
        """Whether the text that is looked for stands in a message of the group."""
        wanted = (self.contains or "").casefold()
        return any(
            wanted in text_of(message).casefold() for one in group.rollouts for message in one.messages
        )

    def may_speak(self, transcript: bytes) -> bool:
        """A quick look at undecoded conversations: False only where the text that is looked for cannot stand in them."""
        wanted = self.contains or ""
        return not wanted.isascii() or wanted.lower().encode() in transcript.lower()


def _span(bounds: int | tuple[int, int]) -> int:
    first, last = _pair(bounds)
    return last - first + 1


def _pair(bounds: int | tuple[int, int]) -> tuple[int, int]:
    return (bounds, bounds) if isinstance(bounds, int) else bounds


def _within(bounds: int | tuple[int, int], low: int, high: int) -> bool:
    """Whether a span touches the bounds."""
    first, last = _pair(bounds)
    return low <= last and high >= first
