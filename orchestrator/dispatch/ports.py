"""What dispatch asks of its neighbours, the rules it follows, and the instructions it gives."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.tasks.task import EvalTask, TrainTask


class EnvPort(Protocol):
    """What dispatch needs to know of an env."""

    @property
    def name(self) -> str: ...
    @property
    def group_scored(self) -> bool: ...
    def has_room(self, count: int) -> bool:
        """Whether one of its servers would take a run of `count` rollouts now."""


class Source(Protocol):
    """Where training tasks come from."""

    def try_next_task(self, eligible: Collection[str] | None = None) -> TrainTask | None: ...
    def retry(self, task: TrainTask) -> None: ...


class Placement(Protocol):
    """Which inference endpoint; `prefer` is the one the group is on already."""

    @property
    def limit(self) -> int: ...
    def acquire(self, n: int, prefer: Any = None) -> Any: ...
    def release(self, endpoint: Any, n: int) -> None: ...


class EvalSource(Protocol):
    """Where evaluation tasks come from."""

    def next_eval(self, eligible: Collection[str]) -> EvalTask | None: ...


class Mix(Protocol):
    """What the mix strategy is told."""

    def on_dispatch(self, env: str, n: int, *, now: float) -> None: ...
    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None: ...
    def on_cancel(self, env: str, n: int, *, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainRules:
    """How one training env is dispatched."""

    port: EnvPort
    group_size: int
    max_inflight: int | None = None
    rollouts_per_minute: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits that all envs share."""

    rollout_timeout_s: float
    group_timeout_s: float
    max_attempts: int
    backoff_s: float
    max_backoff_s: float
    min_valid: int | None = None
    extra_rollouts: int = 0
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Send this attempt to its env."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Cancel:
    """The attempt is of no use any more; its end is booked already."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class GroupCompleted:
    """Enough valid rollouts are there."""

    group: PendingGroup


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """The group ends without a result; `again` says whether its task is to be asked again."""

    group: PendingGroup
    reason: str
    again: bool


Instruction = Start | Cancel | GroupCompleted | GroupDropped
