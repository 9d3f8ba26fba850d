"""How everything behaves in a simulation: what a file states, and what is refused of it."""

import random
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.simulate.behaviour import ASSUMED, Surroundings, assumed, parse_behaviour
from orchestrator.simulate.distributions import between, drawn, fixed, log_normal


def stated(text: str, names: tuple[str, ...] = ("math", "code")) -> Surroundings:
    around = assumed(names)
    parse_behaviour(tomllib.loads(text), around)
    return around


def test_a_file_states_what_differs_and_the_rest_is_said_to_be_assumed() -> None:
    """Every env takes [default], then its own table; every value knows where it comes from."""
    around = stated(
        """
        [default]
        latency_s = { mean = 4.0, spread = 0.5 }
        [env.math]
        failure = 0.1
        latency_s = 2
        [trainer]
        step_s = 30
        publish_every = 2
        [weights]
        update_s = 3.5
        pauses = true
        [engines]
        tokens_per_s = [[1, 90], [16, 1000]]
        """
    )
    math, code = around.envs["math"], around.envs["code"]
    assert (math.values["latency_s"].mean, code.values["latency_s"].mean) == (2, 4)
    assert (math.origins["failure"], code.origins["failure"]) == ("stated", "assumed")
    assert (around.step_s.mean, around.publish_every, around.update_s.mean, around.pauses) == (
        30,
        2,
        3.5,
        True,
    )
    assert around.tokens_per_s == [(1, 90), (16, 1000)]
    assert around.origins == {"trainer.step_s": "stated", "weights.update_s": "stated"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[env.maths]\nfailure = 0.1", 'no env of the configuration is named "maths"; did you mean "math"'),
        ("[env.math]\nlatency_s = -1", "env.math.latency_s: -1 is below"),
        ("[env.math]\nlatency_s = { mean = -1 }", "env.math.latency_s.mean: -1 is below"),
        ("[env.math]\nlatency_s = { spread = 1 }", "a table has mean"),
        ("[env.math]\nlatency_s = { mean = 1, sigma = 1 }", 'unknown key "sigma"; known here: mean, spread'),
        ("[env.math]\nlatency_s = 'long'", "env.math.latency_s: a number is needed"),
        ("[env.math]\nlatency_s = inf", "env.math.latency_s: a number is needed"),
        ("[env.math]\nfailure = 1.5", "env.math.failure: 1.5 is above 1"),
        ("[env.math]\nreward = { values = [] }", "env.math.reward.values: a list of numbers is needed"),
        ("[env.math]\nreward = { values = [1, 2], weights = [1] }", "one for each of the 2 values"),
        ("[env.math]\nreward = { values = [1, 2], weights = [0, 0] }", "one of them must be above 0"),
        ("[env.math]\nlatencys = 1", 'env.math: unknown key "latencys"; did you mean "latency_s"'),
        ("[env.math]\ntasks = 1.5", "env.math.tasks: a whole number is needed"),
        ("[env.math]\ngroup_scored = 1", "true or false is needed"),
        ("env = 3", "env: a table is needed"),
        ("[trainers]\nstep_s = 1", 'unknown key "trainers"; did you mean "trainer"'),
        ("[trainer]\nstep_s = -1", "trainer.step_s: -1 is below 0"),
        ("[trainer]\npublish_every = 0", "trainer.publish_every: 0 is below 1"),
        ("[engines]\ntokens_per_s = 100", "pairs of rollouts at once and tokens per second"),
        ("[engines]\ntokens_per_s = [[8, 100], [4, 50]]", "must rise"),
        ("[engines]\ntokens_per_s = [[8, -100]]", "below"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(text: str, complaint: str) -> None:
    """One line, with the path of the value."""
    with pytest.raises(ConfigError, match=complaint.replace("[", r"\[")):
        stated(text)


@pytest.mark.parametrize(
    "distribution",
    [fixed(3.0), log_normal(2.0, 0.8), drawn([0, 1, 4], [1, 2, 1]), between([(1, 2), (4, 8)], [3, 1])],
)
def test_what_is_drawn_has_the_stated_mean(distribution: Any) -> None:
    """And a larger share never has a smaller value."""
    rng = random.Random(0)
    assert statistics.mean(distribution.draw(rng) for _ in range(20_000)) == pytest.approx(
        distribution.mean, rel=0.03
    )
    values = [distribution.at(share / 100) for share in range(100)]
    assert values == sorted(values)


def test_groups_have_equal_rewards_and_times_as_often_as_stated() -> None:
    """`equal_rewards` and `alike` are about rollouts of one group."""
    env = stated("[env.math]\nequal_rewards = 0.5\nreward = { mean = 1.0 }\nalike = 1.0").envs["math"]
    rng = random.Random(1)
    groups = [env.group(rng, 4) for _ in range(2000)]
    equal = statistics.mean(len({reward for reward, _ in group}) == 1 for group in groups)
    assert equal == pytest.approx(0.5, abs=0.05)
    assert len({env.attempt(rng, 0.3) for _ in range(10)}) == 1
    assert env.attempt(rng, 0.3)[0] < env.attempt(rng, 0.9)[0]


def test_the_file_in_the_documentation_is_one() -> None:
    """Every key that there is stands in it."""
    text = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")
    block = text[text.index("```\n[default]") + 4 :].partition("```")[0]
    around = stated(block)
    assert set(tomllib.loads(block)["env"]["math"]) == set(ASSUMED)
    assert around.step_s.mean == 40
