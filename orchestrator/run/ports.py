"""What a run asks of the shells around it, and what it tells them to do.

The pool of inference servers, the journal and the environments are Protocols here; `service` has the real ones,
`simulate` and the tests others. Instructions come out of `Run.drain` in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.wire import Failure, Result
from orchestrator.dispatch.ports import CancelAttempt, EnvPort, Placement, StartAttempt
from orchestrator.dispatch.work import Attempt
from orchestrator.groups.group import Batch, Group
from orchestrator.sinks.train_sink import Record


class TrainPort(EnvPort, Protocol):
    """A training environment's servers, as status shows them."""

    @property
    def ready_servers(self) -> int: ...
    @property
    def servers(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def nodes(self) -> Mapping[str, str]:
        """Where ready servers run that are not on this machine, by server."""


class EndpointFacts(Protocol):
    """One inference server, as status shows it."""

    @property
    def url(self) -> str: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def inflight(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def version_newest(self) -> int: ...
    @property
    def error(self) -> str: ...
    @property
    def source(self) -> str: ...


class Pool(Placement, Protocol):
    """The inference servers."""

    @property
    def endpoints(self) -> Sequence[EndpointFacts]: ...
    def note_success(self, endpoint: Any) -> None: ...
    def explain(self) -> str:
        """Why no inference server is in service; empty while one is."""

    def refuse_max_inflight(self, value: int) -> str:
        """Why so many rollouts in flight cannot be had; empty if they can."""

    def set_max_inflight(self, value: int) -> None: ...
    def refuse_add(self, url: str) -> str:
        """Why there can be no inference server at an address; empty if there can."""

    def add_endpoint(self, url: str) -> None:
        """Probe it, have it load the newest version, and give it work from then on."""

    def refuse_remove(self, url: str) -> str:
        """Why an inference server cannot be removed; empty if it can."""

    def remove_endpoint(self, url: str) -> None:
        """Give it no further work; it is gone when its rollouts have ended."""

    def take_in(self, url: str, source: str) -> None:
        """Add one that a source names, unless it is there."""

    def let_go(self, url: str) -> None:
        """Remove one that a source has named, were it the last."""


class RunJournal(Record, Protocol):
    """The record that survives a crash."""

    @property
    def full(self) -> bool: ...
    @property
    def backlog_bytes(self) -> int: ...
    @property
    def kept(self) -> tuple[int, int]: ...
    def record_choice(self, env: str, position: int, index: int) -> None:
        """A curriculum has chosen the task of a position."""

    def split_group(self, group: Group, n: int) -> tuple[Group, Group]: ...
    def record_acknowledged(self, step: int) -> None: ...
    def record_states(self, states: Mapping[str, Any]) -> None: ...
    def record_version(self, version: int, step: int, path: str | None) -> None: ...
    def forget_version(self, version: int) -> None: ...
    def record_report(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def record_eval(self, data: dict[str, Any]) -> None: ...
    def record_control(self, at: float, origin: str, command: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Bring the inference servers to a published version; newer instructions replace older ones."""

    version: int
    path: str | None


@dataclass(frozen=True, slots=True)
class EvaluationFinished:
    """An evaluation has its result, which is in the journal already."""

    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DrainRun:
    """Stop as after a signal: let open groups end, save, exit."""

    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over."""

    why: str


class Driven(Protocol):
    """What a driver drives: a run, or evaluations alone."""

    @property
    def version(self) -> int:
        """Version that the inference servers sample from."""

    @property
    def idle(self) -> bool: ...
    def on_result(self, attempt: Attempt, result: Result, now: float) -> None: ...
    def on_failure(self, attempt: Attempt, failure: Failure, now: float, *, together: int = 0) -> None: ...
    def on_endpoint_lost(self, endpoint: Any, now: float) -> None: ...
    def advance(self, now: float, *, at_most: int = 256) -> bool: ...
    def next_event_at(self, now: float) -> float | None: ...
    def drain(self) -> "list[RunInstruction]": ...
    def abandon(self, now: float) -> None: ...


RunInstruction = StartAttempt | CancelAttempt | LoadWeights | EvaluationFinished | DrainRun | EndRun
Offer = Callable[[Batch], None]
