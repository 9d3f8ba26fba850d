"""For which env the next batch waits, so that it and those after it can have their shares of the mix.

What is in flight must be in a batch before it is too old. Where more of a slow env was started at once than the batches after the
next one may have of it by their shares (at a start, or when the env comes back), a batch that is formed without it leaves
one of those crowded with it, and that one waits for the same groups. So the next batch waits for its own share of them instead.

A wait has an end: it is over when as many groups of the env have ended as were in flight when it began, however many of
them were lost and started again, or when whoever knows how long groups take has seen enough (`give_up`). Nothing is thrown
away by it. The first batch of a run waits for nobody: it shows that engines and trainer fit together, and an error there
should not be found late. Pure: no clock, no I/O.
"""

from collections.abc import Callable, Collection, Mapping

from orchestrator.dispatch.backlog import Work
from orchestrator.dispatch.pace import Pace
from orchestrator.dispatch.versions import Versions


class Turns:
    """Remembers, for the batch that is next, until when it waits for whom."""

    def __init__(self, versions: Versions, pace: Pace) -> None:
        self._versions = versions
        self._pace = pace
        self._next = 0
        self._until: dict[str, int] = {}

    def awaited(
        self,
        queued: Work,
        shares: Mapping[str, float],
        available: Collection[str],
        portion: Callable[[str], int],
    ) -> tuple[str, int] | None:
        """The env that is waited for and the oldest version of what is in flight of it, None where nobody is.

        `shares`: what every batch should have of each env; `portion`: what a group of it adds.
        """
        pace = self._pace
        if len(shares) < 2 or not self._versions.formed or pace.shared_out is None or pace.ample(queued):
            return None
        if self._next != self._versions.formed + 1:
            self._next = self._versions.formed + 1
            self._until.clear()
        for env, share in shares.items():
            if env not in available or not pace.coming.get(env, 0):
                continue
            has = sum(size for (name, _), size in queued.items() if name == env)
            # By less than half a group it would be as far off with one more.
            if has + portion(env) / 2 > min(share, self._crowd(env, share, queued)):
                continue
            ended = pace.ended[env]
            if ended < self._until.setdefault(env, ended + pace.coming[env]):
                return env, min(
                    version for (name, version), size in pace.open.items() if name == env and size
                )
        return None

    def give_up(self, env: str) -> None:
        """The next batch waits for this env no longer."""
        self._until[env] = 0

    def _crowd(self, env: str, share: float, queued: Work) -> float:
        """What is under way of an env beyond the shares of the batches that may have it after the next one."""
        left = self._versions.steps_left
        of_version: dict[int, int] = {}
        for work in (self._pace.open, queued):
            for (name, version), size in work.items():
                if name == env and left(version) >= 1:
                    of_version[version] = of_version.get(version, 0) + size
        crowd, so_far = 0.0, 0
        for version in sorted(of_version):
            so_far += of_version[version]
            crowd = max(crowd, so_far - (left(version) - 1) * share)
        return crowd
