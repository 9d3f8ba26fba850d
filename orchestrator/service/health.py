"""How the process itself is doing: the event loop's lag, and whether anything still moves."""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from orchestrator.errors import StalledError

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


class Watchdog:
    """One diagnostic record when nothing has moved for too long; by configuration, the end of the run."""

    def __init__(
        self,
        *,
        timeout_s: float,
        exit_on_stall: bool,
        progressed_at: Callable[[], float],
        all_failing_s: Callable[[], float],
        diagnose: Callable[[], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self._timeout_s = timeout_s
        self._exit = exit_on_stall
        self._progressed_at = progressed_at
        self._all_failing_s = all_failing_s
        self._diagnose = diagnose
        self._clock = clock

    async def run(self) -> None:
        """Watch until cancelled; StalledError when the run is to end."""
        reported = -1.0
        while True:
            since = self._progressed_at()
            idle = self._clock() - since
            failing = self._all_failing_s()
            if failing >= self._timeout_s:
                raise StalledError(
                    f"every env has been failing for {failing:.0f} s: {self._diagnose()['failures']}"
                )
            if idle >= self._timeout_s and since != reported:
                reported = since
                facts = self._diagnose()
                log.error("run.stalled", idle_s=round(idle, 1), **facts)
                if self._exit:
                    raise StalledError(
                        f"nothing has moved for {idle:.0f} s: waiting for {facts['waiting_for']}; {facts['buffer']}"
                    )
            # Sleeping until the earliest moment at which a limit could be reached is exact, not polling.
            wait_s = min(self._timeout_s - min(idle, 0.9 * self._timeout_s), self._timeout_s - failing)
            await asyncio.sleep(max(0.05, wait_s))
