"""Where queued groups wait: per environment one lane per size, in queue order.

Groups of one environment and size are interchangeable but for age, so a batch always takes the front of a
lane. Removing from the front is O(1) amortised and lets go of what was removed at once. `taken` and `left`
are the scratch marks of a choice under way; nothing leaves a lane before `commit`.

Knows nothing of batches, minimums or rollouts.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

Entry = tuple[int, int, int, int, Any, "EnvQueue"]
"""Place in the queue, version, sequences, tokens, item, environment."""

_place: Callable[[Entry], int] = itemgetter(0)
_COMPACT_FROM = 64
_RECENT = 64
"""Groups of an environment whose sizes are remembered: what its next ones may be like."""


class SizeQueue:
    """Groups of one environment and size, in queue order; those before `head` are gone."""

    __slots__ = ("entries", "env", "head", "left", "rank", "size", "taken")

    def __init__(self, env: "EnvQueue", size: int, rank: int) -> None:
        self.env = env
        self.size = size
        self.rank = rank  # unique: settles ties between lanes
        self.entries: list[Entry] = []
        self.head = 0
        self.taken = 0
        self.left = 0

    def __len__(self) -> int:
        return len(self.entries) - self.head

    def insert(self, entry: Entry) -> None:
        """Put an entry in its place, which is mostly the end."""
        entries = self.entries
        if not entries or entries[-1][0] <= entry[0]:
            entries.append(entry)
        else:
            insort(entries, entry, lo=self.head, key=_place)

    def reset(self) -> None:
        """Forget the marks of an earlier choice."""
        self.taken = 0
        self.left = len(self.entries) - self.head

    def drop_front(self, count: int) -> None:
        """Remove the first `count` entries."""
        head = self.head
        self.entries[head : head + count] = [_GONE] * count
        self.head = head + count
        if self.head >= _COMPACT_FROM and self.head * 2 >= len(self.entries):
            del self.entries[: self.head]
            self.head = 0

    def remove(self, indices: Collection[int]) -> None:
        """Remove the entries at these offsets from the front; the others keep their order."""
        if not indices:
            return
        end = self.head + max(indices) + 1
        kept = [e for i, e in enumerate(self.entries[self.head : end]) if i not in indices]
        self.entries[end - len(kept) : end] = kept
        self.drop_front(len(indices))

    def offset(self, entry: Entry) -> int:
        """How far from the front an entry is."""
        at = bisect_left(self.entries, entry[0], lo=self.head, key=_place)
        while self.entries[at] is not entry:
            at += 1
        return at - self.head

    def filter(self, keep: Callable[[Entry], bool]) -> list[Entry]:
        """Keep what passes and return the rest."""
        live = self.entries[self.head :]
        gone = [entry for entry in live if not keep(entry)]
        if gone:
            self.entries = [entry for entry in live if keep(entry)]
            self.head = 0
        return gone


@dataclass(slots=True, eq=False)
class EnvQueue:
    """One environment's lanes by size, what they hold, and what a batch must and may have of it.

    `low` and `high` bound its sequences in the next batch; `least` and `most` are what remains of them while
    a choice is under way, and `sums` is what the groups left can make (see `subset_sum.Part`).
    """

    name: str
    rank: int
    minimum: int = 0
    available: bool = True
    returning: bool = False  # it can deliver again, and room is kept for what it is to have of each batch
    has_share: bool = True  # else no further groups of it come
    sequences: int = 0
    tokens: int = 0
    lanes: dict[int, SizeQueue] = field(default_factory=dict)
    low: int = 0
    high: int = 0
    least: int = 0
    most: int = 0
    sums: int = 0
    sums_limit: int = 0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def stock(self) -> Collection[SizeQueue]:
        return self.lanes.values()

    @property
    def required(self) -> int:
        """The minimum that holds now: waived while the environment is unavailable."""
        return self.minimum if self.available else 0


_GONE: Entry = (0, 0, 0, 0, None, EnvQueue("", -1))
