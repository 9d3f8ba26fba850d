"""What dispatch asks of its neighbours, the rules it follows, and the instructions it gives."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.tasks.task import EvalTask, TrainTask


class EnvPort(Protocol):
    """What dispatch needs to know of an env."""

    @property
    def name(self) -> str: ...
    @property
    def group_scored(self) -> bool: ...
    @property
    def available(self) -> bool:
        """Whether any of its servers is ready."""

    def has_room(self, count: int) -> bool:
        """Whether one of its servers would take a request for `count` rollouts now."""

    def reserve(self, count: int) -> Any:
        """Take room for `count` rollouts on one of its servers; None when there is none."""


class Source(Protocol):
    """Where training tasks come from."""

    def try_next_task(self, eligible: Collection[str]) -> TrainTask | None: ...


class Placement(Protocol):
    """Which inference endpoint; `prefer` is the one the group is on already."""

    @property
    def limit(self) -> int: ...
    def acquire(self, n: int, prefer: Any = None) -> Any: ...
    def release(self, endpoint: Any, n: int) -> None: ...
    def note_failure(self, endpoint: Any, kind: str) -> None:
        """A rollout on the endpoint failed; whether that is the endpoint's fault is for it to judge."""


class EvalSource(Protocol):
    """Where evaluation tasks come from."""

    def next_eval(self, eligible: Collection[str]) -> EvalTask | None: ...
    @property
    def waiting(self) -> Sequence[str]:
        """Envs of which there are tasks left."""


class Queue(Protocol):
    """What waits for a batch, in the unit of the batch."""

    @property
    def revision(self) -> tuple[int, ...]:
        """Differs whenever an answer does that does not follow from versions and open groups."""

    @property
    def splits(self) -> bool:
        """Whether a batch may have a part of a group."""

    def queued(self) -> Mapping[str, int]:
        """What each env has queued."""

    def queued_by_version(self) -> Mapping[tuple[str, int], int]:
        """What each env has queued of each version."""

    def minimums(self) -> Mapping[str, int]:
        """What every batch must have of each env."""

    def reserved(self, batches: int) -> Mapping[str, int]:
        """What so many batches will have of each env at least, in whole groups."""

    def needed(self, coming: Mapping[str, int]) -> Collection[str]:
        """Envs of which the next batch needs more than is queued and coming; none while no batch is wanted."""

    def behind(
        self, able: Collection[str], coming: Mapping[str, int], batches: int
    ) -> Collection[str] | None:
        """Which of these envs have less queued and coming than so many batches will have of them, by whole groups first.

        None: any env may come next.
        """

    def expected(self, env: str) -> int:
        """What a group of an env will add at most, in all likelihood."""

    def portion(self, env: str) -> int:
        """The same, but the plain size of a group while nothing is known."""


class OnDispatch(Protocol):
    """Who is told that rollouts of an env entered flight."""

    def on_dispatch(self, env: str, n: int, *, now: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRules:
    """How one env is dispatched: its servers, its limits, and what a failure means."""

    port: EnvPort
    rollout_timeout_s: float
    group_timeout_s: float
    max_attempts: int
    group_size: int = 1
    max_inflight: int | None = None
    rollouts_per_minute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Limits that all envs share."""

    backoff_s: float
    max_backoff_s: float
    min_valid: int | None
    extra_rollouts: int
    ramp_s: float


class StartAttempt(msgspec.Struct, frozen=True):
    """Send this attempt to the server where room is reserved for it."""

    attempt: Attempt


class CancelAttempt(msgspec.Struct, frozen=True):
    """The attempt is of no use any more; its end is booked already."""

    attempt: Attempt


class GroupCompleted(msgspec.Struct, frozen=True):
    """Enough valid rollouts are there."""

    group: PendingGroup


class GroupDropped(msgspec.Struct, frozen=True):
    """The group ends without a result; `again` says whether its task is to be asked again."""

    group: PendingGroup
    reason: str
    again: bool


Instruction = StartAttempt | CancelAttempt | GroupCompleted | GroupDropped
