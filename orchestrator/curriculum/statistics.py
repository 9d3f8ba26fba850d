"""What is known about each task of an env: how often it was tried, what came of it, and how it does lately.

36 bytes a task, in arrays that take memory only where they are written to, so an env of a million tasks costs what
its tried tasks cost. An env whose tasks have no end keeps the last `WINDOW` of them. A solve rate is a reward put
between the ends of the env's `reward_range`; recent groups count most in it, because a policy learns. Everything here
follows from the outcomes that were added and their order, so a journal that has those has all of it. Pure.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 16
"""Tasks of an env without end that are remembered."""

KEEP = 0.5
"""What a group keeps of its weight in the recent numbers when the next one of its task comes."""

BINS = 10
"""Of the histogram of solve rates."""

OUTCOMES = np.dtype(
    [("task", "<i8"), ("version", "<i8"), ("reward", "<f8"), ("rollouts", "<i4"), ("equal", "<i4")]
)
"""Outcomes as an array, one after the other."""

Outcomes = NDArray[np.void]

_ONE_BY_ONE = 24
"""Fewer outcomes than this are added faster one at a time than as an array."""


class TaskOutcome(NamedTuple):
    """What came of one group: the mean reward of its rollouts, and whether all of them had the same."""

    task: int
    version: int
    reward: float
    rollouts: int
    equal: bool


class TaskStatistics:
    """The tasks of one env. `num_tasks` is None if they have no end."""

    def __init__(self, num_tasks: int | None, *, reward_range: Sequence[float]) -> None:
        self.num_tasks = num_tasks
        self._low, high = reward_range
        self._span = high - self._low
        size = WINDOW if num_tasks is None else num_tasks
        self.groups = np.zeros(size, np.uint32)
        """Groups of the task that ended with rewards."""
        self.equal = np.zeros(size, np.uint32)
        """Those of them in which all rewards were equal."""
        self.rollouts = np.zeros(size, np.uint32)
        self.reward = np.zeros(size, np.float32)
        """Mean reward of all rollouts, as the env gave it."""
        self.version = np.zeros(size, np.int64)
        """Policy version of the last group."""
        self.solve = np.zeros(size, np.float32)
        """Recent solve rate, 0 to 1."""
        self.dull = np.zeros(size, np.float32)
        """Recent share of groups in which all rewards were equal."""
        self.weight = np.zeros(size, np.float32)
        """Rollouts that the recent numbers rest on."""
        self._who = np.full(WINDOW, -1, np.int64) if num_tasks is None else None
        self.seen = 0
        """Tasks that were tried, of those that are remembered."""
        self.ended = 0
        """Groups that were added."""
        self.histogram = [0] * BINS
        """Tried tasks by recent solve rate."""
        # Single numbers are read and written through these in a third of the time that numpy takes.
        columns = (self.groups, self.equal, self.rollouts, self.reward)
        recent = (self.version, self.solve, self.dull, self.weight)
        self._views: tuple[Any, ...] = tuple(column.data for column in (*columns, *recent))

    @property
    def nbytes(self) -> int:
        """Memory of all columns, once every task was tried."""
        own = 0 if self._who is None else self._who.nbytes
        return own + sum(int(view.nbytes) for view in self._views)

    def add(self, outcome: TaskOutcome) -> None:
        """A group has ended."""
        task, version, earned, n, alike = outcome
        place = task if self._who is None else self._place(task)
        self.ended += 1
        groups, equal, rollouts, reward, versions, solve, dull, weight = self._views
        rate = self._rate(earned)
        if groups[place]:
            self.histogram[_bin(solve[place])] -= 1
        else:
            self.seen += 1
        groups[place] += 1
        equal[place] += alike
        rollouts[place] += n
        reward[place] += (earned - reward[place]) * (n / rollouts[place])
        versions[place] = version
        total = weight[place] * KEEP + n
        solve[place] += (rate - solve[place]) * (n / total)
        dull[place] += (alike - dull[place]) * (n / total)
        weight[place] = total
        self.histogram[_bin(solve[place])] += 1

    def load(self, outcomes: Outcomes) -> None:
        """Add many outcomes, in their order; ends where adding them one by one would."""
        if self._who is not None:
            self._add_each(outcomes[-WINDOW:])
            return
        tasks = outcomes["task"]
        if len(tasks) and not 0 <= int(tasks.min()) <= int(tasks.max()) < len(self.groups):
            outcomes = outcomes[(tasks >= 0) & (tasks < len(self.groups))]
            tasks = outcomes["task"]
        # The first outcome of every task, then the second of each that has one, and so on.
        order = np.argsort(tasks, kind="stable")
        behind = np.flatnonzero(np.diff(tasks[order], prepend=-1))
        turn = np.arange(len(order)) - np.repeat(behind, np.diff(behind, append=len(order)))
        order = order[np.argsort(turn, kind="stable")]
        start = 0
        for count in np.bincount(turn, minlength=0).tolist():
            if count < _ONE_BY_ONE:
                self._add_each(outcomes[np.sort(order[start:])])
                break
            self._add_different(outcomes[order[start : start + count]])
            start += count

    def row(self, task: int) -> dict[str, float | int]:
        """What is known about one task, for people."""
        return {
            "task": task if self._who is None else int(self._who[task]),
            "groups": int(self.groups[task]),
            "rollouts": int(self.rollouts[task]),
            "reward": round(float(self.reward[task]), 6),
            "solve_rate": round(float(self.solve[task]), 6),
            "equal_share": round(int(self.equal[task]) / max(1, int(self.groups[task])), 6),
            "version": int(self.version[task]),
        }

    def _rate(self, reward: float) -> float:
        return min(1.0, max(0.0, (reward - self._low) / self._span))

    def _place(self, task: int) -> int:
        """Where a task without end is remembered; who was there before is forgotten."""
        assert self._who is not None
        place = task % WINDOW
        if self._who[place] != task:
            if self._views[0][place]:
                self.histogram[_bin(self._views[5][place])] -= 1
                self.seen -= 1
            self._who[place] = task
            for view in self._views:
                view[place] = 0
        return place

    def _add_each(self, outcomes: Outcomes) -> None:
        for task, version, reward, rollouts, equal in outcomes.tolist():
            self.add(TaskOutcome(task, version, reward, rollouts, bool(equal)))

    def _add_different(self, outcomes: Outcomes) -> None:
        """Add one outcome for each of several tasks; the arithmetic is that of `add`."""
        places, n, earned = outcomes["task"], outcomes["rollouts"], outcomes["reward"]
        rates = np.clip((earned - self._low) / self._span, 0.0, 1.0)
        known = self.groups[places] > 0
        self._count(places[known], -1)
        self.seen += int(np.count_nonzero(~known))
        self.ended += len(places)
        self.groups[places] += 1
        self.equal[places] += outcomes["equal"].astype(np.uint32)
        self.rollouts[places] += n.astype(np.uint32)
        reward = self.reward[places].astype(np.float64)
        self.reward[places] = reward + (earned - reward) * (n / self.rollouts[places])
        self.version[places] = outcomes["version"]
        total = self.weight[places].astype(np.float64) * KEEP + n
        for column, new in ((self.solve, rates), (self.dull, outcomes["equal"])):
            before = column[places].astype(np.float64)
            column[places] = before + (new - before) * (n / total)
        self.weight[places] = total
        self._count(places, 1)

    def _count(self, places: NDArray[np.int64], sign: int) -> None:
        bins = np.minimum(self.solve[places].astype(np.float64) * BINS, BINS - 1).astype(np.int64)
        for number, count in enumerate(np.bincount(bins, minlength=BINS).tolist()):
            self.histogram[number] += sign * count


def _bin(rate: float) -> int:
    return min(int(rate * BINS), BINS - 1)
