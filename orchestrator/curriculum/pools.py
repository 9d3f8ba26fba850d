"""Tasks in pools: each is in one, and is moved or found in a time that does not grow with their number.

All tasks stand in one row, pool after pool, so that it takes 10 bytes a task however they move. One that moves to another
pool has a task of every pool between them step over the border. The last pool stands first in the row: it has the tasks that
are open, which come from the first pools more often than from others. The order inside a pool depends on what was moved
before and means nothing.
"""

import sys
from array import array

import numpy as np


class Pools:
    """`size` tasks in `count` pools; all of them are in pool 0 at first."""

    def __init__(self, size: int, count: int) -> None:
        everyone = np.arange(size, dtype=np.int32).tobytes()
        self._stand = bytearray(b"\1") * size
        self._place = array("i", everyone)
        self._row = array("i", everyone)
        # Where each stand of the row begins. Pool 0 has stand 1 and so on, the last pool stand 0.
        self._begins = [0, 0] + [size] * (count - 2)
        self.counts = [size] + [0] * (count - 1)
        """How many tasks each pool has."""

    @property
    def nbytes(self) -> int:
        """Memory of all of it."""
        return sum(map(sys.getsizeof, (self._stand, self._place, self._row)))

    def of(self, task: int) -> int:
        """The pool that a task is in."""
        stand = self._stand[task]
        return (stand or len(self.counts)) - 1

    def move(self, task: int, pool: int) -> None:
        """Put a task into a pool."""
        old, new = self._stand[task], pool + 1 if pool + 1 < len(self.counts) else 0
        if old == new:
            return
        row, places, begins = self._row, self._place, self._begins
        hole = places[task]
        # The task at each border on the way fills the hole, and leaves one at the border, which moves over it.
        if old < new:
            for border in range(old + 1, new + 1):
                begins[border] = edge = begins[border] - 1
                if edge != hole:
                    row[hole] = other = row[edge]
                    places[other] = hole
                    hole = edge
        else:
            for border in range(old, new, -1):
                edge = begins[border]
                begins[border] = edge + 1
                if edge != hole:
                    row[hole] = other = row[edge]
                    places[other] = hole
                    hole = edge
        row[hole] = task
        places[task] = hole
        self._stand[task] = new
        self.counts[old - 1] -= 1  # of stand 0: the last one
        self.counts[pool] += 1

    def at(self, pool: int, share: float) -> int:
        """The task so far into a pool that has one, as a share from 0 up to 1."""
        count = self.counts[pool]
        stand = pool + 1 if pool + 1 < len(self.counts) else 0
        return self._row[self._begins[stand] + min(int(share * count), count - 1)]
