"""The tasks of an env that people ask about first: those that are solved least, and those that were tried most.

Looking for them goes through all tasks, so it is done again only when a part of them has changed, and not at all where there
are so many that it would hold up whoever asks; `orchestrator tasks` sorts any number. Pure.
"""

import numpy as np

from orchestrator.curriculum.statistics import TaskStatistics

MOST_TASKS = 1 << 17
"""Of more it would take milliseconds."""

ROWS = 8
"""Tasks of each kind."""

AGAIN = 50
"""They are looked for again when the groups that have ended since are this part of the tried tasks: 1 / AGAIN."""

Row = dict[str, float | int]


class Notable:
    """Keeps what it found last."""

    def __init__(self, statistics: TaskStatistics) -> None:
        self._statistics = statistics
        self._at = 0
        self._found: tuple[list[Row], list[Row]] = ([], [])

    def find(self) -> tuple[list[Row], list[Row]]:
        """Tried tasks with the lowest recent solve rates, and those with the most groups; both empty where there are too many."""
        tasks = self._statistics
        if len(tasks.groups) > MOST_TASKS or tasks.ended - self._at <= tasks.seen // AGAIN:
            return self._found
        self._at = tasks.ended
        tried = tasks.groups.nonzero()[0]
        groups = tasks.groups[tried].astype(np.float64)
        # Of tasks that are solved alike, the one that was tried more often is the surer case.
        hardness = tasks.solve[tried] - 1e-6 * groups / (groups + 1)
        self._found = self._rows(tried, hardness), self._rows(tried, -groups)
        return self._found

    def _rows(
        self,
        tried: np.ndarray[tuple[int], np.dtype[np.int64]],
        keys: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> list[Row]:
        """The tasks with the smallest keys, in their order."""
        few = np.argpartition(keys, ROWS)[:ROWS] if len(keys) > ROWS else np.arange(len(keys))
        return [
            self._statistics.row(int(tried[place])) for place in few[np.argsort(keys[few], kind="stable")]
        ]
