"""The thread of each tracker, and the bounded queue in front of it.

`tell` never waits: what a tracker that is slow, hangs or has failed does not take is counted and dropped. The first trouble
of a kind is logged, and the status has the count and the last error. A start that fails turns the tracker off for this
process. `aclose` gives all trackers together `close_s` to take what is queued and to close; then they are left behind in
their threads, which do not keep the process alive.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from orchestrator.facts import TrackerStatus
from orchestrator.track.names import flat_eval, flat_step
from orchestrator.track.tracker import Tracker

log = structlog.get_logger()

MOST_WAITING = 1000
"""Lines in front of a tracker; a step has one, so that this is hours of most runs."""
CLOSE_S = 10.0
"""How long the end of a run waits for its trackers."""
THREAD = "tracker "
"""What the names of their threads begin with."""
MOST_OWED = 4
"""Steps whose samples are looked for again, with every line that comes."""
LAST_LOOKS, LOOK_S = 20, 0.1
"""How often they are looked for at the end of a run, and how long apart."""
SILENT_S = 30.0
"""A tracker that has not come back from a call for so long is worth a word."""


@dataclass(frozen=True, slots=True)
class TrackerSetup:
    """A tracker that is to be made: what it is called, and how to make it in its own thread."""

    name: str
    make: Callable[[], Tracker]


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SampleRule:
    """Sample rollouts: `read` gives those of a step, asked in a tracker's thread for the first step and every `interval`."""

    read: Callable[[int], Rows]
    interval: int

    def due(self, step: int) -> bool:
        return step == 1 or step % self.interval == 0


class Feed:
    """One tracker, its thread and its queue."""

    def __init__(
        self,
        setup: TrackerSetup,
        begin: Callable[[Tracker], None],
        *,
        samples: SampleRule | None,
        most_waiting: int,
        silent_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = setup.name
        self._setup = setup
        self._begin = begin
        self._samples = samples
        self._most_waiting = most_waiting
        self._silent_s = silent_s
        self._clock = clock
        self._lines: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._called_at: float | None = None
        self._told: set[str] = set()
        self._off = False
        self._logged = 0
        self._lost = 0
        self._error = ""
        self._owed: list[int] = []
        """Steps whose samples were not there yet."""
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"{THREAD}{self.name}", daemon=True)
        self._thread.start()

    def tell(self, line: Mapping[str, Any]) -> None:
        """Queue a line; never waits."""
        if self._off:
            self._lose("track.off", self._error)
        elif self._lines.qsize() >= self._most_waiting:
            self._lose("track.slow", "it takes less than the run has to tell")
        else:
            self._lines.put(line)
        silent = self._silence()
        if silent:
            self._tell_once("track.silent", silent)

    def status(self) -> TrackerStatus:
        """What it has taken, what is lost, and why."""
        return TrackerStatus(self.name, self._logged, self._lost, self._silence() or self._error)

    def finish(self) -> None:
        """Nothing more comes."""
        self._lines.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait until it has closed; what it leaves behind is told."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning(
                "track.left_behind",
                tracker=self.name,
                lines=max(0, self._lines.qsize() - 1),
                note="it did not close in time; what it has not taken is lost",
            )

    def _run(self) -> None:
        """The tracker's life, in its own thread. Whatever it raises stays here, SystemExit of a library included."""
        tracker: Tracker | None = None
        try:
            self._called_at = self._clock()
            tracker = self._setup.make()
            self._begin(tracker)
        except BaseException as error:  # noqa: BLE001  see above
            self._off = True
            self._failed("track.off", error)
            tracker = None
        self._called_at = None
        while (line := self._lines.get()) is not None:
            if tracker is None:
                self._lose("track.off", self._error)
            elif self._call(pass_on, tracker, line):
                self._logged += 1
                self._call(self._show_samples, tracker, line)
            else:
                self._lose("track.failed", self._error)
        if tracker is not None:
            self._pay_last(tracker)
            self._call(tracker.close)

    def _pay_last(self, tracker: Tracker) -> None:
        """At the end of a run its last rollouts are about to be kept."""
        for _ in range(LAST_LOOKS):
            if self._samples is None or not self._owed:
                return
            self._call(self._pay, tracker, self._samples.read)
            time.sleep(LOOK_S)

    def _show_samples(self, tracker: Tracker, line: Mapping[str, Any]) -> None:
        """A few rollouts of the step, for a tracker that shows any."""
        shows = type(tracker).log_samples is not Tracker.log_samples
        if self._samples is None or not shows:
            return
        if line["kind"] == "step" and self._samples.due(line["step"]):
            self._owed = [*self._owed, line["step"]][-MOST_OWED:]
        self._pay(tracker, self._samples.read)

    def _pay(self, tracker: Tracker, read: Callable[[int], Rows]) -> None:
        """Show the samples that can be had by now: rollouts are kept a moment after their step is known."""
        for step in list(self._owed):
            self._owed.remove(step)
            rows = read(step)
            if rows:
                tracker.log_samples(step, rows)
            else:
                self._owed.append(step)

    def _call(self, call: Callable[..., None], *arguments: object) -> bool:
        self._called_at = self._clock()
        try:
            call(*arguments)
        except BaseException as error:  # noqa: BLE001  as for the start
            self._failed("track.failed", error)
            return False
        finally:
            self._called_at = None
        return True

    def _failed(self, event: str, error: BaseException) -> None:
        self._error = f"{type(error).__name__}: {error}"[:400]
        self._tell_once(event, self._error)

    def _lose(self, event: str, why: str) -> None:
        with self._counting:
            self._lost += 1
        self._error = self._error or why
        self._tell_once(event, why)

    def _tell_once(self, event: str, why: str) -> None:
        if event not in self._told:
            self._told.add(event)
            log.warning(
                event, tracker=self.name, error=why, note="the run goes on without what it does not take"
            )

    def _silence(self) -> str:
        since = self._called_at
        if since is None or self._clock() - since < self._silent_s:
            return ""
        return f"it has not come back for {self._clock() - since:.0f} s"


def any_left_behind() -> bool:
    """Whether a tracker of this process is still in a call after all have had their time to close."""
    return any(thread.name.startswith(THREAD) for thread in threading.enumerate())


def pass_on(tracker: Tracker, line: Mapping[str, Any]) -> None:
    """Tell a tracker a line of metrics.jsonl, as the call that it stands for."""
    match line["kind"]:
        case "step":
            tracker.log(line["step"], flat_step(line))
        case "eval":
            tracker.log_eval(line["step"], line["env"].removeprefix("eval-"), flat_eval(line))


class Trackers:
    """All trackers of a run."""

    def __init__(
        self,
        setups: Sequence[TrackerSetup],
        *,
        config: Mapping[str, Any],
        run_id: str,
        resumed: bool,
        samples: SampleRule | None = None,
        close_s: float = CLOSE_S,
        most_waiting: int = MOST_WAITING,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._close_s = close_s
        self._clock = clock
        self._feeds = [
            Feed(
                setup,
                lambda tracker: tracker.start(config, run_id, resumed),
                samples=samples,
                most_waiting=most_waiting,
                silent_s=silent_s,
                clock=clock,
            )
            for setup in setups
        ]

    def tell(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        for feed in self._feeds:
            feed.tell(line)

    def status(self) -> list[TrackerStatus]:
        """Each of them, in the order of the configuration."""
        return [feed.status() for feed in self._feeds]

    async def aclose(self) -> None:
        """Let them take what is queued and close, all together for a bounded time."""
        for feed in self._feeds:
            feed.finish()
        until = self._clock() + self._close_s

        def join() -> None:
            for feed in self._feeds:
                feed.join(max(0.0, until - self._clock()))

        await asyncio.to_thread(join)
