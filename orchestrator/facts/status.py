"""A run at one moment, as plain data: what the display, the metrics, HTTP and the summary show.

`orchestrator.run.status` fills it in; nothing is counted here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.facts.steps import EnvStep, StepRecord


class WaitStatus(msgspec.Struct):
    """One thing that is waited for; `seconds` until time ends the wait, None where an event must.

    `remedy` is what to change if it lasts.
    """

    kind: str
    text: str
    seconds: float | None
    remedy: str = ""


class TaskStatus(msgspec.Struct):
    """The tasks of an env: how many there are, None if they have no end, and how many were tried, by recent solve rate in
    tenths and by pool of the curriculum. A few tried ones that are solved least and that were tried most have a row each (see
    `TaskStatistics.row`), where there are not too many to look through."""

    num_tasks: int | None
    tried: int
    solve_rates: list[int]
    strategy: str = "uniform"
    pools: dict[str, int] = {}
    hardest: list[dict[str, float]] = []
    most_tried: list[dict[str, float]] = []


class EnvStatus(msgspec.Struct):
    """One training env now."""

    domain: str
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
    minimum: int
    minimum_waived: str
    dropped: dict[str, int]
    failed: int = 0
    """Rollouts that failed, ran out of time or lost their server; what was cancelled is not among them."""
    failure: str = ""
    """What the last failed rollout said."""
    rewards: list[float | None] = []
    """Mean reward of all rollouts in each of the last steps, oldest first."""
    last: EnvStep | None = None
    """The env in the last step: lengths, latencies, metrics."""
    nodes: dict[str, str] = {}
    """Where its ready servers run, by server: a node or an address; those on this machine are not named."""
    held: str = ""
    """Since when a person has quarantined it, and who; empty where nobody has."""
    tasks: TaskStatus | None = None
    """What is known about its tasks."""


class DomainStatus(msgspec.Struct):
    """The envs of one domain together."""

    envs: list[str]
    target: float
    actual: float
    recent: float
    emitted: int
    inflight: int
    completed: int
    failed: int
    reward: float | None


class EndpointStatus(msgspec.Struct):
    """One inference server now."""

    url: str
    healthy: bool
    inflight: int
    version: int
    error: str
    source: str = ""
    """What names it; empty where it is listed in the configuration or was added by hand."""


class SourceStatus(msgspec.Struct):
    """A source of servers that come and go: whose they are, how many it names, and what is wrong with it."""

    source: str
    of: str
    members: int
    trouble: str


class ReportStatus(msgspec.Struct):
    """A number that the trainer reports: the last one, the range of the last fifty, and they themselves with their steps."""

    step: int
    value: float
    low: float
    median: float
    high: float
    recent: list[tuple[int, float]]


class TrackerStatus(msgspec.Struct):
    """One tracker: lines that it took, lines that are lost, and its last trouble, empty where there was none."""

    name: str
    logged: int
    lost: int
    error: str


class Status(msgspec.Struct):
    """A run at one moment."""

    state: str
    waiting_for: str
    waits: list[WaitStatus]
    step: int
    max_steps: int | None
    trained: int
    version: int
    published: int
    reward: float | None
    first_reward: float | None
    rollouts_per_s: float
    tokens_per_s: float
    eta_s: float | None
    """Until the last step is formed, at the pace of the last ones."""
    inflight: int
    limit: int
    queued_sequences: int
    queued_groups: int
    batch_size: int
    buffer: str
    outcomes: dict[str, int]
    failures: dict[str, int]
    envs: dict[str, EnvStatus]
    domains: dict[str, DomainStatus]
    endpoints: list[EndpointStatus]
    evals: list[dict[str, Any]]
    staleness: dict[str, float]
    refused: str
    notes: list[str]
    minimums_waived: int
    loop_lag_p99_s: float
    journal_backlog_bytes: int
    seconds: float
    reports: dict[str, ReportStatus] = {}
    mismatch: str = ""
    failure_reasons: dict[str, str] = {}
    """What the last one of `failures` said, under the same name."""
    tokens: int = 0
    """In all batches."""
    last: StepRecord | None = None
    """The last step; its envs are with their env."""
    idle_s: float = 0.0
    """Since a rollout last ended or a batch was formed."""
    kept_batches: int = 0
    """Acknowledged batches that the trainer can ask for again, which take `kept_bytes` of the disk."""
    kept_bytes: int = 0
    max_versions: int = 0
    """How many versions old a sequence may be when it is trained on."""
    disk_free_bytes: int | None = None
    """Of the disk that has the run directory, as far as it is known."""
    trackers: list[TrackerStatus] = []
    sources: list[SourceStatus] = []
    changes: list[str] = []
    """How the run differs from its configuration, because a person has changed it."""


def status_without_run(
    state: str,
    waits: Sequence[WaitStatus],
    *,
    endpoints: Sequence[EndpointStatus],
    max_steps: int | None,
    batch_size: int,
    notes: Sequence[str],
    seconds: float,
    sources: Sequence[SourceStatus] = (),
) -> Status:
    """What is known before there is a run, and after it: where it is in its life, and what is waited for."""
    return Status(
        state=state,
        waiting_for="; ".join(wait.text for wait in waits),
        waits=list(waits),
        step=0,
        max_steps=max_steps,
        trained=0,
        version=0,
        published=0,
        reward=None,
        first_reward=None,
        rollouts_per_s=0.0,
        tokens_per_s=0.0,
        eta_s=None,
        inflight=0,
        limit=0,
        queued_sequences=0,
        queued_groups=0,
        batch_size=batch_size,
        buffer="there is no run yet" if state == "starting" else "the run is over",
        outcomes={},
        failures={},
        envs={},
        domains={},
        endpoints=list(endpoints),
        evals=[],
        staleness={},
        refused="",
        notes=list(notes),
        minimums_waived=0,
        loop_lag_p99_s=0.0,
        journal_backlog_bytes=0,
        seconds=seconds,
        sources=list(sources),
    )


def by_domain(envs: Mapping[str, EnvStatus]) -> dict[str, DomainStatus]:
    """Envs summed up by domain, in the order of the first env of each; rewards weighted by the envs' targets."""
    members: dict[str, list[str]] = {}
    for name, env in envs.items():
        members.setdefault(env.domain, []).append(name)
    return {domain: _together(names, [envs[name] for name in names]) for domain, names in members.items()}


def _together(names: list[str], envs: list[EnvStatus]) -> DomainStatus:
    known = [(env.target, env.reward) for env in envs if env.reward is not None]
    weight = sum(target for target, _ in known)
    return DomainStatus(
        envs=names,
        target=sum(env.target for env in envs),
        actual=sum(env.actual for env in envs),
        recent=sum(env.recent for env in envs),
        emitted=sum(env.emitted for env in envs),
        inflight=sum(env.inflight for env in envs),
        completed=sum(env.completed for env in envs),
        failed=sum(env.failed for env in envs),
        reward=sum(target * reward for target, reward in known) / weight if weight else None,
    )
