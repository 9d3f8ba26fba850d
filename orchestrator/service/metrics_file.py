"""`metrics.jsonl`: a line for every step that is trained on and for every evaluation, made from the journal.

A thread of its own follows the journal, so that neither a slow disk nor who listens to the lines can hold the run up; what
goes wrong here is said once and tried again, and never costs the run. The file is written anew at the start: it says what the
journal says, whatever an earlier process left. What the lines hold is in docs/steps.md.
"""

import asyncio
import heapq
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from orchestrator.errors import JournalError
from orchestrator.journal import JournalReader

FILE = "metrics.jsonl"
POLL_S = 1.0
RETRY_S = 30.0
"""After a failure everything is read and written anew."""
_STARTS = {kind: f'{{"kind": "{kind}",'.encode() for kind in ("step", "eval")}
"""What a line of each kind begins with."""
CLOSE_S = 5.0
"""How long the end of a run waits for the last lines."""

Line = dict[str, Any]
Listener = Callable[[Line], None]

log = structlog.get_logger()


class Follower:
    """Reads what is new in a run's journal, in the order in which it came."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._step = 0
        self._eval = 0

    def read(self) -> list[Line]:
        """Lines of the steps that were acknowledged and of the evaluations that ended since the last call."""
        # Merged, not sorted: steps stay in their order even where the clock was set back between them.
        return list(heapq.merge(self._steps(), self._evals(), key=_ended_at))

    def _steps(self) -> Iterator[Line]:
        for record in self._reader.steps(since=self._step):
            if record.acknowledged_at is None:
                return
            self._step = record.step
            line = {"kind": "step", **msgspec.to_builtins(record)}
            for env in line["envs"].values():
                del env["times"]  # many numbers that say little to people; the journal has them
            yield line

    def _evals(self) -> Iterator[Line]:
        for result in self._reader.evals(since=self._eval):
            self._eval += 1
            yield {"kind": "eval", **result}


class MetricsFile:
    """Keeps `metrics.jsonl` and tells `listeners` of each line that no earlier process wrote, in the thread."""

    def __init__(
        self,
        run_dir: Path,
        listeners: Sequence[Listener] = (),
        *,
        poll_s: float = POLL_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._run_dir = run_dir
        self._path = run_dir / FILE
        self._listeners = listeners
        self._poll_s = poll_s
        self._retry_s = retry_s
        self._told: Counter[str] | None = None
        """Lines of each kind that listeners have had, from this process or an earlier one; None until that was looked up."""
        self._failing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-file", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _run(self) -> None:
        # A disk that is full for an hour must not cost the trackers the days after it.
        while not self._followed() and not self._over.wait(self._retry_s):
            pass

    def _followed(self) -> bool:
        """Follow the journal until the run is over; False when that failed."""
        try:
            with JournalReader(self._run_dir) as reader:
                self._follow(Follower(reader))
        except (OSError, JournalError) as error:
            if not self._failing:
                note = "the run goes on without it; it is tried again"
                log.warning("metrics_file.failed", error=str(error), note=note)
            self._failing = True
            return False
        return True

    def _follow(self, follower: Follower) -> None:
        if self._told is None:
            self._told = self._count()
        lines = follower.read()
        self._rewrite(lines)
        if self._failing:
            self._failing = False
            log.info("metrics_file.goes_on", path=str(self._path))
        self._tell(_behind(lines, self._told))
        self._told = _kinds(lines)
        while not self._over.wait(self._poll_s):
            self._append(follower.read())
        self._append(follower.read())

    def _count(self) -> Counter[str]:
        """Lines of each kind that an earlier process wrote whole."""
        try:
            written = self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return Counter()
        whole = [line for line in written if line.endswith(b"\n")]
        return Counter(
            {kind: sum(line.startswith(start) for line in whole) for kind, start in _STARTS.items()}
        )

    def _rewrite(self, lines: Sequence[Line]) -> None:
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(map(_text, lines)), encoding="utf-8")
        draft.replace(self._path)

    def _append(self, lines: Sequence[Line]) -> None:
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_text, lines)))
            self._tell(lines)
            self._told = (self._told or Counter()) + _kinds(lines)

    def _tell(self, lines: Sequence[Line]) -> None:
        for line in lines:
            for listener in self._listeners:
                listener(line)


def _kinds(lines: Sequence[Line]) -> Counter[str]:
    return Counter(line["kind"] for line in lines)


def _behind(lines: Sequence[Line], told: Counter[str]) -> list[Line]:
    """Lines behind the first so many of each kind.

    Steps keep their order, and so do evaluations. How they stand among each other may change: a step and an evaluation that end
    together are read one after the other, and the clock may be set back.
    """
    seen: Counter[str] = Counter()
    behind = []
    for line in lines:
        seen[line["kind"]] += 1
        if seen[line["kind"]] > told[line["kind"]]:
            behind.append(line)
    return behind


def _ended_at(line: Line) -> float:
    return float(line["acknowledged_at"] if line["kind"] == "step" else line["at"])


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"
