"""The run at one moment: its status, a diagnosis when nothing moves, and the closing summary.

Put together from what the parts of the run know; nothing is counted here.
"""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.dispatch.ledger import Lane, Outcome

if TYPE_CHECKING:
    from orchestrator.run.run import Run


class EnvStatus(msgspec.Struct):
    """One training env now."""

    target: float
    actual: float
    recent: float
    dispatched: int
    inflight: int
    completed: int
    emitted: int
    acceptance: float
    mean_latency_s: float | None
    reward: float | None
    first_reward: float | None
    quarantined: bool
    servers_ready: int
    servers: int
    restarts: int
    queued: int
    dropped: dict[str, int]


class EndpointStatus(msgspec.Struct):
    """One inference server now."""

    url: str
    healthy: bool
    inflight: int
    version: int


class Status(msgspec.Struct):
    """A run at one moment."""

    state: str
    waiting_for: str
    step: int
    max_steps: int | None
    trained: int
    version: int
    published: int
    reward: float | None
    first_reward: float | None
    rollouts_per_s: float
    inflight: int
    limit: int
    queued_sequences: int
    queued_groups: int
    batch_size: int
    buffer: str
    outcomes: dict[str, int]
    failures: dict[str, int]
    envs: dict[str, EnvStatus]
    endpoints: list[EndpointStatus]
    evals: list[dict[str, Any]]
    staleness: dict[str, float]
    loop_lag_p99_s: float
    journal_backlog_bytes: int
    seconds: float


def build_status(run: "Run") -> Status:
    """The run at this moment."""
    now = run.clock()
    facts, staleness = run.facts, run.staleness
    return Status(
        state=run.state,
        waiting_for=run.core.waiting_for,
        step=staleness.formed,
        max_steps=run.max_steps,
        trained=staleness.trained,
        version=staleness.serving,
        published=staleness.published,
        reward=facts.reward,
        first_reward=facts.first_reward,
        rollouts_per_s=facts.rate(now),
        inflight=run.ledger.total_inflight,
        limit=run.pool.limit,
        queued_sequences=run.buffer.sequences,
        queued_groups=len(run.buffer),
        batch_size=staleness.batch_size,
        buffer=run.assembly.explain(),
        outcomes=run.ledger.totals(Lane.TRAIN),
        failures=facts.failures(),
        envs=_env_statuses(run, now),
        endpoints=[EndpointStatus(e.url, e.healthy, e.inflight, e.version) for e in run.pool.endpoints],
        evals=run.evals.results[-20:],
        staleness=facts.staleness_numbers(),
        loop_lag_p99_s=run.lag.percentile(0.99),
        journal_backlog_bytes=run.journal.backlog_bytes,
        seconds=facts.seconds(now),
    )


def _env_statuses(run: "Run", now: float) -> dict[str, EnvStatus]:
    numbers = run.mix.numbers(now)
    queued = run.buffer.queued_by_env
    shares, recent = run.facts.delivered.shares(), run.facts.delivered.recent_shares()
    completed = dict.fromkeys(run.train, 0)
    for lane, name, outcome, _, n in run.ledger.rows():
        if lane is Lane.TRAIN and outcome is Outcome.COMPLETED and name in completed:
            completed[name] += n
    statuses = {}
    for name, env in run.train.items():
        mine, facts = numbers[name], run.facts.envs[name]
        servers = env.stats()
        statuses[name] = EnvStatus(
            target=mine.configured,
            actual=shares[name],
            recent=recent[name],
            dispatched=run.ledger.dispatched[Lane.TRAIN, name],
            inflight=run.ledger.inflight[Lane.TRAIN, name],
            completed=completed[name],
            emitted=run.facts.delivered.counts[name],
            acceptance=mine.acceptance,
            mean_latency_s=mine.mean_latency_s or None,
            reward=facts.reward,
            first_reward=facts.first_reward,
            quarantined=mine.quarantined,
            servers_ready=env.ready_servers,
            servers=len(servers),
            restarts=env.restarts,
            queued=queued.get(name, 0),
            dropped=dict(facts.dropped),
        )
    return statuses


def diagnose(run: "Run") -> dict[str, Any]:
    """What is waited for, by whom, since when."""
    oldest = run.core.oldest_running()
    now = run.clock()
    return {
        "waiting_for": run.core.waiting_for,
        "buffer": run.assembly.explain(),
        "inflight": run.ledger.total_inflight,
        "oldest_rollout": None
        if oldest is None
        else {"task": oldest.group.task.key, "seconds": round(now - oldest.started, 1)},
        "endpoints": {e.url: e.state.value for e in run.pool.endpoints},
        "servers_ready": {name: env.ready_servers for name, env in run.train.items()},
        "formed": run.staleness.formed,
        "trained": run.staleness.trained,
        "failures": run.facts.failures(),
    }


def build_summary(run: "Run", end: str) -> dict[str, Any]:
    """The closing record, also written to summary.json."""
    status = build_status(run)
    return {
        "end": end,
        "run_dir": str(run.run_dir),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": status.trained,
        "version": status.version,
        "sequences": run.facts.sequences,
        "first_reward": status.first_reward,
        "last_reward": status.reward,
        "envs": {
            name: {
                "first_reward": env.first_reward,
                "last_reward": env.reward,
                "target_share": env.target,
                "actual_share": env.actual,
                "sequences": env.emitted,
                "rollouts": env.completed,
                "num_tasks": run.train[name].num_tasks,
                "acceptance": env.acceptance,
                "mean_latency_s": env.mean_latency_s,
                "dropped": env.dropped,
            }
            for name, env in status.envs.items()
        },
        "outcomes": status.outcomes,
        "failures": status.failures,
        "evals": run.evals.results,
        "staleness": status.staleness,
        "wall_time_s": round(status.seconds, 3),
    }
