"""A run: the rules that join dispatch, sinks, versions, weights, evaluations and the end.

Events come in as method calls with the time; `advance` is the one door through which everything that follows is
decided, from what is at that moment: which minimums hold, which batches are formed, which evaluations start, what is
dispatched, whether the run is over. Instructions come out of `drain`; the driver performs them, with asyncio in the
service and in virtual time elsewhere. Invariant: while a batch is wanted, an environment can deliver and every part
answers, a batch is formed in bounded time, because whatever is waited for has an event or a time (`next_event_at`)
after which `advance` is called again. `waits` says what is waited for. No asyncio, no clock, no I/O.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import structlog

from envs.addresses import shown_url
from envs.wire import Failure, Result
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.ports import CancelAttempt, GroupCompleted, GroupDropped
from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.facts.steps import SLOWEST
from orchestrator.mix import Change
from orchestrator.run.commands import Command, Drain, Endpoint, Origin, Resume, as_json
from orchestrator.run.control import Control, Reply
from orchestrator.run.minimums import Minimums
from orchestrator.run.parts import Parts
from orchestrator.run.patience import Patience
from orchestrator.run.ports import (
    DrainRun,
    EndRun,
    EvaluationFinished,
    RunInstruction,
)
from orchestrator.run.settings import RunSettings
from orchestrator.run.weights import RunWeights

log = structlog.get_logger()

MISMATCH_REMEDY = (
    "what the trainer computes is not what was sampled: look whether it has the weights of the published version, "
    "recomputes at the sampled temperature and cuts, and computes in the same precision as the engines"
)


class RunState(StrEnum):
    """Where a run is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"


class Run:
    """Decides; see the module's docstring."""

    def __init__(self, settings: RunSettings, parts: Parts) -> None:
        self.settings = settings
        self.parts = parts
        self.state = RunState.STARTING
        self.acknowledged = 0
        """Last step that every rank is done with; it may be trained on, and its version published, before."""
        self.ended = ""
        """Why the run is over; empty while it is not."""
        self.progressed = 0.0
        """When a rollout last ended or a batch was last formed."""
        self.weights = RunWeights(parts.versions, parts.journal)
        self.minimums = Minimums(settings, parts)
        self.control = Control(settings, parts)
        self._patience = Patience(parts.dispatcher.flight, {env.name: env.limits for env in settings.train})
        self._out: list[RunInstruction] = []
        self.held_until: float | None = None
        """When the group that holds the next batch back is given up, or no longer waited for."""
        self._formed_from: tuple[object, ...] = ()

    # --- what happens ------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin, or go on where an earlier process ended; everything is restored and the servers are there."""
        self.state = RunState.RUNNING
        self.progressed = now
        self.parts.facts.begin(now)
        if (asked_for := self.weights.asked_for) is not None:
            self._out.append(asked_for)

    def on_result(self, attempt: Attempt, result: Result, now: float) -> None:
        """An attempt brought rollouts back."""
        self.progressed = now
        parts = self.parts
        if not attempt.ended:
            parts.pool.note_success(attempt.endpoint)
            group = attempt.group
            group.version_end = max(group.version_end, attempt.endpoint.version_newest)
            if group.lane is Lane.TRAIN:
                parts.sink.saw(group.env, result)
                parts.facts.returned(group.env, result, now - attempt.started)
                group.slowest_s = max(group.slowest_s, now - attempt.started)
        parts.dispatcher.finish(attempt, result, now)
        self._absorb(now)

    def on_failure(self, attempt: Attempt, failure: Failure, now: float, *, together: int = 0) -> None:
        """An attempt failed; `together` above 0: its server died, with that many requests on it."""
        self.progressed = now
        parts = self.parts
        if not attempt.ended:
            parts.facts.failed(attempt.group.lane, attempt.group.env, failure.kind, failure.described)
            parts.archive.attempt_failed(attempt.group, failure, now)
            if attempt.group.lane is Lane.TRAIN:
                # A server's death cuts an attempt off: how long it would have taken, nobody knows.
                end = "cut" if together else "retryable" if failure.retryable else "failed"
                parts.facts.took(attempt.group.env, end, now - attempt.started)
        if together:
            parts.dispatcher.lose(attempt, together, now)
        else:
            if not attempt.ended:
                parts.pool.note_failure(attempt.endpoint, failure.kind)
            parts.dispatcher.fail(attempt, failure.kind, retryable=failure.retryable, now=now)
        self._absorb(now)

    def on_endpoint_lost(self, endpoint: Any, now: float) -> None:
        """What ran on an inference server is gone; it is asked again elsewhere."""
        self.parts.dispatcher.lose_endpoint(endpoint, now)
        self._absorb(now)

    def on_ack(self, step: int, now: float) -> None:
        """Every rank is done with a batch."""
        self.acknowledged = max(self.acknowledged, step)
        self.parts.journal.record_acknowledged(step)
        self.on_trained(step, now)

    def on_trained(self, step: int, now: float) -> None:
        """A step was trained on, though perhaps not acknowledged yet."""
        if self.weights.trained(step):
            self.save(now)

    def on_report(self, step: int, metrics: Mapping[str, float]) -> str:
        """The trainer's own numbers of a step; returns why they are refused, empty if they are not."""
        reports = self.parts.facts.reports
        before = reports.trouble
        problem = reports.add(step, metrics)
        if not problem:
            self.parts.journal.record_report(step, metrics)
        if reports.trouble and not before:
            log.warning("trainer.mismatch", found=reports.trouble, remedy=MISMATCH_REMEDY)
        return problem

    def on_publish(self, version: int, path: str | None, now: float, *, step: int = 0) -> None:
        """The trainer has a version, which comes of a step where it says so; older ones and repetitions are harmless."""
        asked_for = self.weights.publish(version, path, step=step)
        if asked_for is None:
            return
        if self.settings.mode == "drop":
            self.parts.dispatcher.drop_stale()
            self._absorb(now)
        self._out.append(asked_for)
        self.save(now)

    def on_sending(self, version: int | None, until: float, now: float) -> None:
        """The trainer sends a version to the inference servers, which stand still, at the latest until then; None: it is over."""
        self.weights.sending = None if version is None else (version, until)

    def on_loaded(self, version: int, path: str | None, now: float) -> None:
        """The inference servers have a version."""
        self.weights.loaded(version, path)
        self.save(now)

    def on_refused(self, version: int, why: str, now: float) -> None:
        """No inference server could load a version: the last one stays in use, and it was never published."""
        self.weights.refuse(version, why)
        self.save(now)

    def on_control(self, command: Command, origin: Origin, now: float) -> Reply:
        """A person wants something changed; whatever is refused has changed nothing."""
        reply = Reply(self._deaf(), refused=True, changed=False)
        if not reply.text:
            reply = self.control.apply(command, origin)
        told = as_json(command)
        if isinstance(command, Endpoint):
            told["url"] = shown_url(command.url)
        if reply.refused:
            log.warning("control.refused", **told, by=origin.by, why=reply.text)
        elif reply.changed:
            log.warning("control.changed", **told, by=origin.by, what=reply.text)
            self.parts.journal.record_control(origin.at, origin.by, told)
            if isinstance(command, Drain):
                self._out.append(DrainRun(f"drained by {origin.by}"))
            if isinstance(command, Resume):
                # Nothing could move meanwhile, which says nothing about what can now.
                self.progressed = now
                self.parts.mix.begin_anew(now)
            self.save(now)
        return reply

    def on_endpoint_found(self, url: str, source: str, now: float) -> None:
        """A source names an inference server."""
        self.control.found(url, source)

    def on_endpoint_gone(self, url: str, now: float) -> None:
        """No source names an inference server any more."""
        if self.control.gone(url):
            self.save(now)

    def _deaf(self) -> str:
        """Why no command is taken now; empty while any is."""
        match self.state:
            case RunState.STARTING:
                return "the run is starting; try again when it runs"
            case RunState.DRAINING:
                return "the run is draining: what is open ends, then it exits"
            case RunState.FINISHED:
                return "the run is over"
            case RunState.RUNNING:
                return f"the run is over: {self.ended}" if self.ended else ""

    def stop(self, now: float) -> None:
        """Open nothing new and form nothing more; what is in flight may still end."""
        self.state = RunState.DRAINING
        self.parts.evaluations.stop()

    def end(self, why: str) -> None:
        """The run is over; the first reason counts."""
        if not self.ended:
            self.ended = why
            self._out.append(EndRun(why))

    def abandon(self, now: float) -> None:
        """Give up what is in flight; its tasks are asked again by a later process."""
        self.state = RunState.FINISHED
        self.parts.dispatcher.abandon("shutdown")
        self._absorb(now)

    @property
    def version(self) -> int:
        """Version that the inference servers sample from."""
        return self.parts.versions.serving

    @property
    def all_acknowledged(self) -> bool:
        """Whether every rank is done with the last batch of the run."""
        return self.settings.max_steps is not None and self.acknowledged >= self.settings.max_steps

    @property
    def idle(self) -> bool:
        """Whether no group is open."""
        return not self.parts.dispatcher.flight.busy

    @property
    def paused(self) -> bool:
        """Whether a person has paused the run."""
        return self.control.paused is not None

    # --- what follows ------------------------------------------------------------------------------------------------

    def advance(self, now: float, *, at_most: int = 256) -> bool:
        """Decide everything that is to be decided now; whether there is more to do at once."""
        parts = self.parts
        parts.facts.spends(self._doing(), now)
        if self.state is RunState.RUNNING:
            self._report_quarantines(now)
            available = frozenset([name for name, port in parts.train.items() if port.available])
            self.minimums.refresh(available)
            # Probes are not waited for either: one comes after the other, and hardly ever with anything.
            available -= parts.mix.probed
            self._form(now, available)
            self._evaluate(now)
        more = parts.dispatcher.advance(now, at_most=at_most)
        if self.state is RunState.RUNNING and parts.sink.wanted:
            parts.dispatcher.drop_idle(now)
        absorbed = self._absorb(now)
        if self.state is RunState.RUNNING:
            if parts.sink.stuck and not parts.pace.reserved and not absorbed:
                # Nothing in flight could make the batch exact, and nothing more may start.
                self._form(now, available, at_once=True)
            if parts.sink.finished and parts.pace.reserved:
                # Nothing that is in flight could be trained on any more.
                parts.dispatcher.abandon("run_complete", lanes=(Lane.TRAIN,))
                absorbed = self._absorb(now)
            self._end_if_complete()
        return more or absorbed

    def _doing(self) -> str:
        """What the run's time goes to; see `facts.interval.TIMES`."""
        parts = self.parts
        if self.control.paused is not None:
            return "paused"
        if not parts.sink.wanted:
            return "trainer"
        if parts.pace.reserved:
            return "rollouts"
        if self.paused and parts.versions.formed <= parts.versions.trained:
            return "paused"
        if parts.versions.serving != parts.versions.published:
            return "weights"
        return "trainer" if parts.versions.formed > parts.versions.trained else "rollouts"

    def next_event_at(self, now: float) -> float | None:
        """When `advance` has something to do even if nothing happens."""
        times = [self.parts.dispatcher.next_event_at(now)]
        if self.state is RunState.RUNNING:
            # While a batch is held back for a group in flight nothing is split, however long the queue has been stuck.
            times += [self.parts.buffer.split_at if self.parts.sink.stuck else None, self.held_until]
        return min((time for time in times if time is not None), default=None)

    def drain(self) -> list[RunInstruction]:
        """Instructions since the last call, in order."""
        out, self._out = self._out, []
        return out

    def closed(self) -> Wait | None:
        """Why no training group may be opened at all."""
        if self.state is not RunState.RUNNING:
            starting = self.state is RunState.STARTING
            return (
                Wait(WaitKind.START, "the start") if starting else Wait(WaitKind.DRAIN, "open groups to end")
            )
        if self.paused:
            return self.control.wait()
        if self.parts.sink.finished:
            return Wait(WaitKind.DONE, "the trainer to finish the last batches")
        if self.parts.journal.full:
            backlog = self.parts.journal.backlog_bytes
            return Wait(WaitKind.JOURNAL, f"the disk ({backlog >> 20} MiB are not written yet)")
        return None

    def _form(self, now: float, available: frozenset[str], *, at_once: bool = False) -> None:
        """Form what can be; nothing is looked at again unless something changed or a time has come."""
        parts = self.parts
        seen = (parts.buffer.revision, parts.pace.revision, parts.versions.revision, available, at_once)
        due = min((at for at in (parts.buffer.split_at, self.held_until) if at is not None), default=None)
        if seen == self._formed_from and (due is None or now < due):
            return
        before = parts.versions.formed
        parts.sink.form(now, available, at_once=at_once, states=self.states)
        overdue = self._patience.overdue(parts.sink.held, now)
        while overdue is not None:
            log.warning("group.overdue", task=overdue.task.key, seconds=round(now - overdue.opened, 1))
            parts.dispatcher.drop(overdue, "overdue", again=True)
            self._absorb(now)
            parts.sink.form(now, available, at_once=at_once, states=self.states)
            overdue = self._patience.overdue(parts.sink.held, now)
        while self._patience.overdue(parts.sink.awaited, now):
            parts.sink.wait_no_longer()
            parts.sink.form(now, available, at_once=at_once, states=self.states)
        self.held_until = self._patience.ends_at(parts.sink.held or parts.sink.awaited)
        self._formed_from = (
            parts.buffer.revision,
            parts.pace.revision,
            parts.versions.revision,
            available,
            at_once,
        )
        if parts.versions.formed > before:
            self.progressed = now

    def _evaluate(self, now: float) -> None:
        """Note which evaluations are due, and start them unless the run is paused."""
        versions, evaluations = self.parts.versions, self.parts.evaluations
        last = self.settings.max_steps is not None and versions.trained >= self.settings.max_steps
        # Also while the run is paused: one that nobody knows to be due does not keep the run from its end.
        evaluations.reached(versions.trained, versions.published, last=last)
        if self.paused:
            return
        for evaluation in evaluations.start(
            versions.trained, serving=versions.serving, published=versions.published, now=now
        ):
            log.info(
                "eval.started", env=evaluation.plan.env, step=evaluation.step, version=evaluation.version
            )

    def _absorb(self, now: float) -> bool:
        """Give ended groups to their sinks; whether there were any."""
        absorbed = False
        while instructions := self.parts.dispatcher.drain():
            for instruction in instructions:
                match instruction:
                    case GroupCompleted(group):
                        absorbed = True
                        self._completed(group, now)
                    case GroupDropped(group, reason, again):
                        absorbed = True
                        if group.lane is Lane.TRAIN:
                            self.parts.sink.dropped(group, reason, again=again, now=now)
                        group.results.clear()
                    case CancelAttempt(attempt):
                        if attempt.group.lane is Lane.TRAIN:
                            self.parts.facts.took(attempt.group.env, "cut", now - attempt.started)
                        self._out.append(instruction)
                    case _:
                        self._out.append(instruction)
        return absorbed

    def _completed(self, group: PendingGroup, now: float) -> None:
        if group.lane is Lane.TRAIN:
            self._patience.learn(group.env, now - group.opened)
            self.parts.facts.took(group.env, SLOWEST, group.slowest_s)
            self.parts.sink.completed(group, now)
        else:
            self.parts.archive.evaluated(group, now)
            result = self.parts.eval_sink.completed(group, now)
            if result is not None:
                log.info("eval.finished", **result)
                self.parts.journal.record_eval(result)
                self._out.append(EvaluationFinished(result))
                self.save(now)
        group.results.clear()

    def _report_quarantines(self, now: float) -> None:
        for transition in self.parts.mix.drain_transitions():
            event = "env.quarantined" if transition.change is Change.QUARANTINED else "env.restored"
            log.warning(event, env=transition.env, acceptance=round(transition.acceptance, 3))

    def _end_if_complete(self) -> None:
        """End once every step is acknowledged, the last version is loaded and its evaluations are done."""
        versions = self.parts.versions
        if not self.all_acknowledged:
            return
        if self.parts.evaluations.idle and versions.serving == versions.published:
            self.end("max_steps reached")

    # --- what is remembered ------------------------------------------------------------------------------------------

    def save(self, now: float) -> None:
        """Put what a later process needs into the journal; the latest wins."""
        self.parts.journal.record_states(self.states(now))

    def states(self, now: float) -> dict[str, Any]:
        """What a later process needs, by the name of its part."""
        parts = self.parts
        return {
            "version": self.weights.state(),
            "mix": parts.mix.state_dict(),
            "facts": parts.facts.state_dict(now),
            "ledger": parts.ledger.state_dict(),
            "evals": parts.evaluations.state_dict(),
            "buffer": parts.buffer.state_dict(),
            "control": self.control.changes.state(),
        }
