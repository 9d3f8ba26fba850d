"""Pools by difficulty: so much of the work is easy, so much medium, so much hard.

A task is in the pool that its recent solve rate says; one that was never tried counts as medium until it was. As the
policy learns, tasks move from hard to easy. What is solved every time retires from the easy pool, and is looked at
now and then: a task that is not solved any more is back at once.
"""

import math

from orchestrator.curriculum.statistics import TaskStatistics
from orchestrator.curriculum.strategy import NEWCOMERS, CurriculumError, Pooled, number

UNSEEN, EASY, MEDIUM, HARD, RETIRED = range(5)


class Difficulty(Pooled):
    """Draws from pools of easy, medium and hard tasks, each with its share."""

    def __init__(
        self,
        tasks: TaskStatistics,
        *,
        easy: float = 0.05,
        medium: float = 0.9,
        hard: float = 0.05,
        easy_above: float = 0.8,
        hard_below: float = 0.2,
        retire_above: float = 0.95,
        checkup: float = 0.02,
    ) -> None:
        super().__init__(tasks, count=5)
        self._easy, self._medium, self._hard = (
            number(name, value, 0, 1) for name, value in (("easy", easy), ("medium", medium), ("hard", hard))
        )
        if not math.isclose(self._easy + self._medium + self._hard, 1.0, abs_tol=1e-6):
            total = self._easy + self._medium + self._hard
            raise CurriculumError(f"the shares easy, medium and hard sum to {total:g}; they must sum to 1")
        self._hard_below = number("hard_below", hard_below, 0, 1)
        self._easy_above = number("easy_above", easy_above, 0, 1)
        self._retire_above = number("retire_above", retire_above, 0, math.inf)
        if not self._hard_below < self._easy_above <= self._retire_above:
            raise CurriculumError(
                f"hard_below ({hard_below:g}), easy_above ({easy_above:g}) and retire_above ({retire_above:g}) "
                "must rise in this order; a retire_above of 2 never retires a task"
            )
        self._checkup = number("checkup", checkup, 0, 0.5)

    def pool_of(self, task: int) -> int:
        rate = self.tasks.solve[task]
        if rate <= self._hard_below:
            return HARD
        if rate < self._easy_above:
            return MEDIUM
        return RETIRED if rate >= self._retire_above and self.tasks.groups[task] > 1 else EASY

    def weights(self) -> list[float]:
        unseen, easy, medium, hard, retired, _ = self._pools.counts
        # Unseen ones are tried as long as there are not many medium ones, and a few of them always.
        newcomers = min(unseen, NEWCOMERS * self._breadth)
        share = self._medium / (newcomers + medium) if newcomers or medium else 0.0
        weights = [
            share * newcomers,
            self._easy if easy else 0.0,
            share * medium,
            self._hard if hard else 0.0,
            0.0,
        ]
        rest = sum(weights)
        if not rest:
            # Tasks are left that no share is for: better those than what is solved every time.
            weights = [float(unseen), float(easy), float(medium), float(hard), 0.0]
            rest = sum(weights)
        if retired:
            # So that its share of all is `checkup`, however little the others have; alone, it is all there is.
            weights[RETIRED] = rest * self._checkup / (1.0 - self._checkup) if rest else 1.0
        return weights

    def pools(self) -> dict[str, int]:
        names = ("unseen", "easy", "medium", "hard", "retired", "open")
        return dict(zip(names, self._pools.counts, strict=True))
