"""A run under way: what happens when a batch is acknowledged, a version published, an evaluation finished.

Holds the parts that `service` has wired and the rules between them; starts nothing by itself. Everything it knows is
answered by `status()`; everything that a later process needs is in the journal by `save()`.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

from orchestrator.buffer import BatchBuffer
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ledger import Lane, Ledger
from orchestrator.dispatch.staleness import Staleness
from orchestrator.dispatch.work import PendingGroup
from orchestrator.env_servers.env import Env
from orchestrator.facts import Facts, Status
from orchestrator.facts.status import build_status
from orchestrator.groups.group import Group
from orchestrator.inference import Endpoint, InferencePool, WeightUpdateError
from orchestrator.journal import Journal
from orchestrator.mix import Change, CircuitBreaker
from orchestrator.service.driver import Driver
from orchestrator.service.health import LoopLag
from orchestrator.sinks.eval_sink import Evals
from orchestrator.sinks.train_sink import TrainSink

log = structlog.get_logger()

UPDATE_RETRY_S = 5.0
"""Pause before a version that could not be loaded is tried again; a newer one is tried at once."""


class Run:
    """The parts of a run and what connects them."""

    def __init__(
        self,
        *,
        run_dir: Path,
        max_steps: int | None,
        train: Mapping[str, Env],
        pool: InferencePool,
        journal: Journal,
        buffer: BatchBuffer[Group],
        staleness: Staleness,
        ledger: Ledger,
        mix: CircuitBreaker,
        facts: Facts,
        evals: Evals,
        clock: Callable[[], float],
    ) -> None:
        self.run_dir = run_dir
        self.max_steps = max_steps
        self.train = train
        self.pool = pool
        self.journal = journal
        self.buffer = buffer
        self.staleness = staleness
        self.ledger = ledger
        self.mix = mix
        self.facts = facts
        self.evals = evals
        self.lag = LoopLag()
        self.state = "starting"
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the run ends, once it does."""
        self.acknowledged = 0
        """Last step that every rank is done with; it may be trained on, and its version published, before."""
        self.weights_path: str | None = None
        self.clock = clock
        self._update_failed = False
        self._published = asyncio.Event()
        self._group_ended = asyncio.Event()
        self._evals_file = run_dir / "evals.jsonl"
        self.assembly: TrainSink
        self.core: Dispatcher
        self.driver: Driver

    def attach(self, *, assembly: TrainSink, core: Dispatcher, driver: Driver) -> None:
        """The parts that need this object's callbacks, wired right after it was made."""
        self.assembly, self.core, self.driver = assembly, core, driver

    # --- what happens ----------------------------------------------------------------------------------------------

    def on_ack(self, step: int) -> None:
        """Every rank is done with a batch."""
        self.acknowledged = max(self.acknowledged, step)
        self.journal.record_acknowledged(step)
        self._trained(step)
        self.end_if_complete()

    def end_if_complete(self) -> None:
        """End once every step is acknowledged, the last version is loaded and its evaluations are done."""
        if self.max_steps is None or self.acknowledged < self.max_steps:
            return
        updating = self.staleness.serving != self.staleness.published and not self._update_failed
        if not self.evals.active and not updating:
            self.end("max_steps reached")

    def on_publish(self, version: int, path: str | None) -> None:
        """The trainer has a new version; older ones and repetitions are harmless.

        A version that is named after a step says that the step was trained on; others are told by `on_trained`.
        """
        if version <= self.staleness.published:
            log.info("version.ignored", version=version, newest=self.staleness.published)
            return
        self.staleness.publish(version)
        self.weights_path = path
        if version <= self.staleness.formed:
            self._trained(version)
        self.save()
        self._published.set()

    def on_trained(self, step: int) -> None:
        """A version comes from training on a step, which may not be acknowledged yet."""
        self._trained(min(step, self.staleness.formed))

    def on_trainer_done(self) -> None:
        """The trainer wants no more batches."""
        self.end("the trainer said it is done")

    def end(self, why: str) -> None:
        """End the run; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(why)

    def completed(self, group: PendingGroup, now: float) -> None:
        """A group has its rollouts."""
        if group.lane is Lane.EVAL:
            self._eval_completed(group, now)
        else:
            self.assembly.completed(group, now)
        self._after_group()

    def dropped(self, group: PendingGroup, reason: str, *, again: bool, now: float) -> None:
        """A group ended without a result; an evaluation cut short is started again by a later process."""
        if group.lane is Lane.TRAIN:
            self.assembly.dropped(group, reason, again=again, now=now)
        self._after_group()

    def on_servers_changed(self) -> None:
        """Env servers became ready, or went away."""
        self._refresh_minimums()
        self.assembly.form(self.clock())
        self.on_change()

    def _refresh_minimums(self) -> None:
        """The minimum of an env without a server, or in quarantine, is waived."""
        for name, env in self.train.items():
            self.buffer.set_available(name, env.available and name not in self.mix.quarantined)

    def on_endpoint_lost(self, endpoint: Endpoint) -> None:
        """What ran on an inference server is gone; it is asked again elsewhere."""
        now = self.clock()
        self.core.lose_endpoint(endpoint, now)
        self.driver.perform(now)
        self.on_change()

    def close(self) -> None:
        """Give up what is in flight; its tasks are asked again by a later process."""
        now = self.clock()
        self.core.abandon("shutdown", now)
        self.driver.perform(now)

    async def wait_idle(self) -> None:
        """Wait until no group is open."""
        while self.core.open_groups:
            self._group_ended.clear()
            await self._group_ended.wait()

    def _after_group(self) -> None:
        for transition in self.mix.drain_transitions():
            event = "env.quarantined" if transition.change is Change.QUARANTINED else "env.restored"
            log.warning(event, env=transition.env, acceptance=round(transition.acceptance, 3))
            self._refresh_minimums()
        self._group_ended.set()
        self.on_change()

    def _eval_completed(self, group: PendingGroup, now: float) -> None:
        """An evaluation task is done; the result is written when it was the last."""
        result = self.evals.finished(group, now)
        if result is None:
            return
        log.info("eval.finished", **result)
        self.journal.record_eval(result)
        with self._evals_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        self.save()
        self.end_if_complete()

    def trigger_evals(self) -> None:
        """Start the evaluations that are due after the last trained step."""
        for run in self.evals.trigger(self.staleness.trained, self.staleness.serving, self.clock()):
            log.info("eval.started", env=run.plan.env, step=run.step, version=run.version)
            self.driver.wake()

    def on_change(self) -> None:
        """Something that dispatch looks at has changed."""
        self.core.stuck = self.assembly.stuck
        was_paused = self.core.paused
        self.core.paused = self.state != "running" or self.buffer.full or self.journal.full
        if was_paused and not self.core.paused:
            self.core.resume_smoothly(self.clock())
        if self.assembly.finished and not self.core.paused:
            # Nothing that is in flight could be trained on any more.
            self.core.paused = True
            self.core.abandon("run_complete", self.clock(), lanes=(Lane.TRAIN,))
        self.driver.wake()

    async def update_weights(self) -> None:
        """Bring the inference servers to every published version, newest first, until cancelled."""
        while True:
            await self._published.wait()
            self._published.clear()
            version, path = self.staleness.published, self.weights_path
            if self.staleness.mode == "drop":
                self.core.drop_stale(self.clock())
                self.driver.perform(self.clock())
            try:
                await self.pool.update_weights(version, path)
            except WeightUpdateError as error:
                log.error("version.not_loaded", version=version, error=str(error), retry_in_s=UPDATE_RETRY_S)
                self._update_failed = True
                self.end_if_complete()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._published.wait(), UPDATE_RETRY_S)
                self._published.set()
                continue
            self._update_failed = False
            self.staleness.serving = version
            self.save()
            self.trigger_evals()
            self.on_change()
            self.end_if_complete()

    def _trained(self, step: int) -> None:
        if step <= self.staleness.trained:
            return
        self.staleness.trained = step
        self.assembly.form(self.clock())
        self.save()
        if self.staleness.serving == self.staleness.published:
            self.trigger_evals()
        self.on_change()

    # --- what is known ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Put what a later process needs into the journal; the latest wins."""
        now = self.clock()
        record = self.journal.record_state
        trained = self.staleness.trained
        record("version", {**self.staleness.state_dict(), "path": self.weights_path, "trained": trained})
        record("mix", self.mix.state_dict())
        record("facts", self.facts.state_dict(now))
        record("ledger", self.ledger.state_dict())
        record("evals", self.evals.state_dict())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier process; the mix says what changed in the configuration meanwhile."""
        if "mix" in state:
            for note in self.mix.load_state_dict(state["mix"]):
                log.warning("mix.changed", note=note)
            self.mix.forget_inflight()
        if "facts" in state:
            self.facts.load_state_dict(state["facts"])
        if "ledger" in state:
            self.ledger.load_state_dict(state["ledger"])
        if "evals" in state:
            self.evals.load_state_dict(state["evals"])

    def restore_evals(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Results of earlier processes of this run; the file is written anew, so that it says what the journal says."""
        self.evals.results = [{key: row[key] for key in row if key != "at"} for row in results]
        lines = [json.dumps(result) + "\n" for result in self.evals.results]
        if lines or self._evals_file.exists():
            self._evals_file.write_text("".join(lines), encoding="utf-8")

    def status(self) -> Status:
        """The run at this moment."""
        return build_status(self)
