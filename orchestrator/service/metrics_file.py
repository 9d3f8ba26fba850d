"""`metrics.jsonl`: a line for every step that is trained on and for every evaluation, made from the journal.

A thread of its own follows the journal, so that neither a slow disk nor who listens to the lines can hold the run up; what
goes wrong here is said once and costs lines, never the run. The file is written anew at the start: it says what the
journal says, whatever an earlier process left. What the lines hold is in docs/steps.md.
"""

import asyncio
import json
import threading
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
        lines = [*self._steps(), *self._evals()]
        lines.sort(key=lambda line: line["acknowledged_at"] if line["kind"] == "step" else line["at"])
        return lines

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

    def __init__(self, run_dir: Path, listeners: Sequence[Listener] = (), *, poll_s: float = POLL_S) -> None:
        self._run_dir = run_dir
        self._path = run_dir / FILE
        self._listeners = listeners
        self._poll_s = poll_s
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
        try:
            with JournalReader(self._run_dir) as reader:
                follower = Follower(reader)
                known = self._count()
                lines = follower.read()
                self._rewrite(lines)
                self._tell(lines[known:])
                while not self._over.wait(self._poll_s):
                    self._append(follower.read())
                self._append(follower.read())
        except (OSError, JournalError) as error:
            log.warning("metrics_file.failed", error=str(error), note="the run goes on without it")

    def _count(self) -> int:
        """Lines that an earlier process wrote whole."""
        try:
            return self._path.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _rewrite(self, lines: Sequence[Line]) -> None:
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(map(_text, lines)), encoding="utf-8")
        draft.replace(self._path)

    def _append(self, lines: Sequence[Line]) -> None:
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(_text, lines)))
            self._tell(lines)

    def _tell(self, lines: Sequence[Line]) -> None:
        for line in lines:
            for listener in self._listeners:
                listener(line)


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"
