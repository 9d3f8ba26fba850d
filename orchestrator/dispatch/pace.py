"""How far ahead of the trainer work may run.

`pace` admits a group only while every group under way, queued or in flight, can still be trained in time, with what
minimums will ask for beside it; it says what the next batch must have, and holds it back while that is still in
flight. So nothing that is finished is thrown away; `backlog` has the arithmetic and says why. `drop` admits freely, and
what became too old is given up. Sizes are in the unit of the batch. Every loss gives its budget back, because the
budget is computed from what is under way and never counted down. Pure: no clock, no I/O.
"""

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Literal

from orchestrator.dispatch.backlog import Backlog, NextBatch, Work, plan_next
from orchestrator.dispatch.versions import Versions

Mode = Literal["pace", "drop"]

_version: Callable[[tuple[str, int]], int] = itemgetter(1)


class Room:
    """What may be started; without a backlog, anything that any batch may hold."""

    __slots__ = ("_backlog", "_reserved", "_serving", "_spare")

    def __init__(
        self, versions: Versions, backlog: Backlog | None, reserved: Mapping[str, int], spare: int | None
    ) -> None:
        """`spare`: what may be started of any env, where that is the same for all."""
        self._serving = versions.serving
        self._backlog = backlog
        self._reserved = reserved
        self._spare = spare

    @property
    def holds(self) -> bool:
        """Whether all that is under way can be trained in time."""
        return self._backlog is None or self._backlog.holds

    def admits(self, env: str, size: int) -> bool:
        """Whether a group started now could be trained in time."""
        if self._spare is not None:
            return size <= self._spare
        return self._backlog is not None and self._backlog.admits(env, size, self._serving, self._reserved)

    def could_admit(self, env: str, size: int) -> bool:
        """The same, if nothing were under way."""
        return self._backlog is None or self._backlog.emptied().admits(
            env, size, self._serving, self._reserved
        )


class Pace:
    """Counts what is in flight, and says what may start and which batches may be formed."""

    def __init__(self, versions: Versions, *, mode: Mode, capacity: Callable[[], int]) -> None:
        """`capacity`: what every batch holds for certain; less than its size where only whole groups sum to it."""
        self._versions = versions
        self.mode = mode
        self._capacity = capacity
        self._open: Counter[tuple[str, int]] = Counter()
        self._by_env: Counter[str] = Counter()
        self._by_version: Counter[int] = Counter()
        self._oldest: list[int] = []
        """A heap of the open versions; of some that are not any more, too, until they come to its top."""
        self.ended: Counter[str] = Counter()
        """What groups of each env were expected to yield that have ended, however."""
        self.reserved = 0
        """What open groups are expected to yield."""
        self.revision = 0
        """Counts every change of what is open."""

    def opened(self, env: str, version: int, size: int) -> None:
        """A group of `size` expected is under way."""
        self._open[env, version] += size
        self._by_env[env] += size
        if version not in self._by_version:
            heapq.heappush(self._oldest, version)
        self._by_version[version] += size
        self.reserved += size
        self.revision += 1

    def closed(self, env: str, version: int, size: int) -> None:
        """That group ended, however."""
        self._open[env, version] -= size
        if not self._open[env, version]:
            del self._open[env, version]
        self._by_env[env] -= size
        self._by_version[version] -= size
        if not self._by_version[version]:
            del self._by_version[version]
        self.ended[env] += size
        self.reserved -= size
        self.revision += 1

    @property
    def open(self) -> Work:
        """What open groups are expected to yield, by env and version."""
        return self._open

    @property
    def coming(self) -> Mapping[str, int]:
        """What open groups of each env are expected to yield."""
        return self._by_env

    @property
    def outlook(self) -> tuple[int, ...]:
        """Differs whenever what is open does, or anything in the book of versions."""
        return self.revision, *self._versions.revision

    @property
    def engines_behind(self) -> bool:
        """Whether nothing that the engines sample now could be trained on any more."""
        return self._versions.steps_left(self._versions.serving) < 1

    @property
    def shared_out(self) -> int | None:
        """How many batches ahead have their room shared out among envs; None where whoever is quickest may have it.

        Without a bound there is nothing to share. With a single batch ahead, the one that everything waits for, the room of
        a lost group is best had by whoever fills it soonest. And a share of the room is a share of what is delivered only
        where work of all envs is under way for as many batches, because a version with every step makes it so: where
        versions are seldom, a quick env would use its room many times while a slow one uses its own once.
        """
        versions = self._versions
        if self.mode == "drop" or not versions.max_versions or not versions.every_step:
            return None
        return versions.steps_left(versions.serving)

    def room(
        self, queued: Work, minimums: Mapping[str, int], reserved: Callable[[int], Mapping[str, int]]
    ) -> Room:
        """What may be started behind all that is queued and in flight.

        `minimums` are those of every batch; `reserved` says what so many batches will have of each env in whole groups.
        """
        versions, left = self._versions, self._versions.steps_left
        batches = left(versions.serving)
        if self.mode == "drop":
            return Room(versions, None, {}, sys.maxsize if batches >= 1 else 0)
        backlog = Backlog(self._open, queued, left=left, batch=self._capacity(), minimums=minimums)
        own = reserved(max(0, batches))
        common = not minimums and not own
        spare = batches * self._capacity() - self._under_way(queued) if common else None
        return Room(versions, backlog, own, spare)

    def plan_next(
        self,
        queued: Work,
        available: Collection[str],
        minimums: Mapping[str, int],
        due: Mapping[str, int],
    ) -> NextBatch | None:
        """What the next batch must have or wait for; None where anything will do.

        `due` is what it should have of each env, where any would do.

        Groups of envs that have no server now are not waited for, nor what no batch may hold any more.
        """
        if self.mode == "drop":
            return None
        left = self._versions.steps_left
        if not minimums and self._in_time(queued):
            return NextBatch({}, None, lambda taken: True)
        coming = {
            (env, version): size
            for (env, version), size in self._open.items()
            if env in available and left(version) >= 1
        }
        return plan_next(queued, coming, left, batch=self._capacity(), minimums=minimums, due=due)

    def ample(self, queued: Work) -> bool:
        """Whether all work would fit behind the next batch even if all of it were as old as the oldest: mostly, where slots are scarcer than time."""
        while self._oldest and self._oldest[0] not in self._by_version:
            heapq.heappop(self._oldest)
        oldest = min([*self._oldest[:1], *map(_version, queued)], default=None)
        if oldest is None:
            return True
        return self._under_way(queued) <= (self._versions.steps_left(oldest) - 1) * self._capacity()

    def _in_time(self, queued: Work) -> bool:
        """Whether all work could be trained in time behind the next batch, whatever that has; where all room is common to all.

        Asked for with every group that begins or ends, so it looks at sums by version and not at every env's.
        """
        if self.ample(queued):
            return True
        work = dict(self._by_version)
        for (_, version), size in queued.items():
            work[version] = work.get(version, 0) + size
        capacity, left, so_far = self._capacity(), self._versions.steps_left, 0
        for version in sorted(work):
            so_far += work[version]
            if so_far > (left(version) - 1) * capacity:
                return False
        return True

    def _under_way(self, queued: Work) -> int:
        return self.reserved + sum(queued.values())
