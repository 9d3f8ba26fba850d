"""Whole runs of a configuration in virtual time: what is known beforehand must come out."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Config, load_config
from orchestrator.errors import StalledError
from orchestrator.service.imagined import env_names, imagine
from orchestrator.simulate.answers import Answer
from orchestrator.simulate.behaviour import assumed, parse_behaviour

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


GRADED = "[default]\nreward = { mean = 1.0 }\n"
"""No two rewards are equal, so that no group is filtered."""


def config(envs: list[dict[str, Any]] | None = None, **changes: Any) -> Config:
    tables = [{"id": "reverse", "ratio": 1.0, **env} for env in envs or [{"name": "a"}]]
    sections: dict[str, Any] = {
        "local": {},
        "batch": {"size": 16},
        "train": {"group_size": 4, "env": tables},
        "dispatch": {"max_inflight": 32, "ramp_s": 0.0},
    }
    return Config(**(sections | changes))


def play(made: Config, behaviour: str, *, steps: int = 30, seed: int = 0) -> Answer:
    around = assumed(env_names(made))
    parse_behaviour(tomllib.loads(behaviour), around)
    return imagine(made, around).once(seed, steps=steps, seconds=float("inf"))


def test_a_slow_trainer_sets_the_pace() -> None:
    """It is busy all the time, and its step is the run's."""
    answer = play(config(), "[default]\nlatency_s = 0.1\n[trainer]\nstep_s = 10", steps=40)
    assert answer.steps_per_hour == pytest.approx(360, rel=0.03)
    assert answer.trainer == pytest.approx(1.0, abs=0.05)
    assert answer.time["trainer"] > 0.9


def test_without_staleness_rollouts_and_trainer_take_turns() -> None:
    """A step takes as long as both, one after the other, with the weights between them."""
    made = config(staleness={"max_versions": 0})
    answer = play(made, GRADED + "latency_s = 2.0\n[trainer]\nstep_s = 3.0\n[weights]\nupdate_s = 1.0")
    assert (answer.staleness, answer.ages) == (0.0, [1.0])
    assert answer.steps_per_hour == pytest.approx(600, rel=0.02)
    assert answer.time["weights"] == pytest.approx(1 / 6, abs=0.02)


def test_engines_sample_no_faster_than_their_table() -> None:
    """More rollouts at once gain nothing beyond its last point; two engines sample twice as much."""
    behaviour = (
        GRADED
        + "latency_s = 0.001\ntokens = 100\n[trainer]\nstep_s = 0.1\n[engines]\ntokens_per_s = [[1, 100], [8, 400]]"
    )
    one = play(config(), behaviour)
    more = play(config(dispatch={"max_inflight": 64, "ramp_s": 0.0}), behaviour)
    urls = {"base_urls": ["http://one/v1", "http://two/v1"]}
    two = play(config(local=None, inference=urls), behaviour)
    assert one.tokens_per_s == pytest.approx(400, rel=0.05)
    assert one.engines == pytest.approx(1.0, abs=0.08)
    assert more.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.05)
    assert two.tokens_per_s == pytest.approx(800, rel=0.08)


def test_engines_that_pause_for_weights_sample_less() -> None:
    """A second of loading in each step is a second without tokens."""
    behaviour = (
        GRADED
        + "latency_s = 0.001\ntokens = 100\n[trainer]\nstep_s = 0.1\n[engines]\ntokens_per_s = [[8, 400]]\n[weights]\nupdate_s = 1.0\n"
    )
    going_on, pausing = play(config(), behaviour), play(config(), behaviour + "pauses = true")
    assert pausing.tokens_per_s < 0.9 * going_on.tokens_per_s


def test_what_fails_and_is_filtered_is_thrown_away() -> None:
    """Failures that are asked again cost an attempt, groups of equal rewards all of theirs."""
    clean = play(config(), "[default]\nreward = { mean = 1.0 }")
    failing = play(config(), "[default]\nfailure = 0.2\nreward = { mean = 1.0 }")
    equal = play(config(), "[default]\nequal_rewards = 0.5\nreward = { mean = 1.0 }", steps=60)
    assert clean.thrown_away == 0.0
    assert failing.thrown_away == pytest.approx(0.2, abs=0.05)
    assert equal.thrown_away == pytest.approx(0.5, abs=0.1)
    assert set(equal.dropped) == {"equal_rewards"}


def test_rollouts_may_yield_several_sequences() -> None:
    """The mix is of rollouts: an env whose rollouts yield two sequences each has twice its share of the batches."""
    envs = [{"name": "a", "ratio": 0.75}, {"name": "b", "ratio": 0.25}]
    answer = play(
        config(envs),
        "[env.a]\nsequences = 2\nreward = { mean = 1 }\n[env.b]\nreward = { mean = 1 }",
        steps=80,
    )
    assert answer.shares["a"] == pytest.approx(6 / 7, abs=0.03)
    assert sum(answer.shares.values()) == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_run() -> None:
    """And another one another."""
    made = load_config(QUICKSTART)
    assert play(made, "", steps=5) == play(made, "", steps=5) != play(made, "", steps=5, seed=1)


def test_evaluations_take_their_slots() -> None:
    """They run in between, and training goes on."""
    made = config(eval={"interval": 2, "env": [{"id": "reverse", "name": "exam", "num_examples": 8}]})
    answer = play(made, "[env.eval-exam]\nlatency_s = 0.5", steps=10)
    assert answer.steps == 10


@pytest.mark.parametrize(
    ("changes", "behaviour", "complaint"),
    [
        (
            {"mix": {"breaker": False}},
            "[default]\nfailure = 1.0\nretryable = 0.0",
            "none of the last .* rollouts could be trained on",
        ),
        (
            {"dispatch": {"max_barren_batches": 10**6, "max_inflight": 16}},
            "[default]\nfailure = 1.0\nretryable = 0.0",
            r"^every env has been failing for \d+ s: .*failed",
        ),
        ({"batch": {"size": 7, "on_stuck": "wait"}}, GRADED, "exactly 7"),
    ],
)
def test_a_run_that_forms_no_batch_says_what_it_waits_for(
    changes: dict[str, Any], behaviour: str, complaint: str
) -> None:
    """In the words of the live run, and with its exit code."""
    with pytest.raises(StalledError, match=complaint):
        play(config(**changes), behaviour)
