"""How the parts of a run are made and joined: the only place, for the service and for virtual time alike."""

import math
import random
from collections.abc import Callable, Mapping, Sequence

import structlog

from orchestrator.buffer import BatchBuffer
from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.dispatcher import Dispatcher, Training
from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.pace import Pace
from orchestrator.dispatch.ports import EnvPort, EnvRules, Rules
from orchestrator.dispatch.versions import Versions
from orchestrator.facts import Facts
from orchestrator.groups.group import Group
from orchestrator.mix import build_mix
from orchestrator.run.evaluation import EvaluationRun
from orchestrator.run.parts import Parts
from orchestrator.run.ports import Offer, Pool, RunJournal, TrainPort
from orchestrator.run.run import Run
from orchestrator.run.settings import BatchSettings, EvalEnvSettings, Limits, RunSettings, TrainEnvSettings
from orchestrator.sinks.archive import Archive
from orchestrator.sinks.barren import Barren
from orchestrator.sinks.eval_sink import EvalSink
from orchestrator.sinks.train_sink import TrainSink
from orchestrator.tasks.evaluations import Evaluations
from orchestrator.tasks.source import SourceEnv, TrainSource

log = structlog.get_logger()


def build_run(
    settings: RunSettings,
    *,
    train: Mapping[str, TrainPort],
    evals: Mapping[str, EnvPort],
    pool: Pool,
    journal: RunJournal,
    archive: Archive,
    offer: Offer,
    now: float,
) -> Run:
    """A run that has not started; what an earlier process left is restored into it."""
    envs = {env.name: env for env in settings.train}
    sizes = {name: env.group_size for name, env in envs.items()}
    targets = {name: env.target for name, env in envs.items()}
    batch = settings.batch
    versions, ledger = Versions(max_versions=settings.max_versions), Ledger()
    mix = build_mix(
        settings.strategy,
        list(targets),
        list(targets.values()),
        rng=random.Random(f"{settings.seed}:mix"),
        group_sizes=sizes,
        **settings.strategy_options,
    )
    source = TrainSource(
        [SourceEnv(env.name, env.split, env.num_tasks, env.curriculum) for env in envs.values()],
        mix=mix,
        seed=settings.seed,
        chosen=journal.record_choice,
    )
    for env in envs.values():
        if env.num_tasks is None and env.curriculum.strategy != "uniform":
            log.warning(
                "curriculum.not_used", env=env.name, note="its tasks have no end, so they come in their order"
            )
    buffer = build_buffer(settings, journal.split_group)
    evaluations = Evaluations([env.plan for env in settings.evals])
    facts = Facts(targets, ledger=ledger, versions=versions, now=now)
    holder: list[Run] = []
    pace = Pace(versions, mode=settings.mode, capacity=lambda: _capacity(settings, sink))
    sink = TrainSink(
        buffer=buffer,
        max_steps=settings.max_steps,
        ahead=settings.ahead,
        group_sizes=sizes,
        versions=versions,
        pace=pace,
        tasks=source,
        mix=mix,
        record=journal,
        facts=facts,
        archive=archive,
        barren=Barren(
            at_most=settings.max_barren_batches * _batch_rollouts(batch, sizes),
            envs=envs,
            explain=facts.explain,
        ),
        advantage=settings.advantage,
        keep_equal_rewards=settings.keep_equal_rewards,
        # A group that is split is recorded anew, so it must still have all of itself.
        keep_transcripts=batch.on_stuck == "split" and batch.unit == "sequences",
        offer=offer,
    )
    rules = {name: _env_rules(train[name], env.limits, env) for name, env in envs.items()}
    admission = Admission(
        train=rules,
        pace=pace,
        ledger=ledger,
        queue=sink,
        bound=int(batch.max_buffered * batch.size),
        closed=lambda: holder[0].closed(),
        held=lambda: mix.held,
        probed=lambda: mix.probed,
        now=now,
    )
    dispatcher = Dispatcher(
        training=Training(rules=rules, source=source, mix=mix, admission=admission, pace=pace, queue=sink),
        evals={env.plan.env: _env_rules(evals[env.plan.env], env.limits) for env in settings.evals},
        rules=settings.rules,
        eval_source=evaluations,
        placement=pool,
        versions=versions,
        ledger=ledger,
        now=now,
    )
    run = Run(
        settings,
        Parts(
            train=dict(train),  # whoever is available is asked for at every event
            pool=pool,
            journal=journal,
            archive=archive,
            versions=versions,
            ledger=ledger,
            mix=mix,
            source=source,
            buffer=buffer,
            pace=pace,
            facts=facts,
            sink=sink,
            evaluations=evaluations,
            eval_sink=EvalSink(evaluations),
            dispatcher=dispatcher,
        ),
    )
    holder.append(run)
    return run


def build_evaluation(
    envs: Sequence[EvalEnvSettings],
    rules: Rules,
    *,
    ports: Mapping[str, EnvPort],
    pool: Pool,
    now: float,
) -> EvaluationRun:
    """Evaluations alone, each once."""
    evaluations, versions = Evaluations([env.plan for env in envs]), Versions(max_versions=0)
    dispatcher = Dispatcher(
        training=None,
        evals={env.plan.env: _env_rules(ports[env.plan.env], env.limits) for env in envs},
        rules=rules,
        eval_source=evaluations,
        placement=pool,
        versions=versions,
        ledger=Ledger(),
        now=now,
    )
    return EvaluationRun(dispatcher, pool, evaluations, now)


def build_buffer(
    settings: RunSettings, split: Callable[[Group, int], tuple[Group, Group]]
) -> BatchBuffer[Group]:
    """The queue of finished groups."""
    batch = settings.batch
    splits = batch.on_stuck == "split" and batch.unit == "sequences"
    targets = {env.name: env.target for env in settings.train}
    buffer = BatchBuffer[Group](
        batch.size,
        minimums=None if batch.quotas else {env.name: env.minimum for env in settings.train if env.minimum},
        envs=[env.name for env in settings.train],
        unit=batch.unit,
        targets=targets if batch.mix == "even" and not batch.quotas and batch.unit == "sequences" else None,
        quotas=targets if batch.quotas else None,
        on_starved=batch.on_starved,
        on_stuck="split" if splits else "wait",
        stuck_after_s=batch.stuck_after_s,
        split=split if splits else None,
        # Paced work is trained in the order of its age, so that none of it is left behind.
        order="version" if settings.mode == "pace" else "arrival",
    )
    # Also where batches follow no targets: of an env that has none nothing comes, so nothing is waited for.
    buffer.set_quotas(targets)
    return buffer


def _env_rules(port: EnvPort, limits: Limits, env: TrainEnvSettings | None = None) -> EnvRules:
    return EnvRules(
        port=port,
        rollout_timeout_s=limits.rollout_timeout_s,
        group_timeout_s=limits.group_timeout_s,
        max_attempts=limits.max_attempts,
        group_size=env.group_size if env is not None else 1,
        max_inflight=env.max_inflight if env is not None else None,
        rollouts_per_minute=env.rollouts_per_minute if env is not None else None,
    )


def _capacity(settings: RunSettings, sink: TrainSink) -> int:
    """What every batch holds of the oldest groups for certain: less than all where only whole groups make it up."""
    size, sizes = settings.batch.size, [env.group_size for env in settings.train]
    if settings.batch.unit == "tokens":
        return sink.capacity
    whole = len(set(sizes)) == 1 and settings.rules.min_valid is None
    if whole or settings.batch.on_stuck == "split":
        return size
    return max(1, size - min(max(sizes) - math.gcd(*sizes, size), size // 2))


def _batch_rollouts(batch: BatchSettings, sizes: Mapping[str, int]) -> int:
    """About how many rollouts make a batch; by tokens nobody knows, and a few groups must do."""
    return batch.size if batch.unit == "sequences" else 16 * max(sizes.values())
