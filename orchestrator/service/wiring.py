"""How the service's shells are joined to the run, and how a run goes on where an earlier process ended."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from orchestrator.archive.archive import RolloutArchive
from orchestrator.config import Config
from orchestrator.env_servers.env import TrainEnvs
from orchestrator.errors import ConfigError, JournalError
from orchestrator.groups.group import Batch
from orchestrator.inference import InferencePool
from orchestrator.journal import Journal, Recovered, changed_tasks, differences, notices
from orchestrator.journal.journal import KEPT_IN_MEMORY
from orchestrator.journal.rewinding import find_obstacle
from orchestrator.run.run import Run
from orchestrator.service import blueprint, inference_blueprint, secrets
from orchestrator.service.driver import Driver
from orchestrator.service.front import Front
from orchestrator.service.weights import WeightLoader
from orchestrator.sinks.archive import Archive, NoArchive
from orchestrator.trainer_link.publications import CheckVersion, Updates, WaitLoaded
from orchestrator.trainer_link.server import BatchServer, Link

log = structlog.get_logger()


def open_journal(
    config: Config, failed: asyncio.Future[JournalError], *, fresh: bool, rewind_to: int | None
) -> Journal:
    """The journal, which locks the run directory; a failed write ends up in `failed`."""

    def on_error(error: JournalError) -> None:
        if not failed.done():
            failed.set_result(error)

    journal = Journal.open(
        config.run_dir,
        commit_interval_s=config.journal.commit_interval_s,
        commit_bytes=config.journal.commit_bytes,
        keep_batches=None if config.trainer.keep_batches == "checkpoint" else config.trainer.keep_batches,
        compress=config.journal.compress_level,
        fsync=config.journal.fsync,
        max_backlog_bytes=config.journal.max_backlog_bytes,
        fresh=fresh,
        rewind_to=rewind_to,
        find_flaw=inference_blueprint.flaw_finder(config),
        on_error=on_error,
    )
    if journal.moved_aside is not None:
        log.warning("journal.moved_aside", to=str(journal.moved_aside))
    if journal.rewound is not None:
        log.warning("run.rewound", **asdict(journal.rewound))
    return journal


async def open_archive(
    config: Config, journal: Journal, recovered: Recovered, stack: AsyncExitStack, front: Front
) -> Archive:
    """What keeps rollouts for people, until the stack is left; it is told what an earlier process may not have told it."""
    if not config.archive.enabled:
        return NoArchive()
    archive = await stack.enter_async_context(
        RolloutArchive(
            config.run_dir,
            run_id=journal.run_id,
            last_step=recovered.last_step,
            groups_per_step=config.archive.groups_per_step,
            groups_per_evaluation=config.archive.groups_per_evaluation,
            max_bytes=config.archive.max_bytes,
            max_days=config.archive.max_days,
            clock=time.monotonic(),
        )
    )
    front.troubles.append(lambda: archive.note)
    archive.recovered(recovered.groups, recovered.batches, time.monotonic())
    return archive


def note_identity(config: Config, journal: Journal, train: TrainEnvs) -> None:
    """Hold what decides the tasks against what earlier processes of the run noted; ConfigError if it changed.

    Recorded positions would stand for other tasks: some would be trained on twice and others never.
    """
    before, now = journal.identity, blueprint.build_identity(config, train)
    changes = differences(before, now)
    if changes:
        remedy = "set it back, choose another run_dir, or start over with --fresh"
        raise ConfigError(
            "\n  ".join([f"{config.run_dir} holds a run with other tasks", *changes, f"remedy: {remedy}"])
        )
    for notice in notices(before, now):
        log.warning("run.changed", note=notice)
    for env, index in changed_tasks(before, now):
        log.warning(
            "env.tasks_changed",
            env=env,
            index=index,
            note="this index was another task when the run was started: the env's data has changed since",
        )
    journal.set_identity(now)


class EvaluationFile:
    """The file of evaluation results: written anew at the start, so that it says what the journal says.

    A line that cannot be written is therefore left out, and said once: the next process has it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "evals.jsonl"
        self._said = False

    def rewrite(self, results: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(result) + "\n" for result in results]
        try:
            if lines or self._path.exists():
                self._path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            self._say(error)

    def append(self, result: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._said:
            note = "the journal has the results; the file has them again after a restart"
            log.warning("eval.file_failed", path=str(self._path), error=str(error), note=note)
        self._said = True


class Offers:
    """Hands durable batches to the trainer; there is a server only once the run is built."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self.server: BatchServer | None = None

    def __call__(self, batch: Batch) -> None:
        """Behind the last batch, iteration ends for every rank."""
        assert self.server is not None
        self.server.offer(batch)
        if batch.step == self._max_steps:
            self.server.finish("max_steps reached")

    def recovered(self, recovered: Recovered) -> None:
        """Lease what an earlier process formed; the last acknowledgement of a batch may be found only now."""
        assert self.server is not None
        for batch in recovered.batches:
            if batch.step in recovered.acknowledged:
                self.server.keep(batch)
            else:
                self.server.restore(batch, recovered.acks.get(batch.step, ()))
        if self._max_steps is not None and recovered.last_step >= self._max_steps:
            self.server.finish("max_steps reached")


def build_batch_server(
    config: Config,
    driver: Driver[Run],
    journal: Journal,
    recovered: Recovered,
    *,
    link: Link,
    check_version: CheckVersion,
    wait_loaded: WaitLoaded,
    updates: Updates,
    on_rewind: Callable[[int], None] | None,
) -> BatchServer:
    """The trainer link's server, not entered yet; `on_rewind` sets the run back, where somebody can."""
    run, tell = driver.run, driver.tell
    world_size = config.trainer.world_size
    return BatchServer(
        link=link,
        token=secrets.trainer_token(config),
        world_size=world_size,
        run=journal.run_id,
        rewound=journal.rewound_to,
        # In memory; what is kept beyond them is read back when it is asked for.
        keep=KEPT_IN_MEMORY if config.trainer.keep_batches == "checkpoint" else config.trainer.keep_batches,
        last_step=recovered.last_acknowledged,
        newest_version=lambda: run.weights.newest,
        load=journal.load_batch,
        check_version=check_version,
        wait_loaded=wait_loaded,
        updates=updates,
        on_ack=lambda step: tell(run.on_ack, step),
        on_rank_ack=lambda step, rank: journal.record_ack(step, rank, world_size=world_size),
        on_publish=lambda version, path, step: tell(partial(run.on_publish, step=step), version, path),
        on_trained=lambda step: tell(run.on_trained, step),
        on_report=run.on_report,
        on_checkpoint=journal.record_checkpoint,
        on_done=lambda: _end(driver, "the trainer said it is done"),
        find_obstacle=partial(
            find_obstacle, config.run_dir, find_flaw=inference_blueprint.flaw_finder(config)
        )
        if config.trainer.allow_rewind and on_rewind is not None
        else None,
        on_rewind=on_rewind or (lambda step: None),
        when_durable=journal.when_durable,
    )


def _end(driver: Driver[Run], why: str) -> None:
    driver.run.end(why)
    driver.perform()


def join_shells(driver: Driver[Run], *, pool: InferencePool, loader: WeightLoader, journal: Journal) -> None:
    """Have everything that changes what a run looks at wake its driver."""
    pool.on_change = lambda: loader.look(driver)
    pool.on_lost = lambda endpoint: driver.tell(driver.run.on_endpoint_lost, endpoint)
    pool.on_found = lambda url, source: driver.tell(driver.run.on_endpoint_found, url, source)
    pool.on_gone = lambda url: driver.tell(driver.run.on_endpoint_gone, url)
    journal.on_room = driver.wake


def drop_old_removals(run: Run, pool: InferencePool) -> None:
    """End removals by hand of inference servers that their source has dropped while no process looked."""
    for url in list(run.control.changes.removed):
        if pool.membership and pool.membership.complete and not pool.membership.named_by(url):
            run.control.gone(url)
