"""Every metric that Prometheus is given, as one table: name, kind, labels, meaning, and how it is read.

`metrics` exports the table, `metrics_reference` writes docs/metrics.md from it, and a test holds dashboard and alerts
to it. The number of series is bounded: envs and domains are those of the configuration, endpoints those that there are, kinds of failures and
reported numbers are bounded where they are counted, and so are the metrics that an environment makes up.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.waits import WaitKind
from orchestrator.facts import DomainStatus, EndpointStatus, EnvStatus, EnvStep, Spread, Status
from orchestrator.facts.interval import MOST_METRICS

STATES = ("starting", "running", "draining", "finished")
"""Of a run; a series for each, so that a dashboard can show how long it was in which."""

Labels = tuple[str, ...]
Sample = tuple[Labels, float | None]
"""Values of the labels, and the number; None: not known yet, so that there is no series."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; a counter's series end in `_total`."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: Labels
    meaning: str
    read: Callable[[Status, Ledger], Iterable[Sample]]

    @property
    def series(self) -> str:
        """The name that a query uses."""
        return f"orchestrator_{self.name}" + ("_total" if self.kind == "counter" else "")


def _of_run(name: str, meaning: str, read: Callable[[Status], float | None]) -> Family:
    return Family(name, "gauge", (), meaning, lambda status, _: [((), read(status))])


def _of_env(
    name: str,
    meaning: str,
    read: Callable[[EnvStatus], float | None],
    kind: Literal["gauge", "counter"] = "gauge",
) -> Family:
    return Family(
        name,
        kind,
        ("env",),
        meaning,
        lambda status, _: [((env,), read(found)) for env, found in status.envs.items()],
    )


def _of_domain(name: str, meaning: str, read: Callable[[DomainStatus], float]) -> Family:
    return Family(
        name,
        "gauge",
        ("domain",),
        meaning,
        lambda status, _: [((domain,), read(found)) for domain, found in status.domains.items()],
    )


def _of_endpoint(name: str, meaning: str, read: Callable[[EndpointStatus], float]) -> Family:
    return Family(
        name,
        "gauge",
        ("url",),
        meaning,
        lambda status, _: [((endpoint.url,), read(endpoint)) for endpoint in status.endpoints],
    )


def _waiting(status: Status, _: Ledger) -> Iterator[Sample]:
    found = {wait.kind for wait in status.waits}
    return (((kind.value,), float(kind.value in found)) for kind in WaitKind)


def _dropped(status: Status, _: Ledger) -> Iterator[Sample]:
    return (((env, reason), n) for env, found in status.envs.items() for reason, n in found.dropped.items())


def _spread(name: str, meaning: str, read: Callable[[EnvStep], Spread | None]) -> Family:
    """Quantiles of an env's last step; `quantile` is 0.5, 0.9, 0.99 or 1, the largest."""

    def samples(status: Status, _: Ledger) -> Iterator[Sample]:
        for env, found in status.envs.items():
            spread = None if found.last is None else read(found.last)
            if spread is not None:
                for quantile, value in (
                    ("0.5", spread.p50),
                    ("0.9", spread.p90),
                    ("0.99", spread.p99),
                    ("1", spread.max),
                ):
                    yield (env, quantile), value

    return Family(name, "gauge", ("env", "quantile"), meaning, samples)


def _env_metrics(status: Status, _: Ledger) -> Iterator[Sample]:
    return (
        ((env, name), value)
        for env, found in status.envs.items()
        if found.last is not None
        for name, value in list(found.last.metrics.items())[:MOST_METRICS]
    )


def _step_times(status: Status, _: Ledger) -> Iterator[Sample]:
    times = {} if status.last is None else status.last.time
    return (((what,), seconds) for what, seconds in times.items())


def _mean_age(status: Status) -> float | None:
    """Of the last batch's sequences."""
    if status.last is None or not sum(status.last.staleness):
        return None
    ages = status.last.staleness
    return sum(age * n for age, n in enumerate(ages)) / sum(ages)


def _eval_scores(status: Status, _: Ledger) -> Iterator[Sample]:
    return (
        ((env, name), value)
        for env, result in _latest(status).items()
        for name, value in result.items()
        if "@" in name
    )


def _latest(status: Status) -> dict[str, dict[str, float]]:
    """The last evaluation of each env."""
    return {result["env"]: result for result in status.evals}


_RUN = [
    Family(
        "state",
        "gauge",
        ("state",),
        "1 for the state that the run is in: " + ", ".join(STATES),
        lambda status, _: (((state,), float(state == status.state)) for state in STATES),
    ),
    Family(
        "waiting",
        "gauge",
        ("kind",),
        "1 while something of this kind is waited for; docs/architecture.md explains every kind",
        _waiting,
    ),
    _of_run(
        "idle_seconds",
        "Seconds since a rollout last ended or a batch was formed",
        lambda status: status.idle_s,
    ),
    _of_run("uptime_seconds", "Time that the run has run, earlier processes included", lambda s: s.seconds),
    _of_run("step", "Last batch that was formed", lambda status: status.step),
    _of_run("trained_step", "Last batch that was trained on", lambda status: status.trained),
    _of_run("max_steps", "Batches after which the run is done, where that is set", lambda s: s.max_steps),
    _of_run(
        "policy_version", "Version that the inference servers sample from", lambda status: status.version
    ),
    _of_run("published_version", "Newest version that the trainer published", lambda s: s.published),
    _of_run("reward", "Mean reward in the last step", lambda status: status.reward),
    _of_run("inflight", "Rollouts in flight", lambda status: status.inflight),
    _of_run("inflight_limit", "Most rollouts in flight", lambda status: status.limit),
    _of_run("rollouts_per_second", "Rollouts completed in the last seconds", lambda s: s.rollouts_per_s),
    _of_run(
        "tokens_per_second", "Tokens of rollouts completed in the last seconds", lambda s: s.tokens_per_s
    ),
    _of_run("eta_seconds", "Time until the last step is formed, where max_steps is set", lambda s: s.eta_s),
    _of_run("queued_sequences", "Sequences that wait for a batch", lambda status: status.queued_sequences),
    _of_run(
        "batch_size",
        "What a batch holds, in sequences or, with batch.unit, in tokens",
        lambda s: s.batch_size,
    ),
    _of_run(
        "staleness_versions_mean",
        "Mean age in versions of what was trained on",
        lambda status: status.staleness.get("mean"),
    ),
    _of_run(
        "staleness_versions_max",
        "Largest age in versions of what was trained on",
        lambda status: status.staleness.get("max"),
    ),
    _of_run("step_staleness_versions_mean", "Mean age in versions of the last batch's sequences", _mean_age),
    _of_run("staleness_limit_versions", "staleness.max_versions", lambda status: status.max_versions),
    _of_run("step_tokens", "Tokens of the last batch", lambda s: None if s.last is None else s.last.tokens),
    _of_run(
        "truncated_share",
        "Share of the last batch's sequences that a length limit cut",
        lambda s: None if s.last is None else s.last.truncated,
    ),
    _of_run(
        "filtered_share",
        "Share of the rollouts before the last step whose group had equal rewards",
        lambda s: None if s.last is None else s.last.filtered,
    ),
    Family(
        "step_seconds",
        "gauge",
        ("spent",),
        "Seconds before the last step, by what they went to: rollouts, trainer, weights or paused",
        _step_times,
    ),
    Family(
        "trainer_reported",
        "gauge",
        ("name",),
        "What the trainer reported last, by name (64 names at most)",
        lambda status, _: [((name,), told.value) for name, told in status.reports.items()],
    ),
    _of_run(
        "logprob_mismatch_unusual",
        "1 while the trainer's log-probabilities differ more than usual from the engines'",
        lambda status: float(bool(status.mismatch)),
    ),
    Family(
        "minimums_waived",
        "counter",
        (),
        "Times that the minimum of an env was waived",
        lambda status, _: [((), status.minimums_waived)],
    ),
    Family("tokens", "counter", (), "Tokens in batches", lambda status, _: [((), status.tokens)]),
]

_ROLLOUTS = [
    Family(
        "rollouts_dispatched",
        "counter",
        ("lane", "env"),
        "Rollouts started; the lane is train or eval",
        lambda _, ledger: [((lane, env), n) for (lane, env), n in ledger.dispatched.items()],
    ),
    Family(
        "rollouts",
        "counter",
        ("lane", "env", "outcome", "detail"),
        "Rollouts ended: completed, failed, timed_out, cancelled or lost; the detail is the kind of failure (64 kinds for"
        " each env, then other) or the reason",
        lambda _, ledger: [((lane, env, end, detail), n) for lane, env, end, detail, n in ledger.rows()],
    ),
    Family(
        "rollouts_dropped",
        "counter",
        ("env", "reason"),
        "Rollouts that were completed and not trained on",
        _dropped,
    ),
]

_ENVS = [
    _of_env("mix_target_share", "Share of the env that the configuration asks for", lambda env: env.target),
    _of_env("mix_actual_share", "Share of the env in all batches so far", lambda env: env.actual),
    _of_env("mix_recent_share", "Share of the env in the last batches", lambda env: env.recent),
    _of_env("sequences", "Sequences of the env in batches", lambda env: env.emitted, "counter"),
    _of_env("env_inflight", "Rollouts of the env in flight", lambda env: env.inflight),
    _of_env("env_queued_sequences", "Sequences of the env in the queue", lambda env: env.queued),
    _of_env(
        "env_acceptance", "Share of the env's rollouts that reach the buffer", lambda env: env.acceptance
    ),
    _of_env("env_latency_seconds", "Mean time of the env's groups in flight", lambda env: env.mean_latency_s),
    _of_env("env_reward", "Mean reward of the env in the last step", lambda env: env.reward),
    _of_env("env_quarantined", "1 while the env is only probed", lambda env: float(env.quarantined)),
    _of_env(
        "minimum_waived",
        "1 while batches are formed without the env's minimum",
        lambda env: float(bool(env.minimum_waived)),
    ),
    _spread(
        "env_rollout_seconds",
        "Time of the env's rollouts that came back before the last step, by quantile (0.5, 0.9, 0.99, 1)",
        lambda step: step.latency_s,
    ),
    _spread(
        "env_sequence_tokens",
        "Tokens of the env's sequences in the last step, by quantile (0.5, 0.9, 0.99, 1)",
        lambda step: step.length,
    ),
    _of_env(
        "env_truncated_share",
        "Share of the env's sequences in the last step that a length limit cut",
        lambda env: None if env.last is None else env.last.truncated,
    ),
    Family(
        "env_metric",
        "gauge",
        ("env", "name"),
        f"Mean of an environment's own metric before the last step ({MOST_METRICS} names for each env at most)",
        _env_metrics,
    ),
    _of_env("env_servers", "Servers that the env should have", lambda env: env.servers),
    _of_env("env_servers_ready", "Servers of the env that are ready", lambda env: env.servers_ready),
    _of_env("env_restarts", "Restarts of env servers", lambda env: env.restarts, "counter"),
]

_DOMAINS = [
    _of_domain("domain_mix_target", "Share of the domain that is asked for", lambda domain: domain.target),
    _of_domain(
        "domain_mix_actual", "Share of the domain in all batches so far", lambda domain: domain.actual
    ),
    _of_domain(
        "domain_mix_count", "Sequences of the domain in all batches so far", lambda domain: domain.emitted
    ),
]

_ENDPOINTS = [
    _of_endpoint(
        "endpoint_inflight", "Rollouts in flight on an endpoint", lambda endpoint: endpoint.inflight
    ),
    _of_endpoint("endpoint_healthy", "1 while an endpoint is given work", lambda e: float(e.healthy)),
    _of_endpoint("endpoint_version", "Version of the weights that an endpoint has", lambda e: e.version),
]

_EVALS = [
    Family(
        "eval_score",
        "gauge",
        ("env", "score"),
        "The latest evaluation: avg@k, pass@k, and each with _stderr",
        _eval_scores,
    ),
    Family(
        "eval_failures",
        "gauge",
        ("env",),
        "Failed attempts of the latest evaluation",
        lambda status, _: [((env,), result["failures"]) for env, result in _latest(status).items()],
    ),
    Family(
        "eval_step",
        "gauge",
        ("env",),
        "Step of the latest evaluation",
        lambda status, _: [((env,), result["step"]) for env, result in _latest(status).items()],
    ),
]

_PROCESS = [
    _of_run(
        "loop_lag_p99_seconds",
        "99th percentile of the event loop's lag, over a minute",
        lambda s: s.loop_lag_p99_s,
    ),
    _of_run("journal_backlog_bytes", "Bytes that wait for the disk", lambda s: s.journal_backlog_bytes),
    _of_run(
        "disk_free_bytes", "Free bytes of the disk that has the run directory", lambda s: s.disk_free_bytes
    ),
    Family(
        "tracker_lost_lines",
        "counter",
        ("tracker",),
        "Steps and evaluations that a tracker did not take",
        lambda status, _: [((tracker.name,), tracker.lost) for tracker in status.trackers],
    ),
]

FAMILIES: dict[str, list[Family]] = {
    "The run": _RUN,
    "Rollouts": _ROLLOUTS,
    "Environments": _ENVS,
    "Domains": _DOMAINS,
    "Inference servers": _ENDPOINTS,
    "Evaluations": _EVALS,
    "The process": _PROCESS,
}
"""All of them, by what they are about."""
