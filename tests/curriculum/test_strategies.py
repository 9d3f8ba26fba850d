"""Curricula: what they prefer, that nothing is left out, and that wrong options are told."""

import tracemalloc
from collections import Counter
from typing import Any

import pytest

from orchestrator.curriculum import (
    STRATEGIES,
    Chance,
    CurriculumError,
    CurriculumSettings,
    CurriculumStrategy,
    Difficulty,
    Frontier,
    TaskOutcome,
    TaskStatistics,
    build_curriculum,
)


def made(strategy: str, num_tasks: int, **options: Any) -> tuple[CurriculumStrategy, TaskStatistics]:
    tasks = TaskStatistics(num_tasks, reward_range=(0.0, 1.0))
    found = build_curriculum(CurriculumSettings(strategy, options), tasks, env="a")
    assert found is not None
    return found, tasks


def tell(strategy: CurriculumStrategy, task: int, reward: float, times: int = 1) -> None:
    for _ in range(times):
        strategy.on_hand_out(task)
        strategy.tasks.add(TaskOutcome(task, 0, reward, 8, equal=reward in (0.0, 1.0)))
        strategy.on_end(task)


def picks(strategy: CurriculumStrategy, count: int) -> Counter[int]:
    return Counter(strategy.pick(Chance(number * 7919)) for number in range(count))


def test_difficulty_gives_each_pool_its_share() -> None:
    """Whatever the number of tasks in it; all of them were tried."""
    strategy, _ = made("difficulty", 100, easy=0.3, medium=0.5, hard=0.2, checkup=0.0)
    for task in range(100):
        tell(strategy, task, 0.9 if task < 60 else 0.5 if task < 70 else 0.0)
    assert dict(strategy.pools()) == {
        "unseen": 0,
        "easy": 60,
        "medium": 10,
        "hard": 30,
        "retired": 0,
        "open": 0,
    }
    picked = picks(strategy, 4000)
    shares = [sum(picked[task] for task in range(*span)) / 4000 for span in ((0, 60), (60, 70), (70, 100))]
    assert shares == pytest.approx([0.3, 0.5, 0.2], abs=0.03)


def test_a_task_moves_between_pools_as_it_is_learned_and_forgotten() -> None:
    """From hard over medium and easy to retired, and back when a check-up finds that it is not solved any more."""
    strategy, _ = made("difficulty", 2)
    seen = []
    for reward in (0.0, 0.6, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0):
        tell(strategy, 0, reward)
        (pool,) = (name for name, count in strategy.pools().items() if count and name != "unseen")
        seen.append(pool)
    assert seen == ["hard", "medium", "medium", "easy", "easy", "retired", "medium", "medium", "hard"]


def test_retired_tasks_are_looked_at_now_and_then() -> None:
    """As often as the share for check-ups says, and not otherwise."""
    strategy, _ = made("difficulty", 20, checkup=0.1)
    for task in range(20):
        tell(strategy, task, 1.0 if task < 10 else 0.5, times=3)
    assert strategy.pools()["retired"] == 10
    assert sum(picks(strategy, 3000)[task] for task in range(10)) / 3000 == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("hard", [0.05, 0.0])
def test_check_ups_have_their_share_whatever_pools_are_empty(hard: float) -> None:
    """With hard and retired tasks alone the rest of the work is the hard ones', even where these have no share of their own."""
    strategy, _ = made("difficulty", 20, easy=0.1 - hard, medium=0.9, hard=hard)
    for task in range(20):
        tell(strategy, task, 1.0 if task < 10 else 0.0, times=3)
    assert (strategy.pools()["retired"], strategy.pools()["hard"]) == (10, 10)
    assert sum(picks(strategy, 4000)[task] for task in range(10)) / 4000 == pytest.approx(0.02, abs=0.01)


@pytest.mark.parametrize("checkup", [0.02, 0.0])
def test_with_nothing_left_but_what_has_retired_a_run_goes_on_with_that(checkup: float) -> None:
    """There has to be a task."""
    strategy, _ = made("difficulty", 10, checkup=checkup)
    for task in range(10):
        tell(strategy, task, 1.0, times=3)
    assert strategy.pools()["retired"] == 10
    assert len(picks(strategy, 500)) == 10


def test_frontier_prefers_tasks_that_are_sometimes_solved() -> None:
    """The nearer to one half, the more; those that are always or never solved hardly come."""
    strategy, _ = made("frontier", 50)
    for task in range(50):
        tell(strategy, task, (0.0, 0.25, 0.5, 0.75, 1.0)[task % 5], times=3)
    picked = picks(strategy, 4000)
    share = [sum(n for task, n in picked.items() if task % 5 == kind) / 4000 for kind in range(5)]
    assert share[2] > share[1] > 10 * share[0]
    assert share[2] > share[3] > 10 * share[4]


def test_frontier_tries_what_was_never_tried_and_does_not_drown_in_it() -> None:
    """At first there is nothing else; with good tasks at hand, a million untried ones get a small share."""
    strategy, tasks = made("frontier", 100_000)
    assert all(not tasks.groups[task] for task in picks(strategy, 100))
    for task in range(60):
        tell(strategy, task, 0.5, times=2)
    untried = sum(n for task, n in picks(strategy, 1000).items() if task >= 60)
    assert 0 < untried < 200


def test_frontier_gives_up_tasks_whose_rewards_are_equal_for_another_reason() -> None:
    """A reward of one half for every answer looks like the best task of all, and teaches nothing."""
    strategy, tasks = made("frontier", 40)
    for task in range(40):
        for _ in range(3):
            strategy.on_hand_out(task)
            tasks.add(TaskOutcome(task, 0, 0.5, 8, equal=task < 20))
            strategy.on_end(task)
    assert sum(n for task, n in picks(strategy, 1000).items() if task < 20) < 20


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_task_that_is_open_is_not_picked_unless_there_is_no_other(strategy: str) -> None:
    """Two groups of one task at a time would learn the same twice; but few tasks must not stop a run."""
    found, _ = made(strategy, 4)
    for number in range(4):
        task = found.pick(Chance(number))
        assert found.pools()["open"] == number
        found.on_hand_out(task)
    assert found.pools()["open"] == 4
    again = found.pick(Chance(4))
    found.on_hand_out(again)
    found.on_end(again)
    assert found.pools()["open"] == 4, "its other group is still open"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics_that_were_read_back_sort_tasks_as_before(strategy: str) -> None:
    """A restart changes no pool."""
    before, tasks = made(strategy, 50)
    for task in range(40):
        tell(before, task, (task % 9) / 8, times=1 + task % 3)
    after = build_curriculum(CurriculumSettings(strategy), tasks, env="a")
    assert after is not None
    after.on_load()
    assert after.pools() == before.pools()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_task_takes_at_most_64_bytes_wherever_it_has_been(strategy: str) -> None:
    """Statistics and pools together, by the allocator's own count, after every task has gone through several pools."""
    number = 5_000
    made(strategy, 1)  # what is imported and compiled once is not of a task
    tracemalloc.start()
    try:
        found, tasks = made(strategy, number)
        for reward in (0.0, 0.25, 0.5, 1.0, 1.0, 1.0):
            for task in range(number):
                tell(found, task, reward)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / number <= 64
    assert isinstance(found, (Difficulty, Frontier))
    assert tasks.nbytes + found.nbytes == pytest.approx(taken, rel=0.1), "what it says is what it takes"


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("dificulty", {}, 'no curriculum is named "dificulty".*did you mean "difficulty"'),
        ("uniform", {"easy": 1.0}, '"uniform" has no options'),
        ("difficulty", {"eazy": 0.5}, 'has no option "eazy".*did you mean "easy"'),
        ("difficulty", {"easy": 0.5}, "easy, medium and hard sum to 1.45; they must sum to 1"),
        ("difficulty", {"easy": -0.5, "medium": 1.5, "hard": 0.0}, "easy is a number from 0 to 1, not -0.5"),
        ("difficulty", {"easy": True}, "easy is a number from 0 to 1, not True"),
        ("difficulty", {"hard_below": 0.9}, "must rise in this order"),
        ("difficulty", {"retire_above": 0.5}, "must rise in this order"),
        ("difficulty", {"checkup": 0.9}, "checkup is a number from 0 to 0.5, not 0.9"),
        ("frontier", {"gain": 1}, 'has no option "gain"; it has none'),
        ("nowhere:Mine", {}, 'curriculum "nowhere:Mine" cannot be loaded'),
        ("orchestrator.mix:Flow", {}, "is not a subclass of CurriculumStrategy"),
    ],
)
def test_what_cannot_be_made_is_told(strategy: str, options: dict[str, Any], message: str) -> None:
    """With the env, the option, what it may be, and the nearest name."""
    with pytest.raises(CurriculumError, match=f'^env "a": .*{message}'):
        made(strategy, 10, **options)
