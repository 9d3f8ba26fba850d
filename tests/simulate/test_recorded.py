"""From records to behaviour: what was cut off counts as what it is."""

import math
import random
import statistics
from collections import Counter

import pytest

from orchestrator.facts.steps import SLOWEST, StepRecord, seconds_of, time_step
from orchestrator.simulate.behaviour import assumed
from orchestrator.simulate.distributions import log_normal
from orchestrator.simulate.recorded import Recording, estimate_alike, estimate_ends, lay_recording
from tests.support.step_records import step_record


def test_times_are_counted_in_steps_of_a_few_percent() -> None:
    """From a millisecond to days."""
    for seconds in (0.002, 0.05, 1.0, 77.0, 86_400.0):
        assert seconds_of(time_step(seconds)) == pytest.approx(seconds, rel=0.022)
    assert (time_step(0.0), time_step(0.0004)) == (0, 0)


def test_the_estimate_is_that_of_kaplan_and_meier() -> None:
    """Of five, one ends at 1, one is cut at 2, one ends at 3, one is cut at 4, one ends at 5: 1/5, 4/15 and the rest."""
    ends = estimate_ends({"completed": {1: 1, 3: 1, 5: 1}, "cut": {2: 1, 4: 1}})
    assert ends.times["completed"] == pytest.approx({1: 1 / 5, 3: 4 / 5 / 3, 5: 4 / 5 * 2 / 3})
    assert ends.unseen == pytest.approx(0.0)


def test_success_and_failure_compete_and_what_was_always_cut_is_unseen() -> None:
    """Each end takes its share of those that were under way."""
    ends = estimate_ends({"completed": {1: 2}, "retryable": {1: 1}, "failed": {2: 1}, "cut": {3: 4}})
    assert ends.share == pytest.approx({"completed": 2 / 8, "retryable": 1 / 8, "failed": 1 / 8})
    assert ends.unseen == pytest.approx(0.5)
    assert ends.longest == seconds_of(3)


def test_a_time_out_does_not_make_rollouts_look_faster_than_they_are() -> None:
    """The mean of those that came back is far below what is estimated with those that were cut off."""
    rng = random.Random(0)
    times: dict[str, Counter[int]] = {"completed": Counter(), "cut": Counter()}
    plain = []
    for _ in range(20_000):
        seconds, limit = rng.lognormvariate(0, 1), rng.choice([0.5, 1.0, 3.0, 50.0])
        plain += [seconds] if seconds <= limit else []
        times["completed" if seconds <= limit else "cut"][time_step(min(seconds, limit))] += 1
    ends = estimate_ends(times)
    mean = sum(seconds_of(step) * mass for step, mass in ends.times["completed"].items())
    assert statistics.mean(plain) < 0.75 * math.exp(0.5)
    assert mean + ends.unseen * 1.5 * ends.longest == pytest.approx(math.exp(0.5), rel=0.06)


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_how_alike_the_times_of_a_group_are_is_seen_in_its_slowest(alike: float) -> None:
    """Groups of 8 that were drawn with it give it back."""
    latency, rng = log_normal(1.0, 0.7), random.Random(2)
    slowest = []
    for _ in range(4000):
        common = rng.random()
        places = [common if rng.random() < alike else rng.random() for _ in range(8)]
        slowest.append(max(latency.at(place) for place in places))
    assert estimate_alike(latency, statistics.mean(slowest), 8) == pytest.approx(alike, abs=0.06)


def record(step: int) -> StepRecord:
    """One with times of env "a" alone."""
    made = step_record(step, envs=("a", "b"))
    made.envs["a"].times = {
        "completed": {time_step(2.0): 30},
        "retryable": {time_step(0.5): 10},
        SLOWEST: {time_step(2.0): 8},
    }
    made.envs["a"].outcomes = {"completed": 30, "failed": 10}
    made.trained_s, made.loaded_s = [3.0], [0.25]
    return made


def test_a_recording_says_what_it_can_and_what_it_cannot() -> None:
    """Times, rewards, lengths, tasks, trainer and weights of what is there; the rest stays assumed, and it is said."""
    around = assumed(["a", "b"])
    recording = Recording(
        [record(1), record(2)],
        groups={"a": [[(0.0, 10), (1.0, 20)], [(1.0, 30), (1.0, 30)]]},
        sequences={"a": [2.0, 2.0]},
        tasks={"a": 500},
    )
    notes = lay_recording(recording, around)
    a, b = around.envs["a"], around.envs["b"]
    assert a.values["latency_s"].mean == pytest.approx(2.0, rel=0.03)
    assert a.values["failure"] == pytest.approx(0.25)
    assert (a.values["retryable"], a.values["equal_rewards"], a.tasks) == (1.0, 0.5, 500)
    assert (around.step_s.mean, around.update_s.mean) == (3.0, 0.25)
    assert not a.group_scored
    assert set(b.origins.values()) == {"assumed"}
    assert notes == ['env "b": the run has no times of its rollouts; what is assumed holds']
    members = a.group(random.Random(0), 2)
    assert [len(lengths) for _, lengths in members] == [2, 2]
    assert sum(map(sum, (lengths for _, lengths in members))) in (30, 60)
