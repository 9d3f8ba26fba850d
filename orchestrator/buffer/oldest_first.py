"""Which groups make the next batch: the oldest that an exact batch can be made of.

The queue is walked from its front; a group is chosen whenever some exact batch contains it and those already
chosen. Two facts keep the cost independent of the queue. What cannot be completed now cannot be completed
later in the same walk, so a lane (one environment, one size) that is refused once is refused for good. And
a run of groups is first accepted on a cheap necessary condition, then checked as a whole, and cut back by
galloping if it went too far; a run that lands on the exact sum needs no check at all.

Bounds come in as each environment's `low` and `high`. Nothing is removed from the queue here: the lanes are
left with `taken` set.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from orchestrator.buffer.queue import Entry, EnvQueue, SizeQueue
from orchestrator.buffer.subset_sum import completable


def start(envs: Sequence[EnvQueue]) -> None:
    """Clear the marks of an earlier choice; what each env must and may give is its low and high."""
    for env in envs:
        env.least = env.low
        env.most = env.high
        env.sums = 0
        for lane in env.lanes.values():
            lane.taken = 0
            lane.left = len(lane.entries) - lane.head


def choose_exact(size: int, envs: Sequence[EnvQueue]) -> list[Entry] | None:
    """The oldest groups that sum to exactly `size` within every env's low and high, in queue order."""
    start(envs)
    return _Walk(size, envs).run()


class _Walk:
    """One walk over the queue. `path` is what is accepted so far; its first `sure` are accepted for good."""

    def __init__(self, need: int, envs: Sequence[EnvQueue]) -> None:
        self.need = need
        self.envs = envs
        self.short = sum(env.low for env in envs)  # sum of what the envs still lack of their low
        self.path: list[SizeQueue] = []
        self.depth = 0  # how much of the path is applied to the counts
        self.sure = 0
        self.feasible = False  # whether the sure part is known to be completable

    def run(self) -> list[Entry] | None:
        chosen: list[Entry] = []
        heap = self._fronts()
        while self.need:
            self._accept_run(heap, chosen)
            if not self.need:
                break  # the walk only goes where the lows still fit, so they are met
            if heap and self.sure == len(self.path) and self.feasible:
                _refuse(heappop(heap)[2])
                continue
            if heap and completable(self.need, self.envs):
                self.sure = len(self.path)
                self.feasible = True
                _refuse(heappop(heap)[2])
                continue
            if not self._cut_back():
                return None
            del chosen[len(self.path) :]
            heap = self._fronts()
        return chosen

    def _fronts(self) -> list[tuple[int, int, SizeQueue]]:
        heap = [
            (lane.entries[lane.head + lane.taken][0], lane.rank, lane)
            for env in self.envs
            for lane in env.lanes.values()
            if lane.left
        ]
        heapify(heap)
        return heap

    def _accept_run(self, heap: list[tuple[int, int, SizeQueue]], chosen: list[Entry]) -> None:
        """Accept from the front until a group does not fit, the need is met, or nothing is left.

        Fits: afterwards there is still room for what every env lacks of its low.
        """
        need, short, path = self.need, self.short, self.path
        while heap:
            lane = heap[0][2]
            size, env, entries = lane.size, lane.env, lane.entries
            at = lane.head + lane.taken
            fill = min(size, env.least)
            if size > env.most or short - fill > need - size:
                break
            need -= size
            short -= fill
            env.least -= fill
            env.most -= size
            env.sums = 0
            chosen.append(entries[at])
            path.append(lane)
            lane.taken += 1
            lane.left -= 1
            if not need:
                break
            if lane.left:
                heapreplace(heap, (entries[at + 1][0], lane.rank, lane))
            else:
                heappop(heap)
        self.need, self.short = need, short
        self.depth = len(path)

    def _go_to(self, depth: int) -> None:
        """Apply exactly the first `depth` of the path to the counts."""
        sign = 1 if depth > self.depth else -1
        for lane in self.path[min(depth, self.depth) : max(depth, self.depth)]:
            env = lane.env
            env.sums = 0
            lane.taken += sign
            lane.left -= sign
            env.most -= sign * lane.size
            self.short -= env.least
            env.least = max(0, env.low - (env.high - env.most))
            self.short += env.least
            self.need -= sign * lane.size
        self.depth = depth

    def _completable_at(self, depth: int) -> bool:
        self._go_to(depth)
        return completable(self.need, self.envs)

    def _cut_back(self) -> bool:
        """The whole path cannot be completed: keep the longest start that can, refuse the lane after it."""
        high = len(self.path)  # not completable
        low = self.sure
        step = 1
        while high - step > self.sure:
            if self._completable_at(high - step):
                low = high - step
                break
            high -= step
            step *= 2
        if low == self.sure and not self.feasible:
            if high == low or not self._completable_at(low):
                return False
            self.feasible = True
        while high - low > 1:
            middle = (low + high) // 2
            if self._completable_at(middle):
                low = middle
            else:
                high = middle
        self._go_to(low)
        _refuse(self.path[low])
        del self.path[low:]
        self.sure = low
        self.feasible = True
        return True


def _refuse(lane: SizeQueue) -> None:
    """No exact batch has one more of this lane."""
    lane.left = 0
    lane.env.sums = 0
