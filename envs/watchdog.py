"""Notices an event loop that is blocked, while it is blocked, and says by what.

The loop beats a few times a second; a thread looks at the beats. When one is overdue by `threshold_s`, the
thread logs `server.loop_blocked` once per stall, with the rollout whose step is running and the stack of
the main thread: an environment that blocks (time.sleep, requests, heavy computing in `rollout`) freezes
every other rollout of its server. The longest recent stall is a server statistic.
It cannot see through a C extension that never gives up the interpreter lock.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

import structlog

log = structlog.get_logger()

BEAT_S = 0.25
_INNERMOST_FRAMES = 8


class LoopWatchdog:
    """Watches the loop in whose thread it was started. `running` names the rollouts in flight."""

    def __init__(self, *, running: Callable[[], list[str]], threshold_s: float = 1.0) -> None:
        self._running = running
        self._threshold_s = threshold_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = 0
        self._due = 0.0
        self._worst_s = 0.0

    def start(self) -> None:
        """Begin; called on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._due = time.monotonic()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; called on the loop's thread."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join(timeout=2 * BEAT_S)

    def take_lag_s(self) -> float:
        """The longest stall since the last call."""
        worst, self._worst_s = self._worst_s, 0.0
        return worst

    def _beat(self) -> None:
        now = time.monotonic()
        self._worst_s = max(self._worst_s, now - self._due)
        self._due = now + BEAT_S
        assert self._loop is not None
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        reported = 0.0
        while not self._stop.wait(BEAT_S):
            due = self._due
            overdue = time.monotonic() - due
            if overdue > self._threshold_s and due != reported:
                reported = due
                self._report(overdue)

    def _report(self, overdue_s: float) -> None:
        assert self._loop is not None
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._watched)
        stack = traceback.format_stack(frame)[-_INNERMOST_FRAMES:] if frame is not None else []
        log.warning(
            "server.loop_blocked",
            blocked_s=round(overdue_s, 3),
            by=task.get_name() if task is not None else "unknown",
            inflight=self._running()[:20],
            remedy="use async libraries in the environment, or asyncio.to_thread for blocking calls",
            stack="".join(stack),
        )
