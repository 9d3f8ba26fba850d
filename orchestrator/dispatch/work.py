"""What is under way: a group being assembled and the attempts at its rollouts.

A group starts `size + extra` lines, each of which ends as a valid rollout or, after its attempts are used up, as a
failed one. It is complete with `size` valid rollouts, or with `needed` of them once no more can come. A group-scored
env has one line that yields all rollouts. Pure bookkeeping; the dispatcher acts on what `verdict` says.
"""

from enum import StrEnum
from typing import Any

import msgspec

from envs.wire import Result
from orchestrator.dispatch.ledger import Lane
from orchestrator.tasks.task import TrainTask


class Verdict(StrEnum):
    """What is to become of a group."""

    OPEN = "open"
    COMPLETE = "complete"
    FAILED = "failed"


class PendingGroup(msgspec.Struct, eq=False):
    """A group being assembled. `version` is the policy version at its first dispatch, `version_end` the newest that
    any of its endpoints had when a result came from it; `spans` has the same two for each result. `expected` is what
    it will probably add to the queue, `slowest_s` the longest time of an attempt that brought a result."""

    task: TrainTask
    lane: Lane
    size: int
    needed: int
    group_scored: bool
    version: int
    opened: float
    version_end: int = 0
    extra: int = 0
    expected: int = 0
    endpoint: Any = None
    results: list[Result] = msgspec.field(default_factory=list)
    spans: list[tuple[int, int]] = msgspec.field(default_factory=list)
    valid: int = 0
    failed: int = 0
    failure: str = ""
    slowest_s: float = 0.0
    running: "dict[Attempt, None]" = msgspec.field(default_factory=dict)
    waiting: int = 0
    closed: bool = False
    context: Any = None

    @property
    def env(self) -> str:
        return self.task.env

    @property
    def lines(self) -> int:
        """Lines that may still bring a valid rollout."""
        return len(self.running) + self.waiting

    def verdict(self) -> Verdict:
        """Complete, failed, or still open."""
        if self.valid >= self.size:
            return Verdict.COMPLETE
        possible = self.size if self.group_scored and self.lines else self.lines
        if self.valid + possible < self.needed:
            return Verdict.FAILED
        if self.lines == 0:
            return Verdict.COMPLETE
        return Verdict.OPEN


class Attempt(msgspec.Struct, eq=False):
    """One attempt at one line of a group; `count` rollouts at once (1, or the whole group when group-scored).

    `server` is where room was reserved for it, `request` what the driver sent. Of earlier attempts at the same line
    `free` counts those that were not charged (`charges`), `suspect` those under which a server died. `version` is what its endpoint had when it started.
    """

    group: PendingGroup
    count: int
    number: int = 1
    free: int = 0
    suspect: int = 0
    started: float = 0.0
    version: int = 0
    ended: bool = False
    endpoint: Any = None
    server: Any = None
    request: Any = None
