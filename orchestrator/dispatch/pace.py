"""How far ahead of the trainer work may run.

`pace` admits a group only while every group under way, queued or in flight, can still be trained in time, with what
minimums will ask for beside it; it says what the next batch must have, and holds it back while that is still in
flight. So nothing that is finished is thrown away; `backlog` has the arithmetic and says why. `drop` admits freely, and
what became too old is given up. Sizes are in the unit of the batch. Every loss gives its budget back, because the
budget is computed from what is under way and never counted down. Pure: no clock, no I/O.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from orchestrator.dispatch.backlog import Backlog, NextBatch, Work, plan_next
from orchestrator.dispatch.versions import Versions

Mode = Literal["pace", "drop"]


class Room:
    """What may be started; without a backlog, anything that any batch may hold."""

    __slots__ = ("_backlog", "_reserved", "_versions")

    def __init__(self, versions: Versions, backlog: Backlog | None, reserved: Mapping[str, int]) -> None:
        self._versions = versions
        self._backlog = backlog
        self._reserved = reserved

    @property
    def holds(self) -> bool:
        """Whether all that is under way can be trained in time."""
        return self._backlog is None or self._backlog.holds

    def admits(self, env: str, size: int) -> bool:
        """Whether a group started now could be trained in time."""
        serving = self._versions.serving
        if self._backlog is None:
            return self._versions.steps_left(serving) >= 1
        return self._backlog.admits(env, size, serving, self._reserved)


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
        if self.mode == "drop":
            return Room(self._versions, None, {})
        work = dict(self._open)
        for key, size in queued.items():
            work[key] = work.get(key, 0) + size
        left = self._versions.steps_left
        backlog = Backlog(work, left, batch=self._capacity(), minimums=minimums)
        return Room(self._versions, backlog, reserved(max(0, left(self._versions.serving))))

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
        coming = {
            (env, version): size
            for (env, version), size in self._open.items()
            if env in available and left(version) >= 1
        }
        return plan_next(queued, coming, left, batch=self._capacity(), minimums=minimums, due=due)
