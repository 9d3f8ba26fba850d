"""Tasks that a curriculum chooses: each position keeps its own, none is left out for ever, and uniform costs nothing."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.curriculum import (
    STRATEGIES,
    Chance,
    CurriculumSettings,
    CurriculumStrategy,
    TaskOutcome,
    TaskStatistics,
)
from orchestrator.mix import StrategyError, build_mix
from orchestrator.tasks.source import SourceEnv, TrainSource
from orchestrator.tasks.task import TrainTask


class Stubborn(CurriculumStrategy):
    """Always wants the same task."""

    def pick(self, chance: Chance) -> int:
        return self.num_tasks - 1


class Wrong(CurriculumStrategy):
    """Returns whatever it is told to."""

    def __init__(self, tasks: TaskStatistics, answer: Any) -> None:
        super().__init__(tasks)
        self.answer = answer

    def pick(self, chance: Chance) -> int:
        if self.answer == "raise":
            raise KeyError("no such thing")
        return self.answer  # type: ignore[no-any-return]  # this is what is tested


class Noted:
    """A source of one env and what it noted."""

    def __init__(
        self, strategy: str, num_tasks: int | None = 20, explore: float = 0.1, **options: Any
    ) -> None:
        self.chosen: dict[int, int] = {}
        mix = build_mix("weighted_round_robin", ["a"], [1.0], rng=random.Random(0))
        env = SourceEnv("a", "train", num_tasks, CurriculumSettings(strategy, options, explore))
        self.source = TrainSource([env], mix=mix, seed=5, chosen=self._note)

    def _note(self, env: str, position: int, index: int) -> None:
        assert env == "a"
        assert position not in self.chosen, "a position is chosen for once"
        self.chosen[position] = index

    def next(self) -> TrainTask:
        return self.source.next_task()

    def finish(self, task: TrainTask, reward: float, *, resolve: bool = True) -> None:
        equal = reward in (0.0, 1.0)
        self.source.ended(task, TaskOutcome(task.index, 0, reward, 4, equal))
        if resolve:
            self.source.resolve(task)


MINE = f"{__name__}:Stubborn"


@settings(max_examples=20, deadline=None)
@given(
    strategy=st.sampled_from([*STRATEGIES, MINE]),
    num_tasks=st.integers(1, 12),
    explore=st.sampled_from([0.03, 0.1, 0.37, 1.0]),
    seed=st.integers(0, 1000),
)
def test_no_task_is_left_out_for_ever(strategy: str, num_tasks: int, explore: float, seed: int) -> None:
    """However bad a strategy is and whatever comes of the tasks, each is asked once in 2 num_tasks / explore positions."""
    noted = Noted(strategy, num_tasks, explore)
    rng = random.Random(seed)
    bound = int(2 * num_tasks / explore) + 1
    for _ in range(2):
        seen = set()
        for _ in range(bound):
            task = noted.next()
            seen.add(task.index)
            noted.finish(task, rng.choice([0.0, 0.5, 1.0]))
        assert seen == set(range(num_tasks))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_retry_keeps_its_task(strategy: str) -> None:
    """A position is asked again with the task that it had, and is noted once."""
    noted = Noted(strategy)
    tasks = [noted.next() for _ in range(8)]
    assert noted.chosen == {task.position: task.index for task in tasks}
    for task in tasks[::2]:
        noted.source.ended(task, None)
        noted.source.retry(task)
    assert [noted.next() for _ in tasks[::2]] == tasks[::2]
    assert len(noted.chosen) == 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_later_process_asks_exactly_the_open_ones_again(strategy: str) -> None:
    """With their tasks; then it goes on with what the statistics say."""
    before = Noted(strategy)
    tasks = [before.next() for _ in range(12)]
    for task in tasks[:9:2]:
        before.finish(task, 0.5)
    held = {tasks[1].position}
    resolved = [task.position for task in tasks[:9:2]]
    after = Noted(strategy)
    again = after.source.load_resolved("a", 0, resolved, held, before.chosen)
    assert again == 12 - 5 - 1
    open_tasks = [task for task in tasks if task.position not in {*resolved, *held}]
    assert [after.next() for _ in open_tasks] == open_tasks
    assert after.chosen == {}, "nothing is chosen for a second time"
    assert after.next().position == 12


def test_tasks_come_as_before_without_a_curriculum_and_nothing_is_noted() -> None:
    """The order, epoch after epoch, depends on nothing that is learned."""
    noted = Noted("uniform")
    order = []
    for _ in range(60):
        task = noted.next()
        order.append(task.index)
        noted.finish(task, random.choice([0.0, 1.0]))
    assert [sorted(order[start : start + 20]) for start in (0, 20, 40)] == [list(range(20))] * 3
    # Pinned: runs that were started by earlier versions go on in the same order.
    assert order[:10] == [14, 13, 8, 12, 0, 7, 15, 11, 4, 5]
    assert noted.chosen == {}
    assert noted.source.statistics("a").groups.tolist() == [3] * 20


def test_tasks_without_end_come_in_their_order_under_a_curriculum_too() -> None:
    """There is nothing to choose from what was never seen."""
    noted = Noted("frontier", None)
    tasks = [noted.next() for _ in range(5)]
    assert [task.index - tasks[0].index for task in tasks] == [0, 1, 2, 3, 4]
    assert noted.chosen == {}
    noted.finish(tasks[0], 1.0)
    assert noted.source.statistics("a").seen == 1


def test_open_tasks_of_another_curriculum_stay_what_they_were() -> None:
    """A changed strategy chooses otherwise from the next position on, and not before."""
    before = Noted("frontier")
    tasks = [before.next() for _ in range(4)]
    after = Noted("uniform")
    after.source.load_resolved("a", 0, [], (), before.chosen)
    assert [after.next().index for _ in range(4)] == [task.index for task in tasks]
    assert after.next().position == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (20, r"pick returned 20, which is not one of the 20 tasks \(0 to 19\)"),
        (-1, "pick returned -1"),
        (None, "pick returned None"),
        ("3", "pick returned '3'"),
        (True, "pick returned True"),
        ("raise", r"failed in pick: KeyError: 'no such thing' \(.*test_curriculum.py, line \d+\)"),
    ],
)
def test_the_mistakes_of_somebody_elses_curriculum_are_told(answer: Any, message: str) -> None:
    """With its name and, where it raised, the line; the run ends with that."""
    noted = Noted(f"{__name__}:Wrong", answer=answer)
    with pytest.raises(StrategyError, match=f"curriculum .*:Wrong.*{message}"):
        noted.next()


def test_a_curriculum_prefers_without_repeating_what_is_open() -> None:
    """Tasks in flight are not handed out twice while others are left."""
    noted = Noted("frontier", 50, explore=0.01)
    flight = [noted.next() for _ in range(40)]
    assert max(Counter(task.index for task in flight).values()) == 1
