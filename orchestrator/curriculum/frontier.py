"""The frontier of what is learned: tasks that are sometimes solved and sometimes not.

A group teaches by the differences of its rewards. With a solve rate of p they vary by p (1 - p), so a task is worth what
that is expected to be, given how little is known about p (a Beta distribution around the recent rollouts). Tasks that
were never tried are taken to be worth most. Tasks are kept in levels by their worth; a level is drawn by the fourth power of
it, with a bound on how much the mere number of its tasks counts: a million tasks that are worth little must not outweigh a
hundred that are worth much.
"""

from orchestrator.curriculum.statistics import TaskStatistics
from orchestrator.curriculum.strategy import NEWCOMERS, Pooled

LEVELS = 8
MOST = 0.25
"""The largest p (1 - p)."""

_PRIOR = 0.5
"""Rollouts of each kind, solved and not, that are imagined beside the recent ones."""


class Frontier(Pooled):
    """Prefers tasks where a group's rewards will differ most."""

    def __init__(self, tasks: TaskStatistics) -> None:
        super().__init__(tasks, count=1 + LEVELS)
        # The most worth first, where most choices fall.
        worths = [(LEVELS - level - 0.5) / LEVELS * MOST for level in range(LEVELS)]
        self._values = [MOST**4, *(worth**4 for worth in worths)]

    def worth(self, task: int) -> float:
        """The expected p (1 - p) of a task that was tried."""
        tasks = self.tasks
        rate, weight = float(tasks.solve[task]), float(tasks.weight[task])
        solved, not_solved = rate * weight + _PRIOR, (1.0 - rate) * weight + _PRIOR
        total = solved + not_solved
        # Rewards that are equal more often than a solve rate in the middle explains are equal for another reason.
        unexplained = max(0.0, float(tasks.dull[task]) - abs(2.0 * rate - 1.0) ** 3)
        return solved * not_solved / (total * (total + 1.0)) * (1.0 - unexplained)

    def pool_of(self, task: int) -> int:
        return LEVELS - min(LEVELS - 1, int(self.worth(task) / MOST * LEVELS))

    def weights(self) -> list[float]:
        counts, breadth = self._pools.counts, self._breadth
        weights = [
            value * (count if count < breadth else breadth)
            for value, count in zip(self._values, counts, strict=False)
        ]
        weights[0] *= NEWCOMERS
        return weights

    def pools(self) -> dict[str, int]:
        counts = self._pools.counts
        half, quarter = 1 + LEVELS // 2, 1 + 3 * LEVELS // 4
        return {
            "unseen": counts[0],
            "worth most": sum(counts[1:half]),
            "worth some": sum(counts[half:quarter]),
            "worth little": sum(counts[quarter:-1]),
            "open": counts[-1],
        }
