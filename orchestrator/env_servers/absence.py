"""For how long an environment has had no ready server, whoever names or lists its servers; and when that is too long.

One measure for all of them: a server that is dead but still listed or named never ends a run by itself, however long it
has been away, because the others may be away for a moment only. Servers that are started here have restart budgets
instead (`supervision`).
"""

import asyncio
import time
from collections.abc import Callable

from orchestrator.errors import EnvLostError


class Absence:
    """Told what `available` says whenever that may have changed; `explain` says why there is no server."""

    def __init__(
        self,
        env: str,
        *,
        most_s: float,
        explain: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._env = env
        self._most_s = most_s
        self._explain = explain
        self._clock = clock
        self._since: float | None = None
        self._changed = asyncio.Event()

    def note(self, *, available: bool) -> None:
        """There is a ready server, or none."""
        since = None if available else self._clock() if self._since is None else self._since
        if since != self._since:
            self._since = since
            self._changed.set()

    def left_s(self) -> float | None:
        """How long there may still be none; None where there is one."""
        return None if self._since is None else self._since + self._most_s - self._clock()

    async def run(self) -> None:
        """Wait until cancelled; EnvLostError when there was no ready server for too long.

        What was missed before counts for nothing: nobody has tried to reach lost servers again until now.
        """
        if self._since is not None:
            self._since = self._clock()
        while (left_s := self.left_s()) is None or left_s > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        raise EnvLostError(self._env, f"no server was ready for {self._most_s:g} s; {self._explain()}")
