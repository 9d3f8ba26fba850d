"""How a service comes to be: every part in its order, stopped in the reverse one when the block is left.

First the journal, which locks the run directory, and the addresses, so that what is in use is found before anything is
started; then environments and inference servers side by side; then the run, which depends on what those declared; then
the trainer link. HTTP answers from the very start.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import structlog

from orchestrator.config import Config, find_warnings
from orchestrator.config.sections import FROM_TRAINER
from orchestrator.discovery import is_source
from orchestrator.dispatch.waits import WaitKind
from orchestrator.env_servers.env import side_by_side
from orchestrator.errors import JournalError
from orchestrator.journal import JournalReader
from orchestrator.local.children import LocalChildren
from orchestrator.run.build import build_run
from orchestrator.run.resume import JournaledWeights, resume
from orchestrator.service import blueprint, env_blueprint, inference_blueprint, secrets
from orchestrator.service.control import ControlDesk, changes_of, token_file
from orchestrator.service.driver import Driver
from orchestrator.service.front import Front
from orchestrator.service.metrics_file import MetricsFile
from orchestrator.service.page import live_feed
from orchestrator.service.service import Service, Stop, write_json
from orchestrator.service.track_blueprint import build_samples, build_setups, shown_config
from orchestrator.service.updates import TrainerUpdates
from orchestrator.service.weights import VersionChecks, WeightLoader
from orchestrator.service.wiring import (
    EvaluationFile,
    Offers,
    build_batch_server,
    drop_old_removals,
    join_shells,
    note_identity,
    open_archive,
    open_journal,
)
from orchestrator.track import Trackers
from orchestrator.trainer_link.encoding import check_shares
from orchestrator.trainer_link.server import PROBE_S, Link, open_link
from orchestrator.views.control import add_control
from orchestrator.views.http import build_app, serve_http

log = structlog.get_logger()

START_REPORT_S = 10.0
"""How often the log says what the start waits for."""


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

    `rewind_to`: a step to set the run back to; where the trainer may ask for that (`trainer.allow_rewind`), the service ends with
    `stop.rewind_to`, and whoever started it starts it again. Who gives a `front` can look at the start meanwhile. `link`: a way to the
    trainer in place of the configured one.
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
        http_address = await _serve_http(config, stack, front, desk, run_id=journal.run_id)
        embedded = link is not None
        link = link or open_link(
            blueprint.trainer_address(config), keys=secrets.trainer_keys(config), probe_s=PROBE_S
        )
        stack.push_async_callback(link.aclose)
        write_json(
            config.run_dir / "addresses.json",
            {"pid": os.getpid(), "run": journal.run_id, "trainer": link.address, "http": http_address},
        )
        # Gigabytes from a slow disk: meanwhile probes are answered, and a signal ends the start.
        recovered = await asyncio.to_thread(journal.recover, world_size=config.trainer.world_size)
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
        first, later = changes.endpoints(endpoints, sourced=any(map(is_source, config.inference.base_urls)))
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
        pool.on_found = lambda url, source: None if url in changes.removed else pool.take_in(url, source)
        train, evals = env_blueprint.build_envs(config)
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
        run.weights.begins_with_trainer = config.inference.initial_weights == FROM_TRAINER
        with JournalReader(config.run_dir) as reader:
            resume(run, recovered, weights, reader.evals())
        await stack.enter_async_context(MetricsFile(config.run_dir, [trackers.tell]))
        results = EvaluationFile(config.run_dir)
        results.rewrite(run.parts.eval_sink.results)
        checks, loader = VersionChecks(pool, local=config.local is not None), WeightLoader(pool)
        updates = TrainerUpdates(
            pool,
            loader,
            mode=config.inference.weight_update,
            timeout_s=config.inference.update_timeout_s,
            life=f"{journal.run_id}/{len(journal.rewound_to)}",
        )
        driver = Driver(
            run,
            train=train,
            evals=evals,
            on_weights=loader.load,
            on_evaluation=results.append,
            clock=time.monotonic,
        )
        drop_old_removals(run, pool)
        join_shells(driver, pool=pool, loader=loader, journal=journal)
        for env in (*train.values(), *evals.values()):
            env.on_free = driver.wake
        stop = Stop()
        server = build_batch_server(
            config,
            driver,
            journal,
            recovered,
            link=link,
            check_version=checks.ask,
            wait_loaded=partial(loader.wait, driver),
            updates=updates,
            on_rewind=None if embedded else stop.rewind,
        )
        offers.server = server
        offers.recovered(recovered)
        await stack.enter_async_context(server)
        stack.callback(driver.close)
        front.enter(driver, server, world_size=config.trainer.world_size)
        stack.callback(front.leave)
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
            updates=updates,
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


async def _serve_http(
    config: Config, stack: AsyncExitStack, front: Front, desk: ControlDesk, *, run_id: str
) -> str | None:
    """Serve from the very start, so that a port in use is found at once."""
    if not config.http.enabled:
        return None
    token = secrets.read_variable("http.token_env", config.http.token_env)
    app = build_app(status=front.status, metrics=front.metrics, token=token, run_id=run_id)
    own_token = stack.enter_context(token_file(config.run_dir))
    add_control(app, tell=desk.tell, tokens=[own_token, *([token] if token else [])])
    feed = live_feed(config.run_dir, front.status)
    feed.add_to(app)
    address = await stack.enter_async_context(serve_http(app, host=config.http.host, port=config.http.port))
    stack.callback(feed.close)
    return address
