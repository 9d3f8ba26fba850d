"""The one place that wires everything: start, serve, finish, in that order.

Start: journal (which locks the run directory), environments and inference servers side by side, then the parts that
depend on what those declared, then the trainer link and HTTP. Serve: until the steps are done, the trainer says so, a
stop is asked for, or a part fails. Finish: start nothing new, let what runs end for a bounded time, record, tell the
trainer; then everything is stopped in the reverse order of its start.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from orchestrator.config import Config
from orchestrator.env_servers.env import EvalEnvs, TrainEnvs, side_by_side
from orchestrator.errors import JournalError, OrchestratorError
from orchestrator.facts.status import build_summary, diagnose
from orchestrator.inference import InferencePool
from orchestrator.journal import Journal
from orchestrator.local.children import LocalChildren
from orchestrator.run.run import Run
from orchestrator.service import blueprint
from orchestrator.service.health import Watchdog
from orchestrator.service.wiring import (
    build_batch_server,
    build_run,
    connect,
    offer,
    offer_recovered,
    open_journal,
    restore,
)
from orchestrator.trainer_link.server import BatchServer
from orchestrator.trainer_link.versions import VersionWatcher
from orchestrator.views.http import build_app, serve_http
from orchestrator.views.metrics import render_metrics

log = structlog.get_logger()

DRAIN_S = 10.0
"""How long rollouts in flight may go on after a stop was asked for."""

TELL_S = 5.0
"""How long ranks have to hear that there are no more batches."""


@dataclass(frozen=True, slots=True)
class Service:
    """A started service. `stop` set: drain, save, end."""

    config: Config
    run: Run
    journal: Journal
    children: LocalChildren
    train: TrainEnvs
    evals: EvalEnvs
    pool: InferencePool
    server: BatchServer
    http_address: str | None
    journal_failed: asyncio.Future[JournalError]
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, *beside: Coroutine[Any, Any, None]) -> str:
        """Run every part until the end; returns why it came. `beside` runs as long."""
        run, config = self.run, self.config
        run.state = "running"
        run.on_change()
        run.assembly.form(time.monotonic())
        run.trigger_evals()
        run.end_if_complete()
        watchdog = Watchdog(
            timeout_s=config.dispatch.stall_timeout_s,
            exit_on_stall=config.dispatch.exit_on_stall,
            progressed_at=lambda: run.driver.progressed,
            all_failing_s=lambda: run.mix.all_quarantined_for(time.monotonic()),
            diagnose=lambda: diagnose(run),
            clock=time.monotonic,
        )
        parts: list[Coroutine[Any, Any, object]] = [
            run.driver.run(),
            run.update_weights(),
            run.lag.run(),
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
            stopped: asyncio.Future[Any] = asyncio.create_task(self.stop.wait())  # noqa: TID251  ended below
            try:
                waits: list[asyncio.Future[Any]] = [self.run.ended, stopped]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopped.cancel()
            if not self.run.ended.done():
                self.run.end("stopped by a signal")
                await self._drain()
            raise _EndOfRun

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(end(), name="end")
                for part in parts:
                    group.create_task(part)
        except BaseExceptionGroup as errors:
            if errors.subgroup(_EndOfRun) is None:
                known = errors.subgroup(OrchestratorError)
                raise (known or errors).exceptions[0] from None
        return self.run.ended.result()

    async def _drain(self) -> None:
        """Open nothing new and let open groups end, for a bounded time."""
        self.run.state = "draining"
        self.run.on_change()
        log.info("run.draining", open_groups=self.run.core.open_groups, at_most_s=DRAIN_S)
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.run.wait_idle()
        except TimeoutError:
            log.info("run.drain_ended", open_groups=self.run.core.open_groups)

    async def finish(self, end: str) -> dict[str, Any]:
        """Record everything, tell the trainer, write the summary."""
        run = self.run
        run.state = "finished"
        run.save()
        summary = build_summary(run, end)
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
            newest = self.run.staleness.published
            await VersionWatcher(directory, on_version=self.server.publish, version=newest).run()

    async def _watch_journal(self) -> None:
        raise await asyncio.shield(self.journal_failed)


class _EndOfRun(Exception):  # noqa: N818  not an error: it ends the group of parts
    """The run is over."""


@asynccontextmanager
async def start_service(config: Config, *, fresh: bool = False) -> AsyncIterator[Service]:
    """Start every part; stop them when the block is left."""
    blueprint.verify(config)
    async with AsyncExitStack() as stack:
        failed: asyncio.Future[JournalError] = asyncio.get_running_loop().create_future()
        journal = await stack.enter_async_context(open_journal(config, fresh, failed))
        front: list[Run] = []
        http_address = await _serve_http(config, stack, front)
        recovered = journal.recover(world_size=config.trainer.world_size)
        weights = recovered.state.get("version", {"published": [0], "path": None, "trained": 0})
        children = await stack.enter_async_context(LocalChildren(config.run_dir))
        urls = blueprint.inference_urls(config, children)
        pool = await stack.enter_async_context(
            blueprint.build_pool(config, urls, version=weights["published"][-1], weights_path=weights["path"])
        )
        train, evals = blueprint.build_train_envs(config), blueprint.build_eval_envs(config)
        stack.push_async_callback(lambda: side_by_side([train.shutdown(), evals.shutdown()]))
        await train.spawn()
        await evals.spawn()
        await _wait_ready(
            children, [train.connect(), evals.connect(), pool.wait_ready(config.inference.ready_timeout_s)]
        )
        run, source = build_run(config, journal=journal, train=train, evals=evals, pool=pool)
        server = build_batch_server(config, run, recovered, version=weights["published"][-1])
        connect(
            config,
            run,
            source=source,
            train=train,
            evals=evals,
            offer=partial(offer, server, config.max_steps),
        )
        restore(run, source=source, recovered=recovered, weights=weights)
        offer_recovered(server, recovered, config.max_steps)
        await stack.enter_async_context(server)
        stack.callback(run.close)
        front.append(run)
        stack.callback(front.clear)
        if config.local is not None and config.local.trainer:
            local = config.local
            children.start_trainer(
                address=server.address,
                learning_rate=local.learning_rate,
                world_size=config.trainer.world_size,
            )
        _write_json(
            config.run_dir / "addresses.json",
            {"pid": os.getpid(), "trainer": server.address, "http": http_address},
        )
        yield Service(
            config=config,
            run=run,
            journal=journal,
            children=children,
            train=train,
            evals=evals,
            pool=pool,
            server=server,
            http_address=http_address,
            journal_failed=failed,
        )


async def _wait_ready(children: LocalChildren, waits: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all neighbours side by side; a policy server that dies meanwhile ends the wait."""
    watch = asyncio.create_task(children.watch_server())  # noqa: TID251  both are ended and awaited below
    ready = asyncio.create_task(side_by_side(waits))  # noqa: TID251  same
    try:
        await asyncio.wait(
            [ready, watch] if children.has_server else [ready], return_when=asyncio.FIRST_COMPLETED
        )
        if children.has_server and watch.done():
            await watch
        await ready
    finally:
        for waiting in (watch, ready):
            waiting.cancel()
        await asyncio.wait([watch, ready])


async def _serve_http(config: Config, stack: AsyncExitStack, front: list[Run]) -> str | None:
    """Serve from the very start, so that a port in use is found at once; `front` has the run once there is one."""
    if not config.http.enabled:
        return None
    token = blueprint.read_variable("http.token_env", config.http.token_env)
    app = build_app(
        status=lambda: front[0].status() if front else None,
        metrics=lambda: render_metrics(front[0].status, front[0].ledger) if front else b"",
        token=token,
    )
    return await stack.enter_async_context(serve_http(app, host=config.http.host, port=config.http.port))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all, so that a reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
