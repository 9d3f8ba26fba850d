"""How far ahead of the trainer work may run.

`pace` admits a group only while every group under way, queued or in flight, can still be trained in time: with `k`
batches left for the newest version, what the envs have under way and what their minimums will ask for fits into `k`
batches. It holds a batch back while that batch would take newer work and leave more of an older version behind than
its remaining batches can hold. So nothing that is finished is thrown away. `drop` admits freely, and what became too
old is given up. Sizes are in the unit of the batch. Every loss gives its budget back, because the budget is computed
from what is under way and never counted down. Pure arithmetic: no clock, no I/O.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from orchestrator.dispatch.versions import Versions

Mode = Literal["pace", "drop"]


class Room:
    """What is under way, and what `left` batches hold of it: each of them with every env's minimum in it."""

    __slots__ = ("_capacity", "_left", "_reserved", "_total", "_under_way")

    def __init__(
        self,
        left: int,
        under_way: Mapping[str, int],
        reserved: Mapping[str, int],
        total: int,
        capacity: int | None,
    ) -> None:
        self._left = left
        self._under_way = under_way
        self._reserved = reserved
        self._total = total
        self._capacity = capacity

    @property
    def holds(self) -> bool:
        """Whether all that is under way fits."""
        return self._left >= 1 and (self._capacity is None or self._total <= self._capacity)

    def admits(self, env: str, size: int) -> bool:
        """Whether a group started now could be trained in time."""
        if self._left < 1 or self._capacity is None:
            return self._left >= 1
        has, kept = self._under_way.get(env, 0), self._reserved.get(env, 0)
        return self._total - max(has, kept) + max(has + size, kept) <= self._capacity


class Pace:
    """Counts what is in flight, and says what may start and which batches may be formed."""

    def __init__(self, versions: Versions, *, mode: Mode, capacity: Callable[[], int]) -> None:
        """`capacity`: what every batch holds for certain; less than its size where only whole groups sum to it."""
        self._versions = versions
        self.mode = mode
        self._capacity = capacity
        self._open: Counter[tuple[str, int]] = Counter()
        self._by_env: Counter[str] = Counter()
        self.reserved = 0
        """What open groups are expected to yield."""
        self.revision = 0
        """Counts every change of what is open."""

    def opened(self, env: str, version: int, size: int) -> None:
        """A group of `size` expected is under way."""
        self._open[env, version] += size
        self._by_env[env] += size
        self.reserved += size
        self.revision += 1

    def closed(self, env: str, version: int, size: int) -> None:
        """That group ended, however."""
        self._open[env, version] -= size
        if not self._open[env, version]:
            del self._open[env, version]
        self._by_env[env] -= size
        self.reserved -= size
        self.revision += 1

    @property
    def coming(self) -> Mapping[str, int]:
        """What open groups of each env are expected to yield."""
        return self._by_env

    @property
    def engines_behind(self) -> bool:
        """Whether nothing that the engines sample now could be trained on any more."""
        return self._versions.steps_left(self._versions.serving) < 1

    def room(self, *, queued: Mapping[str, int], minimums: Mapping[str, int]) -> "Room":
        """What may be started behind all that is queued and in flight."""
        left = self._versions.steps_left(self._versions.serving)
        if self.mode == "drop":
            return Room(left, {}, {}, 0, None)
        envs = queued.keys() | self._by_env.keys()
        under_way = {env: queued.get(env, 0) + self._by_env[env] for env in envs}
        reserved = {env: left * minimum for env, minimum in minimums.items()}
        total = sum(
            max(under_way.get(env, 0), reserved.get(env, 0)) for env in under_way.keys() | reserved.keys()
        )
        return Room(left, under_way, reserved, total, left * self._capacity())

    def held_back_by(
        self,
        queued: Mapping[tuple[str, int], int],
        available: Collection[str],
        minimums: Mapping[str, int],
    ) -> tuple[str, int] | None:
        """The env and version of a group in flight that the next batch must wait for, or None.

        `queued` has the size of what is queued by env and version; the next batch takes the oldest of it. Groups of
        envs that have no server now are not waited for.
        """
        if self.mode == "drop" or not self._open:
            return None
        capacity = self._capacity()
        waiting: Counter[int] = Counter()
        ready: Counter[int] = Counter()
        for (env, version), size in self._open.items():
            # What no batch may hold any more is not worth waiting for.
            if env in available and self._versions.steps_left(version) >= 1:
                waiting[version] += size
        for (_, version), size in queued.items():
            ready[version] += size
        open_so_far = queued_so_far = 0
        for version in sorted(waiting.keys() | ready.keys()):
            open_so_far += waiting[version]
            queued_so_far += ready[version]
            if not open_so_far:
                continue
            taken = capacity - self._newer_minimums(version, queued, minimums)
            behind = open_so_far + max(0, queued_so_far - taken)
            if behind > max(0, self._versions.steps_left(version) - 1) * capacity:
                return min(
                    ((env, old) for (env, old) in self._open if env in available and waiting[old]),
                    key=lambda group: group[1],
                )
        return None

    @staticmethod
    def _newer_minimums(
        version: int, queued: Mapping[tuple[str, int], int], minimums: Mapping[str, int]
    ) -> int:
        """How much of a batch its minimums take from groups newer than a version."""
        if not minimums:
            return 0
        old: Counter[str] = Counter()
        for (env, sampled), size in queued.items():
            if sampled <= version:
                old[env] += size
        return sum(max(0, minimum - old[env]) for env, minimum in minimums.items())
