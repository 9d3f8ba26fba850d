"""Whether all the work under way can still be trained in time: arithmetic of amounts by env and version.

Every version has a number of batches left that may hold its work. Each of these batches has a minimum of some envs in
it, and the rest of it is common to all. An env's work up to a version first fills the env's own minimums; what goes beyond
them needs common room, even where newer work of the env would leave some of its minimums free. All of it can be trained in
time if and only if, for every version, what needs common room up to it fits into the common room of the batches left
for it. From this follow what may be started (`Backlog.admits`), what the next batch must have, and whether
it must wait for a group in flight (`plan_next`). Sizes are in the unit of the batch. Pure: no clock, no memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

Work = Mapping[tuple[str, int], int]
"""Amounts by env and version."""

Left = Callable[[int], int]
"""How many batches may still hold work of a version."""


@dataclass(frozen=True, slots=True)
class Level:
    """Work up to a version: what each env has beyond its minimums, and by how much that exceeds the common room."""

    version: int
    beyond: Mapping[str, int]
    over: int


class Backlog:
    """Work under way, and the batches that are left for it."""

    def __init__(self, *work: Work, left: Left, batch: int, minimums: Mapping[str, int]) -> None:
        """All of `work` together; `batch`: what a batch holds for certain, with `minimums` of some envs in it."""
        self._work = work
        self._left = left
        self._batch = batch
        self._minimums = minimums
        self._common = batch - sum(minimums.values())
        self._beyond: Mapping[str, int] = {}
        self._needs: int | None = None
        self._needs_for: tuple[int, Mapping[str, int]] | None = None

    @cached_property
    def _by_version(self) -> dict[int, list[tuple[str, int]]]:
        """Made when it is asked for: where only the sum counts, nobody asks."""
        found: dict[int, list[tuple[str, int]]] = {}
        for part in self._work:
            for (env, version), size in part.items():
                found.setdefault(version, []).append((env, size))
        return found

    @cached_property
    def _of_env(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self._work:
            for (env, _), size in part.items():
                found[env] = found.get(env, 0) + size
        return found

    def levels(self) -> Iterator[Level]:
        """From the oldest version on; each names the work of the ones before it too, until the next is asked for."""
        has: dict[str, int] = {}
        beyond: dict[str, int] = {}
        total = 0
        for version in sorted(self._by_version):
            left = max(0, self._left(version))
            here = self._by_version[version]
            for env, size in here:
                has[env] = has.get(env, 0) + size
            # Of the others only those with a minimum can have come to need more.
            for env in {env for env, _ in here} | (self._minimums.keys() & has.keys()):
                before, needs = beyond.get(env, 0), has[env] - left * self._minimums.get(env, 0)
                if needs > before:
                    beyond[env] = needs
                    total += needs - before
            yield Level(version, beyond, total - left * self._common)

    @property
    def holds(self) -> bool:
        """Whether everything can be trained in time."""
        return all(level.over <= 0 for level in self.levels())

    def admits(self, env: str, size: int, version: int, reserved: Mapping[str, int]) -> bool:
        """Whether there is room for more work of an env, of the newest version.

        `reserved`: what the batches left for it will have of each env in whole groups, begun or not.
        """
        left = self._left(version)
        if left < 1:
            return False
        if self._needs is None or self._needs_for != (version, reserved):
            self._beyond = {}
            for level in self.levels():
                self._beyond = level.beyond
            envs = self._of_env.keys() | self._minimums.keys() | reserved.keys()
            self._needs = sum(self._need(name, 0, left, reserved) for name in envs)
            self._needs_for = version, reserved
        # Only this env's need differs from what all have without it: that of an env with nothing is 0.
        more = self._need(env, size, left, reserved) - self._need(env, 0, left, reserved)
        return self._needs + more <= left * self._batch

    def emptied(self) -> "Backlog":
        """The same batches, and no work."""
        return Backlog(left=self._left, batch=self._batch, minimums=self._minimums)

    def _need(self, env: str, more: int, left: int, reserved: Mapping[str, int]) -> int:
        """What an env's work and its minimums take of the batches left, with so much more of it."""
        own = left * self._minimums.get(env, 0)
        beyond = max(self._beyond.get(env, 0), self._of_env.get(env, 0) + more - own)
        return max(own + beyond, reserved.get(env, 0))


@dataclass(frozen=True, slots=True)
class NextBatch:
    """What the next batch must have: `least` of each env, of its oldest work; and what it must wait for.

    `fits` says of amounts by env and version whether all that they leave behind can be trained in time.
    """

    least: Mapping[str, int]
    held_by: tuple[str, int] | None
    fits: Callable[[Work], bool]


def plan_next(
    queued: Work,
    coming: Work,
    left: Left,
    *,
    batch: int,
    minimums: Mapping[str, int],
    due: Mapping[str, int],
) -> NextBatch:
    """The next batch takes of each env its minimum, and then what could not be trained in time after it.

    Where any of several envs would do, each gives up to what it is `due` before one gives more. Where it is not queued
    yet, but coming, the batch waits for the oldest of it.
    """
    plan = _Plan(queued, coming, lambda version: left(version) - 1, batch, minimums, due)
    plan.take_what_must_be()
    return NextBatch(plan.least, plan.held_by(), plan.fits)


class _Plan:
    def __init__(
        self,
        queued: Work,
        coming: Work,
        left: Left,
        batch: int,
        minimums: Mapping[str, int],
        due: Mapping[str, int],
    ) -> None:
        self._due = due
        self._queued = sorted((version, env, size) for (env, version), size in queued.items())
        self._coming = coming
        self._left = left
        self._batch = batch
        self._minimums = minimums
        self._fits = False
        """Whether all that the least leaves behind is known to fit."""
        total: dict[str, int] = {}
        for _, env, size in self._queued:
            total[env] = total.get(env, 0) + size
        self.least = {env: min(size, minimums.get(env, 0)) for env, size in total.items()}

    def take_what_must_be(self) -> None:
        """Add to `least` until all that is left behind fits, or nothing that is queued could help.

        Every round settles a version, or uses an env up to it: as many rounds as there are envs and versions, at most.
        """
        spent: set[tuple[str, int]] = set()
        self._fits = False
        while (room := self._batch - sum(self.least.values())) > 0:
            if not self._take_most_urgent(spent, room):
                return

    def _take_most_urgent(self, spent: set[tuple[str, int]], room: int) -> bool:
        """Take more of the envs that need most, up to the first version whose work does not fit; whether there was any.

        What is taken of one env changes nothing for the others at that version, nor for versions before it.
        """
        self._fits = True
        for level in self._behind(self._remaining()).levels():
            if level.over <= 0:
                continue
            self._fits = False
            over = level.over
            if over > room:
                # Not all of it can be trained in time, whatever is taken.
                return False
            for env, size in self._shares(level, over, spent):
                self.least[env] += size
                spent.add((env, level.version))
                over -= size
            if over < level.over:
                return True
        return False

    def _shares(self, level: Level, over: int, spent: set[tuple[str, int]]) -> list[tuple[str, int]]:
        """What each env gives of what is over: up to its due first, then those that have most."""
        there: dict[str, int] = {}
        for version, env, size in self._queued:
            if version <= level.version:
                there[env] = there.get(env, 0) + size
        can: dict[str, int] = {}
        for env, beyond in sorted(level.beyond.items(), key=lambda item: -item[1]):
            if (env, level.version) in spent:
                continue
            if (most := min(beyond, there.get(env, 0) - self.least.get(env, 0))) > 0:
                can[env] = most
        gives = dict.fromkeys(can, 0)
        for bounds in ({env: self._due.get(env, 0) - self.least[env] for env in can}, can):
            for env, most in can.items():
                size = min(over, most - gives[env], max(0, bounds[env]))
                gives[env] += size
                over -= size
        return [(env, size) for env, size in gives.items() if size]

    def held_by(self) -> tuple[str, int] | None:
        """The env and version of work in flight without which the next batch would leave too much behind."""
        if self._fits:
            return None
        for level in self._behind(self._remaining()).levels():
            if level.over > 0:
                awaited = [
                    (version, env)
                    for (env, version), size in self._coming.items()
                    if size and version <= level.version and level.beyond.get(env, 0) > 0
                ]
                if awaited:
                    version, env = min(awaited)
                    return env, version
        return None

    def fits(self, taken: Work) -> bool:
        """Whether all that a batch leaves behind can be trained in time."""
        left_over = dict(self._coming)
        for version, env, size in self._queued:
            left_over[env, version] = left_over.get((env, version), 0) + size - taken.get((env, version), 0)
        return self._behind(left_over).holds

    def _remaining(self) -> Work:
        """What is left behind by a batch that has the least of each env, of its oldest work."""
        left_over, to_take = dict(self._coming), dict(self.least)
        for version, env, size in self._queued:
            used = min(size, to_take[env])
            to_take[env] -= used
            if size > used:
                left_over[env, version] = left_over.get((env, version), 0) + size - used
        return left_over

    def _behind(self, work: Work) -> Backlog:
        # A budget that minimums and spare room exceed together is kept by minimums alone.
        batch = max(self._batch, sum(self._minimums.values()))
        return Backlog(work, left=self._left, batch=batch, minimums=self._minimums)
