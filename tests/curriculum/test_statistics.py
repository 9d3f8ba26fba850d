"""What is known about tasks: small, exact, and the same after it was read back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.curriculum import OUTCOMES, TaskOutcome, TaskStatistics
from orchestrator.curriculum.statistics import BINS, WINDOW

COLUMNS = ("groups", "equal", "rollouts", "reward", "version", "solve", "dull", "weight")


def statistics(num_tasks: int | None = 10, low: float = 0.0, high: float = 1.0) -> TaskStatistics:
    return TaskStatistics(num_tasks, reward_range=(low, high))


def outcome(task: int, reward: float = 0.5, *, version: int = 0, rollouts: int = 8) -> TaskOutcome:
    return TaskOutcome(task, version, reward, rollouts, equal=reward in (0.0, 1.0))


def same(one: TaskStatistics, other: TaskStatistics) -> bool:
    return (one.seen, one.histogram) == (other.seen, other.histogram) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS
    )


def test_a_task_knows_how_often_it_was_tried_and_what_came_of_it() -> None:
    """Counts and the mean are of all groups, the solve rate mostly of the last ones."""
    tasks = statistics()
    for version, reward in enumerate((0.0, 0.0, 1.0, 1.0)):
        tasks.add(outcome(3, reward, version=version, rollouts=4))
    row = tasks.row(3)
    assert (row["groups"], row["rollouts"], row["version"], row["equal_share"]) == (4, 16, 3, 1.0)
    assert row["reward"] == 0.5
    assert row["solve_rate"] == pytest.approx(0.8)
    assert tasks.seen == 1


@pytest.mark.parametrize(("reward", "rate"), [(-1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (-9.0, 0.0), (9.0, 1.0)])
def test_rewards_of_another_range_become_solve_rates(reward: float, rate: float) -> None:
    """Between the two ends of the range; what lies outside counts as the nearer end."""
    tasks = statistics(low=-1.0, high=1.0)
    tasks.add(outcome(0, reward))
    assert tasks.solve[0] == rate
    assert tasks.reward[0] == reward


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.floats(-2, 2, width=32), st.integers(1, 16), st.booleans()),
        max_size=200,
    ),
    st.sampled_from([6, 200]),
)
def test_reading_many_back_ends_where_adding_them_one_by_one_did(
    rows: list[tuple[int, float, int, bool]], spread: int
) -> None:
    """To the last bit, however often each task was tried."""
    outcomes = [
        TaskOutcome((task * 37 + place) % spread, place, reward, rollouts, equal)
        for place, (task, reward, rollouts, equal) in enumerate(rows)
    ]
    live, read = statistics(spread), statistics(spread)
    for one in outcomes:
        live.add(one)
    read.load(np.array(outcomes, OUTCOMES))
    assert same(live, read)


def test_outcomes_of_tasks_that_are_not_there_are_left_out() -> None:
    """A journal says what it says; an array has an end."""
    tasks = statistics(4)
    tasks.load(np.array([outcome(9), outcome(-1), outcome(2)], OUTCOMES))
    assert tasks.groups.tolist() == [0, 0, 1, 0]


def test_tasks_without_end_are_remembered_up_to_a_bound() -> None:
    """The last ones; the histogram counts no other."""
    tasks = statistics(None)
    first = 2**31 - 5
    for number in range(WINDOW + 100):
        tasks.add(outcome(first + number, (number % 2) * 1.0))
    assert tasks.seen == sum(tasks.histogram) == WINDOW
    assert tasks.nbytes <= WINDOW * 64
    known = {tasks.row(place)["task"] for place in range(WINDOW)}
    assert known == set(range(first + 100, first + WINDOW + 100))


def test_the_histogram_follows_the_tasks() -> None:
    """Every tried task is in one bin, that of its solve rate."""
    tasks = statistics(3)
    for reward in (0.0, 1.0, 1.0):
        tasks.add(outcome(0, reward))
    tasks.add(outcome(1, 0.55))
    expected = np.histogram(tasks.solve[:2], bins=BINS, range=(0, 1))[0].tolist()
    assert tasks.histogram == expected
    assert sum(tasks.histogram) == tasks.seen == 2
