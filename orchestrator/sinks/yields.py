"""What a group of each env adds to the queue: learnt from those that finished. Pure.

Rollouts may yield any number of sequences, and sequences any number of tokens, so what is in flight is planned with
the mean of an env's finished groups and twice its spread. Before the first one has finished nothing is known, and a
group is taken to be as large as `FIRST_GUESS` says: planning too much at first would be finished work thrown away.
"""

import math
from collections.abc import Mapping

_KEEP = 15 / 16
"""How much of what was learnt the next group leaves."""

FIRST_GUESS = 4
"""Sequences per rollout; by tokens, groups to a batch."""


class Yields:
    """Remembers the size of each env's groups, in the unit of the batch."""

    def __init__(self, group_sizes: Mapping[str, int], *, batch_size: int, count_tokens: bool) -> None:
        first = dict.fromkeys(group_sizes, batch_size // FIRST_GUESS)
        self._batch_size = batch_size
        self._guess = (
            first if count_tokens else {env: size * FIRST_GUESS for env, size in group_sizes.items()}
        )
        self._mean: dict[str, float] = {}
        self._variance: dict[str, float] = {}

    def add(self, env: str, size: int) -> None:
        """A group of an env finished with this size."""
        if env not in self._mean:
            self._mean[env], self._variance[env] = float(size), 0.0
            return
        change = size - self._mean[env]
        self._mean[env] += (1 - _KEEP) * change
        self._variance[env] = _KEEP * (self._variance[env] + (1 - _KEEP) * change * change)

    def expected(self, env: str) -> int:
        """What a group of an env will add at most, in all likelihood; never more than a batch."""
        if env not in self._mean:
            return max(1, min(self._guess[env], self._batch_size))
        upper = self._mean[env] + 2 * math.sqrt(self._variance[env])
        return max(1, min(math.ceil(upper - 1e-9), self._batch_size))
