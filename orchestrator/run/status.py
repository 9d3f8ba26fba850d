"""The run at one moment: its status, a diagnosis when nothing moves, and the closing summary.

Put together from what the parts of the run know; nothing is counted here.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from envs.addresses import shown_url
from orchestrator.dispatch.ledger import Lane, Outcome
from orchestrator.dispatch.waits import Wait
from orchestrator.facts import (
    EndpointStatus,
    EnvStatus,
    ReportStatus,
    SourceStatus,
    Status,
    TaskStatus,
    TrackerStatus,
    WaitStatus,
    by_domain,
)
from orchestrator.run.run import Run
from orchestrator.run.waits import describe, find_waits


def build_status(
    run: Run,
    now: float,
    *,
    loop_lag_p99_s: float = 0.0,
    disk_free_bytes: int | None = None,
    waits: Sequence[Wait] = (),
    notes: Sequence[str] = (),
    trackers: Sequence[TrackerStatus] = (),
    sources: Sequence[SourceStatus] = (),
) -> Status:
    """The run at this moment; `waits` and `notes` are what others than the run know."""
    parts = run.parts
    facts, versions = parts.facts, parts.versions
    rollouts_per_s, tokens_per_s = facts.rate(now)
    last = facts.history[-1] if facts.history else None
    found, envs = [*find_waits(run, now), *waits], _env_statuses(run, now)
    return Status(
        state=run.state.value,
        waiting_for=describe(found),
        waits=[
            WaitStatus(
                wait.kind.value,
                wait.text,
                None if wait.until is None else max(0.0, round(wait.until - now, 3)),
                wait.remedy,
            )
            for wait in found
        ],
        step=versions.formed,
        max_steps=run.settings.max_steps,
        trained=versions.trained,
        version=versions.serving,
        published=versions.published,
        reward=facts.reward,
        first_reward=facts.first_reward,
        rollouts_per_s=rollouts_per_s,
        tokens_per_s=tokens_per_s,
        eta_s=_eta(run),
        inflight=parts.ledger.total_inflight,
        limit=parts.pool.limit,
        queued_sequences=parts.buffer.sequences,
        queued_groups=len(parts.buffer),
        batch_size=run.settings.batch.size,
        buffer=parts.sink.explain(),
        outcomes=parts.ledger.totals(Lane.TRAIN),
        failures=facts.failures(),
        envs=envs,
        domains=by_domain(envs),
        endpoints=[
            EndpointStatus(shown_url(e.url), e.healthy, e.inflight, e.version, e.error, e.source)
            for e in parts.pool.endpoints
        ],
        evals=parts.eval_sink.recent(),
        staleness=facts.staleness_numbers(),
        refused=run.weights.refused,
        notes=[*notes, *(f'tracker "{t.name}": {t.error} ({t.lost} lost)' for t in trackers if t.error)],
        minimums_waived=run.minimums.times_waived,
        loop_lag_p99_s=loop_lag_p99_s,
        journal_backlog_bytes=parts.journal.backlog_bytes,
        kept_batches=parts.journal.kept[0],
        kept_bytes=parts.journal.kept[1],
        seconds=facts.seconds(now),
        failure_reasons=facts.failure_reasons(),
        reports={
            name: ReportStatus(
                step=told.values[-1][0],
                value=told.values[-1][1],
                low=min(told.numbers),
                median=median(told.numbers),
                high=max(told.numbers),
                recent=list(told.values),
            )
            for name, told in facts.reports.names.items()
        },
        mismatch=facts.reports.trouble,
        tokens=facts.tokens,
        last=None if last is None else msgspec.structs.replace(last, envs={}),
        idle_s=max(0.0, now - run.progressed),
        max_versions=run.settings.max_versions,
        disk_free_bytes=disk_free_bytes,
        trackers=list(trackers),
        sources=list(sources),
        changes=run.control.changes.lines(),
    )


def _eta(run: Run) -> float | None:
    """Seconds until the last step is formed, as far as that can be said."""
    if run.settings.max_steps is None:
        return None
    return run.parts.facts.seconds_left(max(0, run.settings.max_steps - run.parts.versions.formed))


def _env_statuses(run: Run, now: float) -> dict[str, EnvStatus]:
    parts = run.parts
    numbers, queued, minimums = (
        parts.mix.numbers(now),
        parts.buffer.queued_by_env,
        parts.buffer.configured_minimums,
    )
    shares, recent = parts.facts.delivered.shares(), parts.facts.delivered.recent_shares()
    completed, failed = dict.fromkeys(parts.train, 0), dict.fromkeys(parts.train, 0)
    for lane, name, outcome, _, n in parts.ledger.rows():
        if lane is Lane.TRAIN and name in completed and outcome is not Outcome.CANCELLED:
            (completed if outcome is Outcome.COMPLETED else failed)[name] += n
    history = parts.facts.history
    last = history[-1].envs if history else {}
    domains = {env.name: env.domain or env.name for env in run.settings.train}
    statuses = {}
    for name, port in parts.train.items():
        mine, facts = numbers[name], parts.facts.envs[name]
        statuses[name] = EnvStatus(
            domain=domains[name],
            target=mine.configured,
            actual=shares[name],
            recent=recent[name],
            dispatched=parts.ledger.dispatched[Lane.TRAIN, name],
            inflight=parts.ledger.inflight[Lane.TRAIN, name],
            completed=completed[name],
            emitted=parts.facts.delivered.counts[name],
            acceptance=mine.acceptance,
            mean_latency_s=mine.mean_latency_s or None,
            reward=facts.reward,
            first_reward=facts.first_reward,
            quarantined=mine.quarantined,
            servers_ready=port.ready_servers,
            servers=port.servers,
            restarts=port.restarts,
            nodes=dict(port.nodes),
            queued=queued.get(name, 0),
            minimum=minimums.get(name, 0),
            minimum_waived=run.minimums.waived.get(name, "") if minimums.get(name) else "",
            dropped=dict(facts.dropped),
            failed=failed[name],
            failure=facts.failure,
            rewards=[step.envs[name].sampled_reward if name in step.envs else None for step in history],
            last=last.get(name),
            held=run.control.changes.held(name),
            tasks=_task_status(run, name),
        )
    return statuses


def _task_status(run: Run, name: str) -> TaskStatus:
    source = run.parts.source
    statistics = source.statistics(name)
    hardest, most_tried = source.notable(name).find()
    return TaskStatus(
        num_tasks=statistics.num_tasks,
        tried=statistics.seen,
        solve_rates=list(statistics.histogram),
        strategy=next(env.curriculum.strategy for env in run.settings.train if env.name == name),
        pools=dict(source.pools(name)),
        hardest=hardest,
        most_tried=most_tried,
    )


def diagnose(run: Run, now: float) -> dict[str, Any]:
    """What is waited for, by whom, since when."""
    parts = run.parts
    oldest = parts.dispatcher.flight.oldest_attempt()
    waits = find_waits(run, now)
    return {
        "waiting_for": describe(waits),
        "waits": {wait.kind.value: wait.text for wait in waits},
        "remedies": [wait.remedy for wait in waits if wait.remedy],
        "buffer": parts.sink.explain(),
        "inflight": parts.ledger.total_inflight,
        "oldest_rollout": None
        if oldest is None
        else {"task": oldest.group.task.key, "seconds": round(now - oldest.started, 1)},
        "endpoints": {
            shown_url(e.url): e.error or ("in service" if e.healthy else "out of service")
            for e in parts.pool.endpoints
        },
        "servers_ready": {name: port.ready_servers for name, port in parts.train.items()},
        "formed": parts.versions.formed,
        "trained": parts.versions.trained,
        "failures": parts.facts.failures(),
        "failures_told": parts.facts.failures_told(),
    }


def build_summary(run: Run, end: str, now: float) -> dict[str, Any]:
    """The closing record, also written to summary.json."""
    status = build_status(run, now)
    tasks = {env.name: env.num_tasks for env in run.settings.train}
    return {
        "end": end,
        "steps": status.trained,
        "version": status.version,
        "sequences": run.parts.facts.sequences,
        "tokens": status.tokens,
        "last_step": None if status.last is None else msgspec.to_builtins(status.last),
        "first_reward": status.first_reward,
        "last_reward": status.reward,
        "envs": {
            name: {
                "domain": env.domain,
                "first_reward": env.first_reward,
                "last_reward": env.reward,
                "target_share": env.target,
                "actual_share": env.actual,
                "sequences": env.emitted,
                "rollouts": env.completed,
                "num_tasks": tasks[name],
                "tasks": msgspec.to_builtins(env.tasks),
                "acceptance": env.acceptance,
                "mean_latency_s": env.mean_latency_s,
                "dropped": env.dropped,
                "last_step": None if env.last is None else msgspec.to_builtins(env.last),
            }
            for name, env in status.envs.items()
        },
        "outcomes": status.outcomes,
        "failures": status.failures,
        "failure_reasons": status.failure_reasons,
        "evals": run.parts.eval_sink.results,
        "staleness": status.staleness,
        "reports": {
            name: {"step": told.step, "value": told.value, "median": told.median}
            for name, told in status.reports.items()
        },
        "wall_time_s": round(status.seconds, 3),
    }
