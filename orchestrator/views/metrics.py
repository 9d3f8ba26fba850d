"""Prometheus metrics, read off the facts and the ledger at the moment of the scrape."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from orchestrator.dispatch.ledger import Ledger
from orchestrator.facts import DomainStatus, EnvStatus, Status

_DOMAIN_GAUGES: list[tuple[str, str, Callable[[DomainStatus], float]]] = [
    ("domain_mix_target", "Share of the domain that is asked for", lambda domain: domain.target),
    ("domain_mix_actual", "Share of the domain in all batches so far", lambda domain: domain.actual),
    ("domain_mix_count", "Sequences of the domain in all batches so far", lambda domain: domain.emitted),
]

_ENV_GAUGES: list[tuple[str, str, Callable[[EnvStatus], float | None]]] = [
    ("mix_target_share", "Share of the env that the configuration asks for", lambda env: env.target),
    ("mix_actual_share", "Share of the env in all batches so far", lambda env: env.actual),
    ("mix_recent_share", "Share of the env in the last batches", lambda env: env.recent),
    ("env_inflight", "Rollouts of the env in flight", lambda env: env.inflight),
    ("env_acceptance", "Share of the env's rollouts that reach the buffer", lambda env: env.acceptance),
    ("env_latency_seconds", "Mean time of the env's groups in flight", lambda env: env.mean_latency_s),
    ("env_reward", "Mean reward of the env in the last step", lambda env: env.reward),
    ("env_quarantined", "1 while the env is only probed", lambda env: float(env.quarantined)),
    (
        "minimum_waived",
        "1 while batches are formed without the env's minimum",
        lambda env: float(bool(env.minimum_waived)),
    ),
    ("env_servers_ready", "Servers of the env that are ready", lambda env: env.servers_ready),
    ("env_queued_sequences", "Sequences of the env in the queue", lambda env: env.queued),
]

_GAUGES: list[tuple[str, str, Callable[[Status], float | None]]] = [
    ("step", "Last batch that was formed", lambda status: status.step),
    ("trained_step", "Last batch that was trained on", lambda status: status.trained),
    ("policy_version", "Version that the inference servers sample from", lambda status: status.version),
    ("published_version", "Newest version that the trainer published", lambda status: status.published),
    ("inflight", "Rollouts in flight", lambda status: status.inflight),
    ("inflight_limit", "Most rollouts in flight", lambda status: status.limit),
    ("queued_sequences", "Sequences that wait for a batch", lambda status: status.queued_sequences),
    ("reward", "Mean reward in the last step", lambda status: status.reward),
    (
        "staleness_versions_mean",
        "Mean age in versions of what was trained on",
        lambda status: status.staleness["mean"],
    ),
    (
        "staleness_versions_max",
        "Largest age in versions of what was trained on",
        lambda status: status.staleness["max"],
    ),
    ("loop_lag_p99_seconds", "99th percentile of the event loop's lag", lambda status: status.loop_lag_p99_s),
    ("journal_backlog_bytes", "Bytes that wait for the disk", lambda status: status.journal_backlog_bytes),
]


class StatusCollector(Collector):
    """Turns a status into metric families."""

    def __init__(self, status: Callable[[], Status], ledger: Ledger) -> None:
        self._status = status
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        reported = GaugeMetricFamily(
            "orchestrator_trainer_reported", "What the trainer reported last, by name", labels=["name"]
        )
        for name, told in status.reports.items():
            reported.add_metric([name], told.value)
        yield reported
        yield GaugeMetricFamily(
            "orchestrator_logprob_mismatch_unusual",
            "1 while the trainer's log-probabilities differ more than usual from the engines'",
            float(bool(status.mismatch)),
        )
        for name, text, read in _GAUGES:
            value = read(status)
            if value is not None:
                yield GaugeMetricFamily(f"orchestrator_{name}", text, value)
        for name, text, read_env in _ENV_GAUGES:
            family = GaugeMetricFamily(f"orchestrator_{name}", text, labels=["env"])
            for env, env_status in status.envs.items():
                value = read_env(env_status)
                if value is not None:
                    family.add_metric([env], value)
            yield family
        for name, text, read_domain in _DOMAIN_GAUGES:
            family = GaugeMetricFamily(f"orchestrator_{name}", text, labels=["domain"])
            for domain, domain_status in status.domains.items():
                family.add_metric([domain], read_domain(domain_status))
            yield family
        yield from self._counters(status)

    def _counters(self, status: Status) -> Iterator[Metric]:
        dispatched = CounterMetricFamily(
            "orchestrator_rollouts_dispatched", "Rollouts started", labels=["lane", "env"]
        )
        for (lane, env), n in self._ledger.dispatched.items():
            dispatched.add_metric([lane, env], n)
        yield dispatched
        ended = CounterMetricFamily(
            "orchestrator_rollouts", "Rollouts ended, by outcome", labels=["lane", "env", "outcome", "detail"]
        )
        for lane, env, outcome, detail, n in self._ledger.rows():
            ended.add_metric([lane, env, outcome, detail], n)
        yield ended
        sequences = CounterMetricFamily("orchestrator_sequences", "Sequences in batches", labels=["env"])
        dropped = CounterMetricFamily(
            "orchestrator_rollouts_dropped", "Rollouts that were not trained on", labels=["env", "reason"]
        )
        restarts = CounterMetricFamily("orchestrator_env_restarts", "Restarts of env servers", labels=["env"])
        for env, env_status in status.envs.items():
            sequences.add_metric([env], env_status.emitted)
            restarts.add_metric([env], env_status.restarts)
            for reason, n in env_status.dropped.items():
                dropped.add_metric([env, reason], n)
        yield from (sequences, dropped, restarts)
        yield CounterMetricFamily(
            "orchestrator_minimums_waived",
            "Times that the minimum of an env was waived",
            status.minimums_waived,
        )
        yield from self._evals(status)
        endpoints = GaugeMetricFamily(
            "orchestrator_endpoint_inflight", "Rollouts in flight on an endpoint", labels=["url"]
        )
        healthy = GaugeMetricFamily(
            "orchestrator_endpoint_healthy", "1 while an endpoint is given work", labels=["url"]
        )
        for endpoint in status.endpoints:
            endpoints.add_metric([endpoint.url], endpoint.inflight)
            healthy.add_metric([endpoint.url], float(endpoint.healthy))
        yield from (endpoints, healthy)

    def _evals(self, status: Status) -> Iterator[Metric]:
        """The latest result of each evaluated env; avg@k and pass@k by their name."""
        scores = GaugeMetricFamily("orchestrator_eval_score", "Latest evaluation", labels=["env", "score"])
        failures = GaugeMetricFamily(
            "orchestrator_eval_failures", "Failed attempts of the latest evaluation", labels=["env"]
        )
        steps = GaugeMetricFamily("orchestrator_eval_step", "Step of the latest evaluation", labels=["env"])
        for env, result in {result["env"]: result for result in status.evals}.items():
            for name, value in result.items():
                if "@" in name and value is not None:
                    scores.add_metric([env, name], value)
            failures.add_metric([env], result["failures"])
            steps.add_metric([env], result["step"])
        yield from (scores, failures, steps)


def render_metrics(status: Callable[[], Status], ledger: Ledger) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, ledger))
    return generate_latest(registry)
