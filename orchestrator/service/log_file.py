"""The orchestrator's own log in its run directory: always there, bounded in size, never a reason to fail.

Only its owner can read it: messages of environments may quote what is private.

When the file is full it becomes `<name>.1`, in place of the one before, so that the newest half at least is always
there. A line that cannot be written (a full disk) is left out: the run has its own ways to notice that.
"""

import io
import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TextIO, cast

from orchestrator.errors import JournalError
from orchestrator.journal.directory import make_private, open_private

MAX_BYTES = 64 * 2**20
"""Of one file; there are two."""


class LogFile(io.TextIOBase):
    """Appends whole lines; each is in the file when `write` returns."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        super().__init__()
        make_private(path.parent)
        self._path = path
        self._max_bytes = max_bytes
        self._file = self._open()
        self._bytes = path.stat().st_size

    @property
    def name(self) -> str:
        return str(self._path)

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        # A file that was closed: whoever still logs is not to fail for it.
        with suppress(OSError, ValueError):
            if self._bytes and self._bytes + len(data) > self._max_bytes:
                self._rotate()
            self._file.write(data)
            self._bytes += len(data)
        return len(text)

    def _rotate(self) -> None:
        # Gone where somebody has moved or deleted it, or where the new one could not be made the last time.
        with suppress(FileNotFoundError):
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        full, self._file, self._bytes = self._file, self._open(), 0
        full.close()

    def _open(self) -> IO[bytes]:
        return open(self._path, "ab", buffering=0, opener=open_private)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_log(run_dir: Path, *, max_bytes: int = MAX_BYTES) -> TextIO:
    """`logs/orchestrator.log` of a run directory, which is made where it is missing."""
    try:
        make_private(run_dir)
        # It has what a log needs of a text stream: write, flush, isatty, name.
        return cast("TextIO", LogFile(run_dir / "logs" / "orchestrator.log", max_bytes=max_bytes))
    except OSError as error:
        raise JournalError(f"{run_dir}: the run directory cannot be written: {error.strerror}") from None


def note(log: TextIO, event: str, **fields: str) -> None:
    """Put one event into the file alone: what the terminal is told in another way."""
    time = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    log.write(json.dumps({**fields, "event": event, "level": "error", "time": time}) + "\n")
