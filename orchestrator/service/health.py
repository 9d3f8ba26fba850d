"""How the process itself is doing: the event loop's lag, room on its disk, and whether anything still moves."""

import asyncio
import gc
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from orchestrator.errors import InferenceError, StalledError
from orchestrator.run.waits import end_by_failing

log = structlog.get_logger()

_SAMPLE_S = 0.05
_SAMPLES = 1200
"""One minute of samples."""


def calm_garbage_collector() -> None:
    """Keep full collections off the event loop: with 65,536 rollouts in flight one takes 0.3 s.

    What dispatch makes is freed by reference counting; what is left to the collector are the rare cycles of libraries.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class LoopLag:
    """Measures how late the loop wakes a sleeper."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_SAMPLE_S)
            self._samples.append(max(0.0, time.monotonic() - before - _SAMPLE_S))

    def percentile(self, share: float) -> float:
        """Lag that `share` of the last minute's samples stay below."""
        ordered = sorted(self._samples)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


DISK_S = 10.0
"""Time between two looks at the disk."""


class DiskSpace:
    """How much room the disk of the run directory has; None until it is known."""

    def __init__(self) -> None:
        self.free_bytes: int | None = None

    async def run(self, run_dir: Path) -> None:
        """Look until cancelled, in a thread: a disk behind a network may take its time."""
        while True:
            try:
                self.free_bytes = (await asyncio.to_thread(shutil.disk_usage, run_dir)).free
            except OSError:
                self.free_bytes = None
            await asyncio.sleep(DISK_S)


WAITING_S = 30.0
"""A trainer that has waited so long, without anything moving, is worth a word about what it waits for."""

AGAIN_S = 300.0
"""The same wait is told again only after this long."""

LOOK_S = 5.0
"""The longest time between two looks: what is wanted changes without telling the watchdog."""


class Watchdog:
    """Says what a run waits for when nothing moves; after too long, one diagnostic record or the end of the run.

    A wait is told after `WAITING_S` in which no rollout ended and no batch was formed although the trainer had none.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        exit_on_stall: bool,
        progressed_at: Callable[[], float],
        starved: Callable[[], bool],
        all_failing_s: Callable[[], float],
        bereft: Callable[[], str],
        diagnose: Callable[[], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self._timeout_s = timeout_s
        self._exit = exit_on_stall
        self._progressed_at = progressed_at
        self._starved = starved
        self._all_failing_s = all_failing_s
        self._bereft = bereft
        self._diagnose = diagnose
        self._clock = clock
        self._reported = -1.0
        self._starved_since: float | None = None
        self._told: dict[tuple[str, ...], float] = {}

    async def run(self) -> None:
        """Watch until cancelled; StalledError when the run is to end, InferenceError where it has no weights and none will come."""
        while True:
            pause_s = self.look()
            await asyncio.sleep(pause_s)

    def look(self) -> float:
        """Look once; returns after how many seconds to look again."""
        now, since, failing = self._clock(), self._progressed_at(), self._all_failing_s()
        idle = now - since
        why = end_by_failing(failing, self._timeout_s, lambda: self._diagnose()["failures_told"])
        if why:
            raise StalledError(why)
        # Not at once, so that there is time to put a folder back.
        if idle >= WAITING_S and (why := self._bereft()):
            raise InferenceError(why)
        if idle >= self._timeout_s and since != self._reported:
            self._reported = since
            facts = self._diagnose()
            log.error("run.stalled", idle_s=round(idle, 1), **facts)
            if self._exit:
                raise StalledError(
                    f"nothing has moved for {idle:.0f} s: waiting for {facts['waiting_for']}; {facts['buffer']}"
                )
        told_in_s = self._tell_wait(now, since)
        # The earliest moment at which a limit could be reached.
        stalled_in_s = min(self._timeout_s - min(idle, 0.9 * self._timeout_s), self._timeout_s - failing)
        return max(0.05, min(stalled_in_s, told_in_s, LOOK_S))

    def _tell_wait(self, now: float, since: float) -> float:
        """Say what a trainer without a batch waits for; returns after how long that might be due."""
        if not self._starved():
            self._starved_since = None
            return WAITING_S
        if self._starved_since is None:
            self._starved_since = now
        waited = now - max(since, self._starved_since)
        if waited < WAITING_S:
            return WAITING_S - waited
        facts = self._diagnose()
        kinds = tuple(sorted(facts["waits"]))
        if kinds not in self._told or now - self._told[kinds] >= AGAIN_S:
            self._told[kinds] = now
            log.warning("run.waiting", idle_s=round(waited, 1), **facts)
        return LOOK_S
