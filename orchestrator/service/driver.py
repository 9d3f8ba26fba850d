"""The asyncio shell of dispatch: performs the core's instructions and tells it what happened.

One loop starts work; completions arrive as callbacks from the env links and cost O(1). There is no task, future or
timer per rollout: one timer wakes the loop for whatever is due next.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.ports import Cancel, GroupCompleted, GroupDropped, Start
from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.env_servers.env import Env, RolloutRequest, RunFailure, RunOutcome

log = structlog.get_logger()

TURN = 256
"""Starts per turn of the loop: a few milliseconds, so that completions are never kept waiting."""

REPEATS = 100
"""A failure of a kind seen before is logged once per this many."""


class Sink(Protocol):
    """Who receives ended groups."""

    def completed(self, pending: PendingGroup, now: float) -> None: ...
    def dropped(self, pending: PendingGroup, reason: str, *, again: bool, now: float) -> None: ...


class EndpointReports(Protocol):
    """Who wants to know how rollouts on an endpoint go."""

    def note_success(self, endpoint: Any) -> None: ...
    def note_failure(self, endpoint: Any, kind: str) -> None: ...


class Driver:
    """Runs the core against real envs."""

    def __init__(
        self,
        core: Dispatcher,
        *,
        train: Mapping[str, Env],
        evals: Mapping[str, Env],
        sink: Sink,
        rollout_timeout_s: float,
        pool: EndpointReports,
        clock: Callable[[], float],
    ) -> None:
        self.core = core
        self._envs: dict[tuple[Lane, str], Env] = {
            **{(Lane.TRAIN, name): env for name, env in train.items()},
            **{(Lane.EVAL, name): env for name, env in evals.items()},
        }
        self._sink = sink
        self._timeout_s = rollout_timeout_s
        self._pool = pool
        self._clock = clock
        self._wake = asyncio.Event()
        self._failures: dict[tuple[str, str], int] = {}
        self._error: BaseException | None = None
        self.progressed = clock()
        """When a rollout last ended."""

    def wake(self) -> None:
        """Something changed that may let work start."""
        self._wake.set()

    async def run(self) -> None:
        """Start work whenever there is room, until cancelled or until the sink raises."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            now = self._clock()
            more = self.core.advance(now, at_most=TURN)
            self.perform(now)
            if self._error is not None:
                raise self._error
            if more:
                await asyncio.sleep(0)
                continue
            due = self.core.next_event_at(now)
            timer = None if due is None else loop.call_later(max(0.0, due - now), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def perform(self, now: float) -> None:
        """Carry out what the core has decided; what that decides in turn is carried out too."""
        while instructions := self.core.drain():
            for instruction in instructions:
                match instruction:
                    case Start(attempt):
                        self._start(attempt)
                    case Cancel(attempt):
                        self._envs[attempt.group.lane, attempt.group.env].cancel(attempt.request)
                        attempt.request = None
                    case GroupCompleted(group):
                        self._sink.completed(group, now)
                        group.results.clear()
                    case GroupDropped(group, reason, again):
                        self._sink.dropped(group, reason, again=again, now=now)

    def _start(self, attempt: Attempt) -> None:
        group = attempt.group
        request = RolloutRequest(
            split=group.task.split,
            index=group.task.index,
            count=attempt.count,
            base_url=attempt.endpoint.url,
            session=group.task.key,
            cache_salt=str(self.core.staleness.serving),
            timeout_s=self._timeout_s,
            context=attempt,
        )
        attempt.request = request
        self._envs[group.lane, group.env].submit(request, self._on_done)

    def _on_done(self, request: RolloutRequest, outcome: RunOutcome) -> None:
        """A run ended; called by the link, once per request."""
        attempt: Attempt = request.context
        now = self._clock()
        self.progressed = now
        if isinstance(outcome, RunFailure):
            if not attempt.ended:
                self._log_failure(attempt, outcome)
                if not outcome.lost:
                    self._pool.note_failure(attempt.endpoint, outcome.kind)
            self.core.fail(attempt, outcome.kind, retryable=outcome.retryable, lost=outcome.lost, now=now)
        else:
            self._pool.note_success(attempt.endpoint)
            group = attempt.group
            group.version_end = max(group.version_end, attempt.endpoint.version_newest)
            self.core.finish(attempt, outcome, now)
        attempt.request = None
        try:
            self.perform(now)
        # Raised inside a link's receiver, which must go on: `run` raises it instead.
        except Exception as error:  # noqa: BLE001  see above
            self._error = error
        self._wake.set()

    def _log_failure(self, attempt: Attempt, failure: RunFailure) -> None:
        """The first of a kind in full, then one line per hundred."""
        env = attempt.group.env
        seen = self._failures.get((env, failure.kind), 0) + 1
        self._failures[env, failure.kind] = seen
        if seen == 1:
            log.warning(
                "rollout.failed",
                env=env,
                task=attempt.group.task.key,
                kind=failure.kind,
                message=failure.message,
                retryable=failure.retryable,
                detail=failure.detail or None,
            )
        elif seen % REPEATS == 0:
            log.warning(
                "rollout.failed_again", env=env, kind=failure.kind, times=seen, message=failure.message
            )
