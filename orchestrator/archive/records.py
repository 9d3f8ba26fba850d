"""What is read from an archive: groups, their rollouts, failures, counts. Plain data, and how it is made of stored bytes.

A group is the attempts at one task that were compared with each other. Its numbers are always there; the conversations of
its rollouts only where a text was kept, or where the journal still holds the group. Whatever an environment put into its
transcript, what comes out has the promised types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from orchestrator.groups.group import Group

QUEUED, TRAINED, EVALUATED = "queued", "trained", "evaluated"
"""Outcomes of groups that came to something; any other one is the reason why the group was not trained on."""


@dataclass(frozen=True, slots=True)
class ArchivedRollout:
    """One attempt at a task.

    `messages` is the conversation as the environment recorded it (role, content, tool_calls, …), and empty where no text was
    kept; then there are no metrics, timings and stop reason either. `seats` has the rewards of the parts that a rollout
    played, where it played several. `tokens` counts all sequences of the rollout; evaluations have none.
    """

    number: int
    reward: float
    tokens: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    truncated: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    seats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArchivedGroup:
    """The rollouts of one task that were compared with each other.

    `outcome` is trained, queued (waits for a batch), evaluated, or the reason why it was not trained on (equal_rewards,
    stale, a kind of failure, …). `step` is the batch that it is in, or the evaluation's; for a group that is in no batch, the
    step that was being gathered when it ended; None while it is queued. `version` is the oldest policy version that sampled
    any of it, `version_end` the newest. `seq` is its place in the archive: later groups have larger ones.
    """

    seq: int
    id: str
    env: str
    split: str
    task: int
    epoch: int
    position: int
    step: int | None
    version: int
    version_end: int
    outcome: str
    rewards: tuple[float, ...]
    min_reward: float | None
    max_reward: float | None
    mean_reward: float | None
    tokens: int
    truncated: int
    started_at: float
    finished_at: float
    has_text: bool
    rollouts: list[ArchivedRollout]

    @property
    def seconds(self) -> float:
        """From the group's first dispatch to its end."""
        return max(0.0, self.finished_at - self.started_at)

    @property
    def size(self) -> int:
        """Number of rollouts."""
        return len(self.rollouts)

    def with_transcript(self, transcript: bytes) -> "ArchivedGroup":
        """The same with the conversations of a transcript; unchanged where it cannot be read."""
        rollouts = decode_rollouts(transcript, self.rollouts)
        return self.marked(False) if rollouts is None else replace(self, has_text=True, rollouts=rollouts)

    def marked(self, has_text: bool) -> "ArchivedGroup":
        """The same, said to have a text or none."""
        return self if has_text == self.has_text else replace(self, has_text=has_text)


@dataclass(frozen=True, slots=True)
class ArchivedFailure:
    """Attempts of an env that failed in one way: `text` is what the last one said, `detail` its traceback if there was one.

    Texts that differ only in numbers count as one. `task` is an example.
    """

    env: str
    split: str
    kind: str
    text: str
    detail: str
    count: int
    first_at: float
    last_at: float
    task: int


@dataclass(frozen=True, slots=True)
class OutcomeCount:
    """How many groups and rollouts of an env ended in one way."""

    env: str
    split: str
    outcome: str
    groups: int
    rollouts: int


_entries = msgspec.msgpack.Decoder(list[dict[str, Any]])


def plain_rollouts(rewards: Sequence[float], lengths: Sequence[int]) -> list[ArchivedRollout]:
    """Rollouts of which only the numbers are known."""
    return [
        ArchivedRollout(number, float(reward), int(lengths[number]) if number < len(lengths) else 0)
        for number, reward in enumerate(rewards)
    ]


def decode_rollouts(transcript: bytes, known: Sequence[ArchivedRollout]) -> list[ArchivedRollout] | None:
    """The rollouts of a transcript, with the tokens that are known of them; None where it is not one."""
    try:
        entries = _entries.decode(transcript)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if known and len(entries) != len(known):
        return None
    return [_rollout(number, entry, known) for number, entry in enumerate(entries)]


def members_of(group: Group) -> tuple[list[float], list[int], list[bool]]:
    """The reward and the tokens of each rollout of a recorded group, and whether it was cut.

    Of a group that was split, the first part has the whole transcript; tokens of the rest are not counted.
    """
    rewards: dict[int, float] = {}
    lengths: dict[int, int] = {}
    truncated: dict[int, bool] = {}
    facts = zip(group.facts["rollout"].tolist(), group.facts["truncated"].tolist(), strict=True)
    for place, (number, cut) in enumerate(facts):
        rewards[number] = float(group.rewards[place])
        lengths[number] = lengths.get(number, 0) + group.lengths[place]
        truncated[number] = truncated.get(number, False) or bool(cut)
    told = decode_rollouts(group.transcript, ())
    if told is not None and len(told) == group.rollouts:
        rewards = {rollout.number: rollout.reward for rollout in told}
    return (
        list(rewards.values()),
        [lengths.get(number, 0) for number in rewards],
        [truncated.get(number, False) for number in rewards],
    )


def _rollout(number: int, entry: Mapping[str, Any], known: Sequence[ArchivedRollout]) -> ArchivedRollout:
    return ArchivedRollout(
        number=number,
        reward=known[number].reward if known else _number(entry.get("reward")),
        tokens=known[number].tokens if known else 0,
        messages=[_message(message) for message in _list(entry.get("messages"))],
        metrics=_numbers(entry.get("metrics")),
        stop_reason=str(entry.get("stop_reason", "")),
        truncated=bool(entry.get("truncated", False)),
        timings=_numbers(entry.get("timings")),
        seats=_numbers(entry.get("seats")),
    )


def _message(message: object) -> dict[str, Any]:
    """A message as a dict with a role and a content; what an environment recorded in another shape is the content."""
    if not isinstance(message, Mapping):
        return {"role": "", "content": message}
    return {"role": "", "content": None, **{str(key): value for key, value in message.items()}}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): float(number) for name, number in value.items() if isinstance(number, int | float)}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says, in one text: its content, also where that comes in parts, and its tool calls."""
    parts = [content_text(message.get("content"))]
    parts += [f"{name}({arguments})" for name, arguments in tool_calls_of(message)]
    return "\n".join(part for part in parts if part)


def content_text(content: object) -> str:
    """The text of a message's content; parts that are no text are named by their type."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return msgspec.json.encode(content).decode()


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = part.get("text")
        return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"
    return msgspec.json.encode(part).decode()


def tool_calls_of(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The name and the arguments of every tool that a message calls."""
    found = []
    for call in _list(message.get("tool_calls")):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments", "")
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            found.append((str(function.get("name", "")), text))
    return found
