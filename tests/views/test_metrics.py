"""Prometheus metrics: what a scrape shows is what the ledger and the status say."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.dispatch.ledger import Lane, Ledger, Outcome
from orchestrator.facts import EndpointStatus, ReportStatus, Status
from orchestrator.facts.interval import MOST_METRICS
from orchestrator.views.metrics import render_metrics
from tests.support.sample_status import env_status, sample_status
from tests.support.sample_steps import sample_env_step, sample_step

Sample = tuple[str, tuple[tuple[str, str], ...]]


def scraped(status: Status, ledger: Ledger | None = None) -> dict[Sample, float]:
    """Every sample by name and labels, as Prometheus reads it."""
    text = render_metrics(lambda: status, ledger or Ledger()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(name: str, **labels: str) -> Sample:
    return f"orchestrator_{name}", tuple(sorted(labels.items()))


def test_rollouts_are_counted_by_the_ledger() -> None:
    """Started and ended rollouts carry lane and env; ended ones their outcome and its detail."""
    ledger = Ledger()
    ledger.start(Lane.TRAIN, "math", 8)
    ledger.start(Lane.EVAL, "eval-math", 2)
    ledger.end(Lane.TRAIN, "math", 5, Outcome.COMPLETED)
    ledger.end(Lane.TRAIN, "math", 1, Outcome.FAILED, "overloaded")
    found = scraped(sample_status(), ledger)
    assert found[one("rollouts_dispatched_total", lane="train", env="math")] == 8
    assert found[one("rollouts_dispatched_total", lane="eval", env="eval-math")] == 2
    assert found[one("rollouts_total", lane="train", env="math", outcome="completed", detail="")] == 5
    assert found[one("rollouts_total", lane="train", env="math", outcome="failed", detail="overloaded")] == 1


def test_the_books_balance_in_a_scrape_too() -> None:
    """Dispatched = in flight + ended, in one scrape."""
    ledger = Ledger()
    ledger.start(Lane.TRAIN, "math", 10)
    ledger.end(Lane.TRAIN, "math", 4, Outcome.COMPLETED)
    ledger.end(Lane.TRAIN, "math", 2, Outcome.LOST)
    inflight = ledger.inflight[Lane.TRAIN, "math"]
    found = scraped(sample_status(envs={"math": env_status(inflight=inflight)}), ledger)
    ended = sum(value for (name, _), value in found.items() if name == "orchestrator_rollouts_total")
    dispatched = found[one("rollouts_dispatched_total", lane="train", env="math")]
    assert dispatched == found[one("env_inflight", env="math")] + ended


def test_the_run_is_shown() -> None:
    """Steps, versions, limits and queues are gauges without labels."""
    found = scraped(sample_status())
    expected = {
        "step": 5,
        "trained_step": 4,
        "policy_version": 4,
        "published_version": 4,
        "inflight": 12,
        "inflight_limit": 64,
        "queued_sequences": 8,
        "reward": 0.75,
        "staleness_versions_mean": 0.5,
        "staleness_versions_max": 2,
        "loop_lag_p99_seconds": 0.003,
        "journal_backlog_bytes": 1024,
        "minimums_waived_total": 2,
    }
    assert {name: found[one(name)] for name in expected} == expected


def test_what_the_trainer_reports_is_shown_by_name() -> None:
    """And whether its log-probabilities are unlike the engines'."""
    told = ReportStatus(step=4, value=0.25, low=0.1, median=0.2, high=0.3, recent=[(4, 0.25)])
    found = scraped(sample_status(reports={"loss": told}, mismatch="it is odd"))
    assert found["orchestrator_trainer_reported", (("name", "loss"),)] == 0.25
    assert found[one("logprob_mismatch_unusual")] == 1
    assert scraped(sample_status())[one("logprob_mismatch_unusual")] == 0


def test_every_env_is_shown() -> None:
    """Mix, reward, latency, servers and losses have the env as their label."""
    absent = env_status(quarantined=True, emitted=7, minimum_waived="it has no ready server")
    found = scraped(sample_status(envs={"a": env_status(), "b": absent}))
    assert found[one("mix_target_share", env="a")] == 0.4
    assert found[one("mix_actual_share", env="a")] == 0.391
    assert found[one("env_latency_seconds", env="a")] == 0.25
    assert found[one("env_quarantined", env="a")] == 0
    assert found[one("env_quarantined", env="b")] == 1
    assert found[one("minimum_waived", env="a")] == 0
    assert found[one("minimum_waived", env="b")] == 1
    assert found[one("sequences_total", env="b")] == 7
    assert found[one("env_restarts_total", env="a")] == 3
    assert found[one("rollouts_dropped_total", env="a", reason="equal_rewards")] == 4


def test_the_last_step_is_shown() -> None:
    """Quantiles of times and lengths, shares cut and filtered, ages, where the time went, and metrics by their names."""
    status = sample_status(
        envs={"a": env_status(last=sample_env_step()), "b": env_status()}, last=sample_step()
    )
    found = scraped(status)
    quantiles = {"0.5": 2, "0.9": 3, "0.99": 4, "1": 5}
    for name in ("env_rollout_seconds", "env_sequence_tokens"):
        assert {q: found[one(name, env="a", quantile=q)] for q in quantiles} == quantiles
    assert found["orchestrator_env_metric", (("env", "a"), ("name", "turns"))] == 2
    assert found[one("env_truncated_share", env="a")] == 0.25
    assert found[one("truncated_share")] == 0.25
    assert found[one("filtered_share")] == 0.5
    assert found[one("step_staleness_versions_mean")] == 1
    assert found[one("step_seconds", spent="trainer")] == 2
    assert not [labels for _, labels in found if ("env", "b") in labels and ("quantile", "1") in labels]


def test_an_environment_cannot_fill_prometheus_with_names() -> None:
    """However many metrics it makes up."""
    many = sample_env_step(metrics={f"metric{n}": 1.0 for n in range(1000)})
    found = scraped(sample_status(envs={"a": env_status(last=many)}))
    assert len([name for name, _ in found if name == "orchestrator_env_metric"]) == MOST_METRICS


def test_every_domain_is_shown() -> None:
    """What the envs of a domain have of the mix, together: asked for, delivered, and in sequences."""
    envs = {
        "gsm": env_status(target=0.45, actual=0.4, emitted=40),
        "aime": env_status(target=0.15, actual=0.1, emitted=10),
        "code": env_status(domain="code", target=0.4, actual=0.5, emitted=50),
    }
    found = scraped(sample_status(envs=envs))
    assert found[one("domain_mix_target", domain="math")] == pytest.approx(0.6)
    assert found[one("domain_mix_actual", domain="math")] == pytest.approx(0.5)
    assert found[one("domain_mix_count", domain="math")] == 50
    assert found[one("domain_mix_count", domain="code")] == 50


def test_every_endpoint_is_shown() -> None:
    """Inference servers are told apart by their address."""
    endpoints = [
        EndpointStatus("http://a/v1", True, 3, 1, ""),
        EndpointStatus("http://b/v1", False, 0, 1, "HTTP 503"),
    ]
    found = scraped(sample_status(endpoints=endpoints))
    assert found[one("endpoint_inflight", url="http://a/v1")] == 3
    assert found[one("endpoint_healthy", url="http://b/v1")] == 0


def test_what_is_not_known_yet_is_left_out() -> None:
    """Before the first batch there is no reward, which is not a reward of 0."""
    status = sample_status(reward=None, envs={"math": env_status(reward=None, mean_latency_s=None)})
    found = scraped(status)
    assert one("reward") not in found
    assert one("env_reward", env="math") not in found
    assert one("env_latency_seconds", env="math") not in found


def test_names_with_special_characters_are_escaped() -> None:
    """An env may be named by anything, and the text stays readable for Prometheus."""
    name = 'a "b"\\\nc'
    assert found_env(name) == name


def found_env(name: str) -> str:
    found = scraped(sample_status(envs={name: env_status()}))
    (labels,) = [labels for sample, labels in found if sample == "orchestrator_env_inflight"]
    return labels[0][1]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300, -0.0, 10**18])
def test_every_number_can_be_read(value: float) -> None:
    """Also those that are none, which an environment may send."""
    found = scraped(sample_status(envs={"a": env_status(last=sample_env_step(metrics={"odd": value}))}))
    read = found["orchestrator_env_metric", (("env", "a"), ("name", "odd"))]
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_name_that_is_no_unicode_ends_no_scrape() -> None:
    """It is shown as far as it can be."""
    assert found_env("a\udcffb") == "a?b"


def test_the_latest_evaluation_of_each_env_is_shown() -> None:
    """avg@k and pass@k under their names, failures apart; an older result of the same env is not."""
    older = {"env": "eval-math", "step": 0, "failures": 9, "avg@2": 0.1, "avg@2_stderr": None}
    newer = {"env": "eval-math", "step": 20, "failures": 1, "avg@2": 0.5, "avg@2_stderr": 0.1, "pass@2": 0.75}
    found = scraped(sample_status(evals=[older, newer]))
    assert found[one("eval_score", env="eval-math", score="avg@2")] == 0.5
    assert found[one("eval_score", env="eval-math", score="pass@2")] == 0.75
    assert found[one("eval_failures", env="eval-math")] == 1
    assert found[one("eval_step", env="eval-math")] == 20
