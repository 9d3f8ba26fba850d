"""The life of a run once it is started (`starting`): serve, then finish.

Serve: until the steps are done, the trainer says so, a stop is asked for, or a part fails. Finish: start nothing new, let
what runs end for a bounded time, record, tell the trainer; then everything is stopped in the reverse order of its start.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from orchestrator.config import Config
from orchestrator.env_servers.env import EvalEnvs, TrainEnvs
from orchestrator.errors import JournalError, OrchestratorError
from orchestrator.facts import Status
from orchestrator.inference import InferencePool
from orchestrator.journal import Journal
from orchestrator.local.children import LocalChildren
from orchestrator.run.run import Run, RunState
from orchestrator.run.status import build_summary, diagnose
from orchestrator.run.waits import failing_for
from orchestrator.service.driver import Driver
from orchestrator.service.front import Front
from orchestrator.service.health import Watchdog
from orchestrator.service.updates import TrainerUpdates
from orchestrator.service.weights import VersionChecks, WeightLoader
from orchestrator.trainer_link.server import BatchServer
from orchestrator.trainer_link.versions import POLL_S, VersionWatcher

log = structlog.get_logger()

TELL_S = 5.0
"""How long ranks have to hear that there are no more batches."""


class Stop(asyncio.Event):
    """Set to have a run end in order; `reason` is what its summary says."""

    reason = "stopped by a signal"
    rewind_to: int | None = None
    """The step that the run is to be set back to when it has ended, by whoever started it."""

    def ask(self, reason: str) -> None:
        """Have the run end, unless it is ending already."""
        if not self.is_set():
            self.reason = reason
            self.set()

    def rewind(self, step: int) -> None:
        """Have the run end in order to be set back to a step, unless it is ending already."""
        if not self.is_set():
            self.rewind_to = step
            self.ask(f"to be set back to step {step}, as the trainer asks")


@dataclass(frozen=True, slots=True)
class Service:
    """A started service. `stop` set: drain, save, end."""

    config: Config
    driver: Driver[Run]
    journal: Journal
    children: LocalChildren
    train: TrainEnvs
    evals: EvalEnvs
    pool: InferencePool
    server: BatchServer
    checks: VersionChecks
    loader: WeightLoader
    updates: TrainerUpdates
    http_address: str | None
    journal_failed: asyncio.Future[JournalError]
    front: Front
    stop: Stop

    @property
    def run(self) -> Run:
        """The rules that this service drives."""
        return self.driver.run

    def status(self) -> Status:
        """The run at this moment."""
        return self.front.read(self.driver)

    async def serve(self, *beside: Coroutine[Any, Any, None]) -> str:
        """Run every part until the end; returns why it came. `beside` runs as long."""
        run, config, clock = self.run, self.config, self.driver.clock
        run.start(clock())
        watchdog = Watchdog(
            timeout_s=config.dispatch.stall_timeout_s,
            exit_on_stall=config.dispatch.exit_on_stall,
            starved=lambda: run.state is RunState.RUNNING and run.parts.sink.starved,
            # A paused run stands still because somebody wants it to.
            progressed_at=lambda: clock() if run.paused else run.progressed,
            all_failing_s=lambda: failing_for(run, clock()),
            bereft=self._bereft,
            diagnose=lambda: diagnose(run, clock()),
            clock=clock,
        )
        parts: list[Coroutine[Any, Any, object]] = [
            self.driver.drive(),
            self.loader.run(self.driver),
            self.updates.run(self.driver),
            self.checks.run(),
            self.front.lag.run(),
            self.front.disk.run(config.run_dir),
            watchdog.run(),
            self.pool.run(),
            self.train.run(),
            self.evals.run(),
            self.children.watch_server(),
            self.children.watch_trainer(),
            self._watch_journal(),
            self._watch_versions(),
            *beside,
        ]
        log.info(
            "run.started", run_dir=str(config.run_dir), trainer=self.server.address, http=self.http_address
        )
        return await self._until_end(parts)

    async def _until_end(self, parts: Sequence[Coroutine[Any, Any, object]]) -> str:
        """The parts run in one group; the run's end, a stop or the first failure cancels them all."""

        async def end() -> None:
            await self.driver.ended
            raise _EndOfRun

        async def stopped() -> None:
            await self.stop.wait()
            if not self.driver.ended.done():
                await self._drain()
            raise _EndOfRun

        try:
            async with asyncio.TaskGroup() as group:
                for part in (end(), stopped(), *parts):
                    group.create_task(part)
        except BaseExceptionGroup as errors:
            ended, failed = errors.split(_EndOfRun)
            found = list(failed.exceptions) if failed is not None else []
            if ended is None:
                found.sort(key=lambda error: not isinstance(error, OrchestratorError))
                cause = found.pop(0)
            for error in found:
                log.error("part.failed", error=f"{type(error).__name__}: {error}", note="as the run ended")
            if ended is None:
                raise cause from None
        return await self.driver.ended

    async def _drain(self) -> None:
        """Open nothing new, form nothing more, and let open groups end, for a bounded time."""
        self.driver.tell(self.run.stop)
        # What runs was sampled by weights that a run which is set back gives up.
        at_most_s = self.config.dispatch.drain_s if self.stop.rewind_to is None else 0.0
        log.info("run.draining", inflight=self.run.parts.ledger.total_inflight, at_most_s=at_most_s)
        try:
            async with asyncio.timeout(at_most_s):
                await self.driver.wait_idle()
        except TimeoutError:
            log.info("run.drain_ended", inflight=self.run.parts.ledger.total_inflight)
        self.run.end(self.stop.reason)
        self.driver.perform()

    async def finish(self, end: str) -> dict[str, Any]:
        """Record everything, tell the trainer, write the summary."""
        run, now = self.run, self.driver.clock()
        run.state = RunState.FINISHED
        run.save(now)
        missed = [*run.parts.evaluations.due, *(e.plan.env for e in run.parts.evaluations.active)]
        if missed:
            log.warning("eval.skipped", envs=missed, why=f"the run ended: {end}")
        summary = {
            **build_summary(run, end, now),
            "run_dir": str(self.config.run_dir),
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        await self.journal.flush()
        if not self.stop.is_set():
            self.server.finish(end)
            if not await self.server.wait_told(TELL_S):
                log.warning("trainer.not_told", reason="some ranks did not ask for another batch in time")
        write_json(self.config.run_dir / "summary.json", summary)
        log.info("run.finished", end=end, steps=summary["steps"], reward=summary["last_reward"])
        return summary

    def _bereft(self) -> str:
        """Why no weights will come: those of the run are gone, and the reference trainer has no batch to make others from; empty otherwise."""
        versions, missing = self.run.parts.versions, self.pool.missing_weights
        if not missing or not self.children.has_trainer or versions.formed > versions.trained:
            return ""
        return (
            f"{missing}; the reference trainer has no batch to make others from. Put the folder back, set the run back to a "
            "step whose weights are there (--rewind-to STEP), or start over (--fresh)"
        )

    async def _watch_versions(self) -> None:
        """Versions that the trainer leaves in a directory instead of publishing them over the link."""
        directory = self.config.trainer.versions_dir
        if directory is not None:
            newest = self.run.weights.newest
            watcher = VersionWatcher(directory, on_version=self.server.publish, version=newest, poll_s=POLL_S)
            await watcher.run()

    async def _watch_journal(self) -> None:
        raise await asyncio.shield(self.journal_failed)


class _EndOfRun(Exception):  # noqa: N818  not an error: it ends the group of parts
    """The run is over."""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, so that a reader never sees half a file; JournalError where the disk does not take it."""
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise JournalError(f"{path}: cannot be written: {error.strerror}") from None
