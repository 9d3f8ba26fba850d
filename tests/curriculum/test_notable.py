"""Tasks that stand out: found among all, and looked for again when enough has changed."""

from orchestrator.curriculum import TaskOutcome, TaskStatistics, notable
from orchestrator.curriculum.notable import Notable


def statistics(num_tasks: int | None = 100) -> TaskStatistics:
    return TaskStatistics(num_tasks, reward_range=(0.0, 1.0))


def tell(tasks: TaskStatistics, task: int, reward: float, times: int = 1) -> None:
    for _ in range(times):
        tasks.add(TaskOutcome(task, 0, reward, 4, equal=False))


def test_the_least_solved_come_first_and_of_those_the_most_tried() -> None:
    """Tasks that were never tried are not among them."""
    tasks = statistics()
    found = Notable(tasks)
    assert found.find() == ([], [])
    for task in range(20):
        tell(tasks, task, 0.5 + task / 50)
    tell(tasks, 40, 0.0)
    tell(tasks, 41, 0.0, times=3)
    tell(tasks, 19, 0.9, times=8)
    hardest, most_tried = found.find()
    assert [row["task"] for row in hardest] == [41, 40, 0, 1, 2, 3, 4, 5]
    assert [(row["task"], row["groups"]) for row in most_tried[:2]] == [(19, 9), (41, 3)]
    assert len(most_tried) == notable.ROWS


def test_all_tasks_are_looked_through_only_when_a_part_of_them_has_changed() -> None:
    """So that whoever asks often pays little."""
    tasks = statistics(1000)
    for task in range(500):
        tell(tasks, task, 0.5)
    found = Notable(tasks)
    before = found.find()
    tell(tasks, 3, 0.0, times=notable.AGAIN // 10)
    assert found.find() is before
    tell(tasks, 3, 0.0, times=notable.AGAIN // 10 + 1)
    assert found.find()[0][0]["task"] == 3


def test_tasks_without_end_are_told_by_their_own_numbers() -> None:
    """Not by where they are remembered."""
    tasks = statistics(None)
    tell(tasks, 10**9 + 7, 0.25)
    assert [row["task"] for row in Notable(tasks).find()[0]] == [10**9 + 7]


def test_more_tasks_than_are_quickly_looked_through_are_left_to_the_command() -> None:
    """Nothing is shown rather than everybody held up."""
    tasks = statistics(notable.MOST_TASKS + 1)
    tell(tasks, 1, 0.0, times=5)
    assert Notable(tasks).find() == ([], [])
