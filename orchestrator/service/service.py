"""The life of a run: start, serve, finish, in that order.

Start: journal (which locks the run directory), the addresses, environments and inference servers side by side, then the
run, which depends on what those declared, then the trainer link. HTTP answers from the very start. Serve: until the steps are done,
the trainer says so, a stop is asked for, or a part fails. Finish: start nothing new, let what runs end for a bounded
time, record, tell the trainer; then everything is stopped in the reverse order of its start.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from orchestrator.config import Config, find_warnings
from orchestrator.config.sections import FROM_TRAINER
from orchestrator.dispatch.waits import WaitKind
from orchestrator.env_servers.env import EvalEnvs, TrainEnvs, side_by_side
from orchestrator.errors import JournalError, OrchestratorError
from orchestrator.facts import Status
from orchestrator.inference import InferencePool
from orchestrator.journal import Journal, JournalReader
from orchestrator.local.children import LocalChildren
from orchestrator.run.build import build_run
from orchestrator.run.resume import JournaledWeights, resume
from orchestrator.run.run import Run, RunState
from orchestrator.run.status import build_summary, diagnose
from orchestrator.service import blueprint, env_blueprint, inference_blueprint, secrets
from orchestrator.service.control import ControlDesk, changes_of, token_file
from orchestrator.service.driver import Driver
from orchestrator.service.front import Front
from orchestrator.service.health import Watchdog
from orchestrator.service.metrics_file import MetricsFile
from orchestrator.service.page import live_feed
from orchestrator.service.track_blueprint import build_samples, build_setups, shown_config
from orchestrator.service.weights import VersionChecks, WeightLoader
from orchestrator.service.wiring import (
    EvaluationFile,
    Offers,
    build_batch_server,
    join_shells,
    note_identity,
    open_archive,
    open_journal,
)
from orchestrator.track import Trackers
from orchestrator.trainer_link.encoding import check_shares
from orchestrator.trainer_link.server import PROBE_S, BatchServer, Link, open_link
from orchestrator.trainer_link.versions import POLL_S, VersionWatcher
from orchestrator.views.control import add_control
from orchestrator.views.http import build_app, serve_http

log = structlog.get_logger()

START_REPORT_S = 10.0
"""How often the log says what the start waits for."""

TELL_S = 5.0
"""How long ranks have to hear that there are no more batches."""


class Stop(asyncio.Event):
    """Set to have a run end in order; `reason` is what its summary says."""

    reason = "stopped by a signal"

    def ask(self, reason: str) -> None:
        """Have the run end, unless it is ending already."""
        if not self.is_set():
            self.reason = reason
            self.set()


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
            all_failing_s=lambda: 0.0 if run.paused else run.parts.mix.all_quarantined_for(clock()),
            diagnose=lambda: diagnose(run, clock()),
            clock=clock,
        )
        parts: list[Coroutine[Any, Any, object]] = [
            self.driver.drive(),
            self.loader.run(self.driver),
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
        log.info(
            "run.draining",
            inflight=self.run.parts.ledger.total_inflight,
            at_most_s=self.config.dispatch.drain_s,
        )
        try:
            async with asyncio.timeout(self.config.dispatch.drain_s):
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
        _write_json(self.config.run_dir / "summary.json", summary)
        log.info("run.finished", end=end, steps=summary["steps"], reward=summary["last_reward"])
        return summary

    async def _watch_versions(self) -> None:
        """Versions that the trainer leaves in a directory instead of publishing them over the link."""
        directory = self.config.trainer.versions_dir
        if directory is not None:
            newest = self.run.newest_version
            watcher = VersionWatcher(directory, on_version=self.server.publish, version=newest, poll_s=POLL_S)
            await watcher.run()

    async def _watch_journal(self) -> None:
        raise await asyncio.shield(self.journal_failed)


class _EndOfRun(Exception):  # noqa: N818  not an error: it ends the group of parts
    """The run is over."""


@asynccontextmanager
async def start_service(
    config: Config,
    *,
    fresh: bool = False,
    rewind_to: int | None = None,
    front: Front | None = None,
    link: Link | None = None,
) -> AsyncIterator[Service]:
    """Start every part; stop them when the block is left.

    `rewind_to`: a step to set the run back to. Who gives a `front` can look at the start meanwhile. `link`: a way to the trainer in place of the configured one.
    """
    blueprint.verify(config)
    async with AsyncExitStack() as stack:
        failed: asyncio.Future[JournalError] = asyncio.get_running_loop().create_future()
        journal = await stack.enter_async_context(
            open_journal(config, failed, fresh=fresh, rewind_to=rewind_to)
        )
        front = front or build_front(config)
        # Addresses in use are found before anything is started, and the status can be asked for from here on.
        desk = ControlDesk(front)
        http_address = await _serve_http(config, stack, front, desk)
        link = link or open_link(
            blueprint.trainer_address(config), keys=secrets.trainer_keys(config), probe_s=PROBE_S
        )
        stack.push_async_callback(link.aclose)
        _write_json(
            config.run_dir / "addresses.json",
            {"pid": os.getpid(), "trainer": link.address, "http": http_address},
        )
        recovered = journal.recover(world_size=config.trainer.world_size)
        check_shares(
            [batch for batch in recovered.batches if batch.step not in recovered.acknowledged],
            config.trainer.world_size,
        )
        archive = await open_archive(config, journal, recovered, stack, front)
        weights = JournaledWeights(recovered.state)
        weights.begin_with(inference_blueprint.initial_path(config) if weights.begins else None)
        children = await stack.enter_async_context(LocalChildren(config.run_dir))
        endpoints = [url.rstrip("/") for url in inference_blueprint.inference_urls(config, children)]
        changes = changes_of(config, recovered, endpoints)
        first, later = changes.endpoints(endpoints)
        pool = await stack.enter_async_context(
            inference_blueprint.build_pool(
                config,
                first,
                version=weights.loaded,
                weights_path=weights.loaded_path,
                train=True,
                max_inflight=changes.changed_max_inflight,
            )
        )
        train, evals = env_blueprint.build_train_envs(config), env_blueprint.build_eval_envs(config)
        stack.push_async_callback(lambda: side_by_side([train.shutdown(), evals.shutdown()]))
        await train.spawn()
        await evals.spawn()
        front.await_neighbours([*train.values(), *evals.values()], pool)
        await _wait_ready(
            children,
            [train.connect(), evals.connect(), pool.wait_ready(config.inference.ready_timeout_s)],
            front,
        )
        for url in later:
            pool.add_endpoint(url)
        note_identity(config, journal, train)
        trackers = Trackers(
            build_setups(config),
            config=shown_config(config),
            run_id=journal.run_id,
            resumed=not recovered.empty,
            samples=build_samples(config),
        )
        stack.push_async_callback(trackers.aclose)
        front.trackers = trackers.status
        offers = Offers(config.max_steps)
        run = build_run(
            blueprint.build_settings(config, train, evals, endpoints=endpoints),
            train=train,
            evals=evals,
            pool=pool,
            journal=journal,
            archive=archive,
            offer=offers,
            now=time.monotonic(),
        )
        run.begins_with_trainer = config.inference.initial_weights == FROM_TRAINER
        with JournalReader(config.run_dir) as reader:
            resume(run, recovered, weights, reader.evals())
        await stack.enter_async_context(MetricsFile(config.run_dir, [trackers.tell]))
        results = EvaluationFile(config.run_dir)
        results.rewrite(run.parts.eval_sink.results)
        checks, loader = VersionChecks(pool, local=config.local is not None), WeightLoader(pool)
        driver = Driver(
            run,
            train=train,
            evals=evals,
            on_weights=loader.load,
            on_evaluation=results.append,
            clock=time.monotonic,
        )
        join_shells(driver, pool=pool, loader=loader, journal=journal)
        for env in (*train.values(), *evals.values()):
            env.on_free = driver.wake
        server = build_batch_server(
            config,
            driver,
            journal,
            recovered,
            link=link,
            check_version=checks.ask,
            wait_loaded=partial(loader.wait, driver),
        )
        offers.server = server
        offers.recovered(recovered)
        await stack.enter_async_context(server)
        stack.callback(driver.close)
        front.enter(driver, server, world_size=config.trainer.world_size)
        stack.callback(front.leave)
        stop = Stop()
        driver.on_drain = stop.ask
        desk.open(driver, journal)
        stack.callback(desk.close)
        if config.local is not None and config.local.trainer:
            children.start_trainer(
                address=server.address,
                learning_rate=config.local.learning_rate,
                world_size=config.trainer.world_size,
                token=secrets.trainer_token(config),
            )
        yield Service(
            config=config,
            driver=driver,
            journal=journal,
            children=children,
            train=train,
            evals=evals,
            pool=pool,
            server=server,
            checks=checks,
            loader=loader,
            http_address=http_address,
            journal_failed=failed,
            front=front,
            stop=stop,
        )


def build_front(config: Config) -> Front:
    """What the outside sees of a run of this configuration, from before its start."""
    return Front(
        notes=[f"{path}: {warning}" for path, warning in find_warnings(config.model_dump())],
        max_steps=config.max_steps,
        batch_size=config.batch.size,
    )


async def _wait_ready(
    children: LocalChildren, waits: Sequence[Coroutine[Any, Any, None]], front: Front
) -> None:
    """Wait for all neighbours side by side; a policy server that dies meanwhile ends the wait."""
    watch = asyncio.create_task(children.watch_server())  # noqa: TID251  all are ended and awaited below
    ready = asyncio.create_task(side_by_side(waits))  # noqa: TID251  same
    reports = asyncio.create_task(_report_start(front))  # noqa: TID251  same
    try:
        await asyncio.wait(
            [ready, watch] if children.has_server else [ready], return_when=asyncio.FIRST_COMPLETED
        )
        if children.has_server and watch.done():
            await watch
        await ready
    finally:
        for waiting in (watch, ready, reports):
            waiting.cancel()
        await asyncio.wait([watch, ready, reports])


async def _report_start(front: Front) -> None:
    """Say what is loading, as long as something is; the pool speaks for the inference servers."""
    while True:
        await asyncio.sleep(START_REPORT_S)
        loading = [wait.text for wait in front.start_waits() if wait.kind is WaitKind.SERVER]
        if loading:
            log.info("run.starting", waits_for=loading)


async def _serve_http(config: Config, stack: AsyncExitStack, front: Front, desk: ControlDesk) -> str | None:
    """Serve from the very start, so that a port in use is found at once."""
    if not config.http.enabled:
        return None
    token = secrets.read_variable("http.token_env", config.http.token_env)
    app = build_app(status=front.status, metrics=front.metrics, token=token)
    own_token = stack.enter_context(token_file(config.run_dir))
    add_control(app, tell=desk.tell, tokens=[own_token, *([token] if token else [])])
    feed = live_feed(config.run_dir, front.status)
    feed.add_to(app)
    address = await stack.enter_async_context(serve_http(app, host=config.http.host, port=config.http.port))
    stack.callback(feed.close)
    return address


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, so that a reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
