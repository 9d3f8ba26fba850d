"""Evaluations alone: the same dispatch and the same sink as in a run, without training. Pure."""

from collections.abc import Callable
from typing import Any

from envs.wire import Failure, Result
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ports import GroupCompleted, GroupDropped
from orchestrator.dispatch.work import Attempt
from orchestrator.run.ports import EndRun, EvaluationFinished, Pool, RunInstruction
from orchestrator.sinks.eval_sink import EvalSink
from orchestrator.tasks.evaluations import Evaluations


class EvaluationRun:
    """Runs every evaluation once; driven like a run."""

    version = 0

    def __init__(self, dispatcher: Dispatcher, pool: Pool, evaluations: Evaluations, now: float) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._evaluations = evaluations
        self.sink = EvalSink(evaluations)
        self.on_task: Callable[[str], None] = lambda env: None
        """Called with the env whenever one of its tasks has been tried."""
        self._out: list[RunInstruction] = []
        self._ended = False
        evaluations.reached(0, 0, last=False)
        evaluations.start(0, serving=0, published=0, now=now)

    def on_result(self, attempt: Attempt, result: Result, now: float) -> None:
        """An attempt brought rollouts back."""
        if not attempt.ended:
            self._pool.note_success(attempt.endpoint)
        self._dispatcher.finish(attempt, result, now)
        self._absorb(now)

    def on_failure(self, attempt: Attempt, failure: Failure, now: float, *, together: int = 0) -> None:
        """An attempt failed; `together` above 0: its server died, with that many requests on it."""
        if together:
            self._dispatcher.lose(attempt, together, now)
        else:
            if not attempt.ended:
                self._pool.note_failure(attempt.endpoint, failure.kind)
            self._dispatcher.fail(attempt, failure.kind, retryable=failure.retryable, now=now)
        self._absorb(now)

    def on_endpoint_lost(self, endpoint: Any, now: float) -> None:
        """What ran on an inference server is gone; it is asked again elsewhere."""
        self._dispatcher.lose_endpoint(endpoint, now)
        self._absorb(now)

    def abandon(self, now: float) -> None:
        """Give up what is in flight."""
        self._dispatcher.abandon("shutdown")
        self._absorb(now)

    @property
    def idle(self) -> bool:
        """Whether no task is being tried."""
        return not self._dispatcher.flight.busy

    def advance(self, now: float, *, at_most: int = 256) -> bool:
        """Start what can be; whether more could start at once."""
        more = self._dispatcher.advance(now, at_most=at_most)
        self._absorb(now)
        return more

    def next_event_at(self, now: float) -> float | None:
        """When `advance` has something to do even if nothing happens."""
        return self._dispatcher.next_event_at(now)

    def drain(self) -> list[RunInstruction]:
        """Instructions since the last call, in order."""
        out, self._out = self._out, []
        return out

    def _absorb(self, now: float) -> None:
        for instruction in self._dispatcher.drain():
            match instruction:
                case GroupCompleted(group):
                    result = self.sink.completed(group, now)
                    self.on_task(group.env)
                    if result is not None:
                        self._out.append(EvaluationFinished(result))
                case GroupDropped():
                    pass
                case _:
                    self._out.append(instruction)
        if self._evaluations.idle and not self._ended:
            self._ended = True
            self._out.append(EndRun("evaluated"))
