"""Inference servers whose speed depends on what runs at once: rollouts on an engine share its tokens per second.

All on an engine make the same progress, so that one number, the tokens that a rollout there since ever would have, says how far each
is: a rollout is done when the number has grown by its own tokens. What an event costs does not grow with what runs. Pure.
"""

import heapq
from collections.abc import Callable, Sequence


class Speeds:
    """Tokens per second of an engine at so many rollouts at once: straight lines between the points of a table."""

    def __init__(self, table: Sequence[tuple[float, float]]) -> None:
        self._table = table
        self.best = max(speed for _, speed in table)

    def at(self, running: float) -> float:
        """Beyond the last point nothing is gained; before the first, one rollout is as fast as it is there."""
        first, last = self._table[0], self._table[-1]
        if running <= first[0]:
            return first[1] * running / first[0]
        for (low, slow), (high, fast) in zip(self._table, self._table[1:], strict=False):
            if running <= high:
                return slow + (fast - slow) * (running - low) / (high - low)
        return last[1]

    def each(self, running: float) -> float:
        """Tokens per second of one of so many."""
        return self.at(running) / running


class Engine:
    """One engine; `done` of whatever has its tokens is called by `advance`."""

    def __init__(self, speeds: Speeds, now: float) -> None:
        self._speeds = speeds
        self._now = now
        self._each = 0.0
        self._ends: list[tuple[float, int, int, Callable[[], None]]] = []
        self._gone: set[int] = set()
        self._number = 0
        self._running = 0
        self.stopped = False
        self.sampled = 0.0
        """Tokens so far."""

    def add(self, tokens: float, count: int, done: Callable[[], None], now: float) -> int:
        """`count` rollouts that need so many tokens each; returns a number by which they can be removed."""
        self.advance(now)
        self._number += 1
        heapq.heappush(self._ends, (self._each + tokens, self._number, count, done))
        self._running += count
        return self._number

    def remove(self, number: int, count: int, now: float) -> None:
        """They are not needed any more."""
        self.advance(now)
        self._gone.add(number)
        self._running -= count

    def advance(self, now: float) -> None:
        """Time has passed."""
        if self._running and not self.stopped:
            each = self._speeds.each(self._running) * (now - self._now)
            self._each += each
            self.sampled += each * self._running
        self._now = now

    def finish(self, now: float) -> None:
        """Tell those that have their tokens by now."""
        self.advance(now)
        while self._first() and self._ends[0][0] <= self._each * (1 + 1e-12) + 1e-9:
            _, _, count, done = heapq.heappop(self._ends)
            self._running -= count
            done()

    def next_at(self) -> float | None:
        """When the next one has its tokens, if nothing else happens."""
        if not self._first() or self.stopped:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._each) / self._speeds.each(self._running)

    def _first(self) -> bool:
        while self._ends and self._ends[0][1] in self._gone:
            self._gone.discard(heapq.heappop(self._ends)[1])
        return bool(self._ends)
