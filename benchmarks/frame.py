"""What a benchmark module needs: one measured figure, and how much to measure.

Every module of this package that has `figures(effort) -> list[Figure]` takes part. Figures count CPU time or
ratios; a goal is printed with whether it was met, never enforced. What a figure says must be the same words in
every run, because runs are compared by them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

T = TypeVar("T")


class Effort(IntEnum):
    """How much is measured: all of it, less for rough figures, or just enough to see that it works."""

    FULL = 0
    QUICK = 1
    TINY = 2

    def pick(self, full: T, quick: T, tiny: T) -> T:
        """What goes with this effort."""
        return (full, quick, tiny)[self]


class CannotRunError(Exception):
    """A benchmark lacks something that it needs; the message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, ours and the peer's (or the bare limit's) in the same run, and the goal."""

    what: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str = ""
    goal: str = ""
    met: bool | None = None
    spread: tuple[float, ...] = ()
    """The samples that `ours` is the median of."""
    note: str = ""
    """Why there is no peer's figure, where there could be one."""


def median_and_spread(samples: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """The median, and the samples that it is the median of."""
    return statistics.median(samples), tuple(samples)
