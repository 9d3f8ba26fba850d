"""The asyncio driver of a run: performs its instructions and tells it what happened.

One loop calls `Run.advance` whenever something changed or is due; completions arrive as callbacks from the env links and
cost O(1). There is no task, future or timer per rollout: one timer wakes the loop for whatever is due next.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import structlog

from envs import wire
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.ports import CancelAttempt, StartAttempt
from orchestrator.dispatch.work import Attempt
from orchestrator.env_servers.env import Env
from orchestrator.env_servers.requests import Answer, RolloutRequest
from orchestrator.run.ports import DrainRun, Driven, EndRun, EvaluationFinished, LoadWeights

log = structlog.get_logger()

TOGETHER_S = 0.001
"""Answers that come within this time are looked at together: looking costs as much as an answer, however many there are."""

TURN = 256
"""Starts per turn of the loop: a few milliseconds, so that completions are never kept waiting."""

REPEATS = 100
"""A failure of a kind seen before is logged once per this many."""

KINDS = 100
"""Kinds of failures that are logged in full; a peer must not be able to fill our memory or our log with names."""


Run_ = TypeVar("Run_", bound=Driven)
T = TypeVar("T")


class Driver(Generic[Run_]):
    """Drives a run, or evaluations alone, against real environments and inference servers."""

    def __init__(
        self,
        run: Run_,
        *,
        train: Mapping[str, Env],
        evals: Mapping[str, Env],
        on_weights: Callable[[int, str | None], None],
        on_evaluation: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self.run = run
        self.clock = clock
        self._envs: dict[tuple[Lane, str], Env] = {
            **{(Lane.TRAIN, name): env for name, env in train.items()},
            **{(Lane.EVAL, name): env for name, env in evals.items()},
        }
        self._on_weights = on_weights
        self._on_evaluation = on_evaluation
        self.on_drain: Callable[[str], None] = lambda why: None
        """Called when the run is to stop as after a signal."""
        self._wake = asyncio.Event()
        self._turned = asyncio.Event()
        self._failures: dict[tuple[str, str, str], int] = {}
        self._error: Exception | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the run is over, once it is."""

    def wake(self) -> None:
        """Something changed that the run should look at."""
        self._wake.set()

    async def drive(self) -> None:
        """Advance the run whenever there is a reason to, until cancelled or until it raises."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            if self._error is not None:
                raise self._error
            now, looked = self.clock(), loop.time()
            more = self.run.advance(now, at_most=TURN)
            self.perform()
            self._turned.set()
            if more:
                await asyncio.sleep(0)
                continue
            due = self.run.next_event_at(now)
            timer = None if due is None else loop.call_later(max(0.0, due - now), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()
            if (early := looked + TOGETHER_S - loop.time()) > 0:
                await asyncio.sleep(early)

    async def wait_idle(self) -> None:
        """Wait until no group is open."""
        while not self.run.idle:
            self._turned.clear()
            await self._turned.wait()

    def tell(self, event: Callable[..., None], *arguments: object) -> None:
        """Something happened to the run: tell it, with the time, and have it look."""
        try:
            event(*arguments, self.clock())
        # Raised inside a neighbour, which must go on: `drive` raises it instead.
        except Exception as error:  # noqa: BLE001  see above
            self._error = self._error or error
        self.wake()

    def ask(self, event: Callable[..., T], *arguments: object) -> T:
        """Tell the run something that it answers, carry out what it decides, and have it look."""
        try:
            answer = event(*arguments, self.clock())
        except Exception as error:
            self._error = self._error or error  # it is half done: `drive` ends the run
            self.wake()
            raise
        self.perform()
        self.wake()
        return answer

    def close(self) -> None:
        """Give up what is in flight."""
        self.run.abandon(self.clock())
        self.perform()

    def perform(self) -> None:
        """Carry out what the run has decided."""
        for instruction in self.run.drain():
            match instruction:
                case StartAttempt(attempt):
                    self._start(attempt)
                case CancelAttempt(attempt):
                    if attempt.request is not None:
                        self._envs[attempt.group.lane, attempt.group.env].cancel(attempt.request)
                        attempt.request = None
                case LoadWeights(version, path):
                    self._on_weights(version, path)
                case EvaluationFinished(result):
                    self._on_evaluation(result)
                case DrainRun(why):
                    self.on_drain(why)
                case EndRun(why):
                    if not self.ended.done():
                        self.ended.set_result(why)

    def _start(self, attempt: Attempt) -> None:
        group = attempt.group
        request = RolloutRequest(
            split=group.task.split,
            index=group.task.index,
            count=attempt.count,
            base_url=attempt.endpoint.url,
            session=group.task.key,
            cache_salt=str(self.run.version),
            model=attempt.endpoint.adapter,
            context=attempt,
        )
        attempt.request = request
        self._envs[group.lane, group.env].submit(request, self._on_answer, server=attempt.server)

    def _on_answer(self, request: RolloutRequest, answer: Answer) -> None:
        """A request ended; called by the link, once per request."""
        attempt: Attempt = request.context
        now = self.clock()
        try:
            if isinstance(answer, wire.Failure):
                if not attempt.ended:
                    self._log_failure(attempt, answer)
                self.run.on_failure(
                    attempt, answer, now, together=(answer.inflight or 2) if answer.lost else 0
                )
            else:
                self.run.on_result(attempt, answer, now)
            attempt.request = None
            self.perform()
        # Raised inside a link's receiver, which must go on: `drive` raises it instead.
        except Exception as error:  # noqa: BLE001  see above
            self._error = self._error or error
        self._wake.set()

    def _log_failure(self, attempt: Attempt, failure: wire.Failure) -> None:
        """The first of a kind and place in full, then one line per hundred."""
        env = attempt.group.env
        key = (env, failure.kind, failure.where) if len(self._failures) < KINDS else (env, "other", "")
        seen = self._failures.get(key, 0) + 1
        self._failures[key] = seen
        if seen == 1:
            log.warning(
                "rollout.failed",
                env=env,
                task=attempt.group.task.key,
                kind=failure.kind,
                message=failure.message,
                where=failure.where or None,
                retryable=failure.retryable,
                detail=failure.detail or None,
            )
        elif seen % REPEATS == 0:
            log.warning(
                "rollout.failed_again",
                env=env,
                kind=failure.kind,
                times=seen,
                message=failure.message,
                where=failure.where or None,
            )
