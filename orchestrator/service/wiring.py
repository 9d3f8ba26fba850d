"""How the parts of a run are made and joined, in the order in which they need each other.

`service` calls these; each takes the configuration and what was made before. The parts that call each other (the
assembly offers batches, dispatch fills the assembly, the trainer link reports to the run) are joined in `connect`.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import structlog

from orchestrator.config import Config
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.staleness import Staleness
from orchestrator.env_servers.env import EvalEnvs, TrainEnvs
from orchestrator.errors import ConfigError, JournalError
from orchestrator.facts import Facts
from orchestrator.groups.group import Batch
from orchestrator.groups.scoring import build_advantage
from orchestrator.inference import InferencePool
from orchestrator.journal import Journal, JournalReader, Recovered
from orchestrator.mix import build_mix
from orchestrator.run.run import Run
from orchestrator.service import blueprint
from orchestrator.service.driver import Driver
from orchestrator.sinks.eval_sink import Evals
from orchestrator.sinks.train_sink import TrainSink
from orchestrator.tasks.source import SourceEnv, TrainSource
from orchestrator.trainer_link.server import BatchServer

log = structlog.get_logger()


def open_journal(config: Config, fresh: bool, failed: asyncio.Future[JournalError]) -> Journal:
    def on_error(error: JournalError) -> None:
        if not failed.done():
            failed.set_result(error)

    journal = Journal.open(
        config.run_dir,
        commit_interval_s=config.journal.commit_interval_s,
        commit_bytes=config.journal.commit_bytes,
        keep_batches=config.trainer.keep_batches,
        compress=config.journal.compress_level,
        fsync=config.journal.fsync,
        max_backlog_bytes=config.journal.max_backlog_bytes,
        fresh=fresh,
        on_error=on_error,
    )
    if journal.moved_aside is not None:
        log.warning("journal.moved_aside", to=str(journal.moved_aside))
    seed = journal.meta.get("seed")
    if seed is None:
        journal.set_meta("seed", str(config.seed))
    elif seed != str(config.seed):
        journal.close()
        raise ConfigError(
            f"{config.run_dir} holds a run with seed {seed}, not {config.seed}: its tasks come in another order; "
            f"set seed = {seed}, choose another run_dir, or start over with --fresh"
        )
    return journal


def build_run(
    config: Config, *, journal: Journal, train: TrainEnvs, evals: EvalEnvs, pool: InferencePool
) -> tuple[Run, TrainSource]:
    now = time.monotonic()
    targets = blueprint.build_targets(config, train)
    ledger = Ledger()
    staleness = Staleness(
        batch_size=config.batch.size,
        max_versions=config.staleness.max_versions,
        mode=config.staleness.mode,
        slack=blueprint.batch_slack(config),
    )
    mix = build_mix(
        config.mix.strategy,
        list(targets),
        list(targets.values()),
        rng=random.Random(f"{config.seed}:mix"),
        group_sizes={name: env.settings.group_size for name, env in train.items()},
        **config.mix.arguments(),
    )
    source = TrainSource(
        [SourceEnv(name, env.spec.split, env.num_tasks) for name, env in train.items()],
        mix=mix,
        seed=config.seed,
    )
    run = Run(
        run_dir=config.run_dir,
        max_steps=config.max_steps,
        train=train,
        pool=pool,
        journal=journal,
        buffer=blueprint.build_buffer(config, targets, train, split=journal.split_group),
        staleness=staleness,
        ledger=ledger,
        mix=mix,
        facts=Facts(targets, ledger=ledger, staleness=staleness, now=now),
        evals=Evals(blueprint.build_plans(evals)),
        clock=time.monotonic,
    )
    return run, source


def connect(
    config: Config,
    run: Run,
    *,
    source: TrainSource,
    train: TrainEnvs,
    evals: EvalEnvs,
    offer: Callable[[Any], None],
) -> None:
    """Make the parts that call each other, and close the circle."""
    assembly = TrainSink(
        buffer=run.buffer,
        batch_size=config.batch.size,
        max_steps=config.max_steps,
        group_sizes={name: env.settings.group_size for name, env in train.items()},
        count_tokens=config.batch.unit == "tokens",
        # A group that is split is recorded anew, so it must still have all of itself.
        keep_transcripts=config.batch.splits,
        staleness=run.staleness,
        tasks=source,
        mix=run.mix,
        record=run.journal,
        facts=run.facts,
        advantage=build_advantage(config.dispatch.advantage),
        keep_equal_rewards=config.dispatch.keep_equal_rewards,
        max_barren_batches=config.dispatch.max_barren_batches,
        available=lambda: frozenset(name for name, env in train.items() if env.available),
        offer=offer,
    )
    core = Dispatcher(
        train=blueprint.build_train_rules(train),
        evals=evals,
        rules=blueprint.build_rules(config),
        source=source,
        eval_source=run.evals,
        mix=run.mix,
        placement=run.pool,
        staleness=run.staleness,
        ledger=run.ledger,
        queued=assembly.queued,
        starved=assembly.starved,
        expected_size=assembly.expected_size,
        now=time.monotonic(),
    )
    driver = Driver(
        core,
        train=train,
        evals=evals,
        sink=run,
        rollout_timeout_s=config.dispatch.rollout_timeout_s,
        pool=run.pool,
        clock=time.monotonic,
    )
    run.attach(assembly=assembly, core=core, driver=driver)
    run.pool.on_change = run.on_change
    run.pool.on_lost = run.on_endpoint_lost
    for env in (*train.values(), *evals.values()):
        env.on_free = run.on_servers_changed


def restore(run: Run, *, source: TrainSource, recovered: Recovered, weights: dict[str, Any]) -> None:
    """Continue where an earlier process of the run ended."""
    # A version is published before its step is acknowledged, so more steps may be trained on than acknowledged.
    trained = max(recovered.last_acknowledged, min(weights["trained"], recovered.last_step))
    run.staleness.load_state_dict(weights, formed=recovered.last_step, trained=trained)
    run.acknowledged = recovered.last_acknowledged
    run.weights_path = weights["path"]
    with JournalReader(run.run_dir) as reader:
        run.restore_evals(reader.evals())
    if recovered.empty:
        return
    run.restore(recovered.state)
    asked_again = 0
    for env, (low, resolved) in recovered.resolved.items():
        if env in run.train:
            asked_again += source.load_resolved(env, low, resolved)
        else:
            log.warning("env.gone", env=env, note="it was in an earlier process of this run")
    kept = run.assembly.restore(recovered.groups)
    log.info(
        "run.resumed",
        step=recovered.last_step,
        acknowledged=recovered.last_acknowledged,
        version=run.staleness.published,
        groups=kept,
        tasks_asked_again=asked_again,
        damaged=len(recovered.damaged),
    )


def offer(server: BatchServer, max_steps: int | None, batch: Batch) -> None:
    """Hand a durable batch to the trainer; behind the last one, iteration ends for every rank."""
    server.offer(batch)
    if batch.step == max_steps:
        server.finish("max_steps reached")


def build_batch_server(config: Config, run: Run, recovered: Recovered, *, version: int) -> BatchServer:
    """The trainer link, not open yet."""
    return BatchServer(
        bind=blueprint.trainer_address(config),
        keys=blueprint.trainer_keys(config),
        world_size=config.trainer.world_size,
        run=run.journal.run_id,
        keep=config.trainer.keep_batches,
        last_step=recovered.last_acknowledged,
        version=version,
        load=run.journal.load_batch,
        on_ack=run.on_ack,
        on_rank_ack=lambda step, rank: run.journal.record_ack(
            step, rank, world_size=config.trainer.world_size
        ),
        on_publish=run.on_publish,
        on_trained=run.on_trained,
        on_done=run.on_trainer_done,
        when_durable=run.journal.when_durable,
    )


def offer_recovered(server: BatchServer, recovered: Recovered, max_steps: int | None) -> None:
    """Lease what an earlier process formed; the last acknowledgement of a batch may be found only now."""
    for batch in recovered.batches:
        if batch.step in recovered.acknowledged:
            server.keep(batch)
        else:
            server.offer(batch, recovered.acks.get(batch.step, ()))
    if max_steps is not None and recovered.last_step >= max_steps:
        server.finish("max_steps reached")
