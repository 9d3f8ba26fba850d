"""Which groups keep their conversations: of every env and step a few, chosen while they come in. Pure.

The first group, the one with the best and the one with the worst rollout are always among them; until there is something better
or worse, the next groups fill the places. So what is kept shows both ends of what the policy does, and is there to be read at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """A group that keeps its conversations, and the rewards of its worst and its best rollout."""

    seq: int
    low: float
    high: float


class Sample:
    """The groups of one env and step that are kept, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Kept] = []

    def offer(self, group: Kept) -> tuple[bool, Kept | None]:
        """Whether a group is kept, and which earlier one gives way to it."""
        if len(self._kept) < self._most:
            self._kept.append(group)
            return True, None
        lowest = min((kept.low for kept in self._kept), default=group.low)
        highest = max((kept.high for kept in self._kept), default=group.high)
        if lowest <= group.low and group.high <= highest:
            return False, None
        every = [*self._kept, group]
        wanted = [every[0], max(every, key=lambda kept: kept.high), min(every, key=lambda kept: kept.low)]
        safe = list(dict.fromkeys(wanted))[: self._most]
        gives_way = next(kept for kept in reversed(every) if kept not in safe)
        if gives_way is group:
            return False, None
        self._kept.remove(gives_way)
        self._kept.append(group)
        return True, gives_way
