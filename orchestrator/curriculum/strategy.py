"""Which task of an env next: the interface of every curriculum.

A strategy looks at the statistics of one env's tasks and names one of them. It is asked only for positions that the
floor of exploration leaves to it (see `orchestrator.tasks.source`), so that no task is left out for ever whatever it
does. It has no clock, no I/O, no other randomness than the `Chance` of the decision, and no state of its own that
outlives the process: after a restart the statistics are there again, and `on_load` tells it so.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from orchestrator.curriculum.chance import Chance
from orchestrator.curriculum.pools import Pools
from orchestrator.curriculum.statistics import TaskStatistics
from orchestrator.errors import ConfigError

NEWCOMERS = 0.05
"""How much a task that was never tried counts beside a good one that is known, where there are enough of these. Trying it
is as likely in vain as under no curriculum at all, so this bounds what is lost to it."""

_AT_ONCE = 1 << 16
"""Tasks that are Python's numbers at a time: those of a million would take more memory than all that is known about them."""


class CurriculumError(ConfigError, ValueError):
    """A strategy or options that no curriculum can be made of."""


class CurriculumStrategy(ABC):
    """Picks the next task of one env. Subclasses implement `pick` and listen to what they need."""

    def __init__(self, tasks: TaskStatistics) -> None:
        assert tasks.num_tasks is not None, "tasks without end come in their order"
        self.tasks = tasks
        self.num_tasks = tasks.num_tasks

    @abstractmethod
    def pick(self, chance: Chance) -> int:
        """The next task: its index, from 0 up to `num_tasks`."""

    def on_hand_out(self, task: int) -> None:  # noqa: B027  only strategies that care have something to do
        """A group of the task is opened, whoever chose it; a task may have several."""

    def on_end(self, task: int) -> None:  # noqa: B027  same
        """A group of the task has ended; the statistics have its rewards, if there are any."""

    def on_load(self) -> None:  # noqa: B027  same
        """The statistics were read back from an earlier process; nothing is open."""

    def pools(self) -> Mapping[str, int]:
        """How many tasks are in which pool, for people; empty where there are none."""
        return {}


class Pooled(CurriculumStrategy):
    """A strategy that sorts tasks into pools by their statistics and draws from those.

    Pool 0 has the tasks that were never tried. A task with an open group is in the last pool, out of the way, until
    its results say where it belongs.
    """

    def __init__(self, tasks: TaskStatistics, *, count: int) -> None:
        super().__init__(tasks)
        self._pools = Pools(self.num_tasks, count + 1)
        self._open_pool = count
        self._open: dict[int, int] = {}

    @abstractmethod
    def pool_of(self, task: int) -> int:
        """Where a task that was tried belongs."""

    @abstractmethod
    def weights(self) -> list[float]:
        """How likely each pool is drawn from, those of no tasks aside."""

    def pick(self, chance: Chance) -> int:
        counts = self._pools.counts
        weights = self.weights()
        point = chance.random() * sum(weights)
        pool = 0
        for weight in weights:
            if point < weight and counts[pool]:
                # How far the point lies inside its pool is as good a number as another one.
                return self._pools.at(pool, point / weight)
            point -= weight
            pool += 1  # noqa: SIM113  this runs for every decision, and is faster so
        # Every pool that has a weight is empty: any task that is not open, else any at all.
        for pool, count in enumerate(counts):
            if count:
                return self._pools.at(pool, chance.random())
        raise AssertionError("an env has at least one task")

    def on_hand_out(self, task: int) -> None:
        self._open[task] = self._open.get(task, 0) + 1
        self._pools.move(task, self._open_pool)

    def on_end(self, task: int) -> None:
        left = self._open.pop(task, 1) - 1
        if left > 0:
            self._open[task] = left
        else:
            self._pools.move(task, self.pool_of(task) if self.tasks.groups[task] else 0)

    def on_load(self) -> None:
        self._open.clear()
        tried = self.tasks.groups.nonzero()[0]
        for start in range(0, len(tried), _AT_ONCE):
            for task in tried[start : start + _AT_ONCE].tolist():
                self._pools.move(task, self.pool_of(task))

    @property
    def nbytes(self) -> int:
        """Memory beside the statistics."""
        return self._pools.nbytes

    @property
    def _breadth(self) -> int:
        """How many tasks it takes to choose from them freely: more than are open at a time."""
        return max(16, 2 * len(self._open))


def number(name: str, value: object, low: float, high: float) -> float:
    """An option that is a number between two others; CurriculumError if it is not."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise CurriculumError(f"{name} is a number from {low:g} to {high:g}, not {value!r}")
    return float(value)
