"""What the trainer got: each env's share of the emitted batches, over the whole run and over the last ones.

A record for people and metrics; nothing is steered by it.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any


class DeliveredMix:
    """Counts sequences per env in emitted batches. `window` is the number of batches that "lately" means."""

    def __init__(self, env_names: Sequence[str], *, window: int = 20) -> None:
        self.env_names = tuple(env_names)
        self.counts: Counter[str] = Counter()
        self._recent: deque[Counter[str]] = deque(maxlen=window)
        self._recent_counts: Counter[str] = Counter()

    def add(self, batch: Mapping[str, int]) -> None:
        """A batch was emitted, with these numbers of sequences."""
        if len(self._recent) == self._recent.maxlen:
            self._recent_counts.subtract(self._recent[0])
        counts = Counter(batch)
        self._recent.append(counts)
        self._recent_counts.update(counts)
        self.counts.update(counts)

    def shares(self) -> dict[str, float]:
        """Share of each env in all emitted batches."""
        return self._shares(self.counts)

    def recent_shares(self) -> dict[str, float]:
        """Share of each env in the last batches."""
        return self._shares(self._recent_counts)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "recent": [dict(batch) for batch in self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self._recent.clear()
        self._recent_counts.clear()
        for batch in state["recent"][-(self._recent.maxlen or 0) :]:
            self._recent.append(Counter(batch))
            self._recent_counts.update(batch)

    def _shares(self, counts: Counter[str]) -> dict[str, float]:
        total = sum(counts.values())
        return {name: counts[name] / total if total else 0.0 for name in self.env_names}


def largest_deviation(shares: Mapping[str, float], targets: Mapping[str, float]) -> float:
    """The largest difference between a share and its target, in percentage points."""
    return 100 * max(abs(shares.get(name, 0.0) - target) for name, target in targets.items())
