"""Which groups fill a token budget: the oldest that fit, never more than the budget.

Each environment first gets its reserved tokens, from its oldest groups that fit beside what is reserved for
the others; the rest is filled from the front of the whole queue. Groups differ in length, so an exact fill is
neither asked for nor tried: the walk passes over a bounded number of groups that do not fit and then stops,
which keeps its cost independent of the queue.

Nothing is removed from the queue here.
"""

from collections.abc import Iterator, Sequence
from heapq import merge

from orchestrator.buffer.queue import Entry, EnvQueue, SizeQueue

LOOK_AHEAD = 64
"""How many groups that do not fit are passed over before the walk stops."""

Picks = dict[SizeQueue, set[int]]
"""Offsets from the front of each lane."""


def choose_within(budget: int, envs: Sequence[EnvQueue]) -> Picks:
    """Groups of at most `budget` tokens in all; each env has a single lane, and `low` tokens reserved."""
    fill = _Fill(budget, sum(env.low for env in envs))
    for env in envs:
        fill.reserve(env)
    fill.top_up(envs)
    return fill.picks


class _Fill:
    def __init__(self, budget: int, reserved: int) -> None:
        self.room = budget
        self.reserved = reserved
        self.picks: Picks = {}

    def reserve(self, env: EnvQueue) -> None:
        """Pick the env's oldest groups until its reserved tokens are used, as far as groups fit."""
        lacking = env.low
        misfits = 0
        for lane in env.lanes.values():
            for _, _, offset, tokens in _walk(lane):
                if lacking <= 0 or misfits == LOOK_AHEAD:
                    break
                used = min(tokens, lacking)
                if self.reserved - used > self.room - tokens:
                    misfits += 1
                    continue
                self.room -= tokens
                self.reserved -= used
                lacking -= used
                self.picks.setdefault(lane, set()).add(offset)
        self.reserved -= lacking  # no group of it fits: the room is for everyone

    def top_up(self, envs: Sequence[EnvQueue]) -> None:
        """Fill what is left from the front of the queue."""
        misfits = 0
        lanes = {lane.rank: lane for env in envs for lane in env.lanes.values()}
        for _, rank, offset, tokens in merge(*(_walk(lane) for lane in lanes.values())):
            if not self.room or misfits == LOOK_AHEAD:
                return
            picked = self.picks.setdefault(lanes[rank], set())
            if offset in picked:
                continue
            if tokens > self.room:
                misfits += 1
                continue
            self.room -= tokens
            picked.add(offset)


def _walk(lane: SizeQueue) -> Iterator[tuple[int, int, int, int]]:
    """Place, lane, offset and tokens of each entry; unique in its first two, so that merging never ties."""
    entries, head = lane.entries, lane.head
    for at in range(head, len(entries)):
        entry = entries[at]
        yield entry[0], lane.rank, at - head, entry[3]


def remove_picks(picks: Picks) -> list[Entry]:
    """Take the picked groups out of their lanes; in queue order."""
    taken = [lane.entries[lane.head + offset] for lane, offsets in picks.items() for offset in offsets]
    for lane, offsets in picks.items():
        lane.remove(offsets)
    taken.sort(key=lambda entry: entry[0])
    return taken
