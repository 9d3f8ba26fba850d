"""What a group of each env adds to the queue: learnt from those that finished. Pure.

Rollouts may yield any number of sequences, and sequences any number of tokens, so what is in flight is planned with
the largest that an env's groups had lately. Until a few have finished, a group is taken to be as large as `FIRST_GUESS`
says: planning too much at first would be finished work thrown away.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence

FIRST_GUESS = 4
"""Sequences per rollout; by tokens, groups to a batch."""

ENOUGH = 4
"""Groups after which what they had is believed."""

ENOUGH_ROLLOUTS = 16
"""Rollouts after which what they had is believed, before any group is complete."""

_RECENT = 64


class Yields:
    """Remembers the size of each env's groups, in the unit of the batch."""

    def __init__(self, group_sizes: Mapping[str, int], *, batch_size: int, count_tokens: bool) -> None:
        self._batch_size = batch_size
        self._guess = {
            env: batch_size // FIRST_GUESS if count_tokens else size * FIRST_GUESS
            for env, size in group_sizes.items()
        }
        self._recent: dict[str, deque[int]] = {env: deque() for env in group_sizes}
        self._sums: dict[str, tuple[int, int]] = dict.fromkeys(group_sizes, (0, 0))
        self._expected = {env: self._bounded(guess) for env, guess in self._guess.items()}
        self._group_sizes = group_sizes
        self._count_tokens = count_tokens
        self._rollouts: dict[str, tuple[int, int]] = dict.fromkeys(group_sizes, (0, 1))
        self.revision = 0
        """Counts every change of what is expected."""
        self._least = {env: self._bounded(1 if count_tokens else size) for env, size in group_sizes.items()}

    def saw(self, env: str, sequences: Sequence[int]) -> None:
        """Rollouts of an env finished with these numbers of sequences; their groups may still be open."""
        if self._count_tokens or len(self._recent[env]) >= ENOUGH:
            return
        count, most = self._rollouts[env]
        self._rollouts[env] = count, most = count + len(sequences), max(most, *sequences)
        if count >= ENOUGH_ROLLOUTS:
            self._guess[env] = most * self._group_sizes[env]
            self._expect(env, max(self._guess[env], *self._recent[env], 1))

    def add(self, env: str, size: int) -> None:
        """A group of an env finished with this size."""
        recent, (total, squares) = self._recent[env], self._sums[env]
        gone = recent.popleft() if len(recent) == _RECENT else 0
        recent.append(size)
        # Sums of whole numbers, so that nothing is lost by taking away what was added.
        total, squares = total + size - gone, squares + size * size - gone * gone
        self._sums[env] = total, squares
        count, most = len(recent), max(recent)
        if count < ENOUGH:
            self._expect(env, max(self._guess[env], most))
            return
        spread = math.sqrt(count * squares - total * total) / count
        # A single large group among many small ones is made up for by those.
        few = most if count < 4 * ENOUGH else total / count + 3 * spread
        self._expect(env, min(most, math.ceil(few)))

    def _expect(self, env: str, size: int) -> None:
        size = self._bounded(size)
        # That enough groups are known changes `portion` too.
        if size != self._expected[env] or len(self._recent[env]) == ENOUGH:
            self._expected[env] = size
            self.revision += 1

    def expected(self, env: str) -> int:
        """What a group of an env will add at most, in all likelihood; never more than a batch."""
        return self._expected[env]

    def portion(self, env: str) -> int:
        """In which steps a batch takes an env's groups: as `expected`, but their plain size while nothing is known."""
        return self._expected[env] if len(self._recent[env]) >= ENOUGH else self._least[env]

    def largest(self) -> int:
        """The same, over all envs."""
        return max(self._expected.values())

    def _bounded(self, size: int) -> int:
        return max(1, min(size, self._batch_size))
