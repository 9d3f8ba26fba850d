"""The mark beside the database: what was promised, in a file that nobody replaces together with the database.

`mark.json` names the run, the last step that was formed and the last that was acknowledged when it was written, a
count of how often the journal was opened or folded (`generation`, in the database too), and a digest of the database
file. It is written anew, as a whole, whenever a batch is on disk, when the journal is opened and when its WAL is folded, and
always after the database: so the database may be ahead of its mark, but one that is behind it is not the
one that was written. The file itself changes only when the WAL is folded, so its digest holds in between.

The database file is read through one descriptor that stays open as long as the connection of SQLite: closing any
descriptor of a file drops the locks that the process holds on it, and another process would then take away the WAL.
"""

import contextlib
import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.journal.directory import MARK, open_private

_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark says. `database` is the digest of the database file, None while it is being changed."""

    run_id: str
    step: int
    acknowledged: int
    generation: int
    database: str | None
    rewinds: int = 0
    """How often the run was set back; marks of earlier revisions do not say."""

    def encode(self) -> bytes:
        fields = asdict(self)
        return json.dumps({**fields, "checksum": _checksum(fields)}).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> "Mark | None":
        """The mark in a file; None when it is not what was written."""
        try:
            fields = json.loads(data)
            given = fields.pop("checksum")
            return cls(**fields) if given == _checksum(fields) else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def read_mark(directory: Path) -> Mark | None:
    """The mark of a journal; None when it is missing or damaged."""
    try:
        return Mark.decode((directory / MARK).read_bytes())
    except FileNotFoundError:
        return None


class DatabaseFile:
    """The database file itself, for its digest; to be closed after the connection."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def digest(self) -> str:
        """A digest of the file as it is, without its WAL."""
        found, offset = hashlib.blake2b(digest_size=16), 0
        while data := os.pread(self._fd, _READ_BYTES, offset):
            found.update(data)
            offset += len(data)
        return found.hexdigest()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MarkFile:
    """Writes the mark of a journal that is open for writing."""

    def __init__(self, directory: Path, mark: Mark, database: DatabaseFile, *, fsync: bool) -> None:
        self._directory = directory
        self._database = database
        self._fsync = fsync
        self.mark = mark

    def write(self, **changes: Any) -> None:
        """Replace the file by one with these changes; raises OSError, and then the old one is still there."""
        mark = replace(self.mark, **changes)
        new = self._directory / f"{MARK}.new"
        fd = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(fd, mark.encode())
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)
        # Its name is not brought to disk: after a power cut the earlier mark is as good, it only says less.
        new.replace(self._directory / MARK)
        self.mark = mark

    def write_digest(self, **changes: Any) -> None:
        """Note what the database file looks like now."""
        changes["database"] = self._database.digest()
        if replace(self.mark, **changes) != self.mark:
            self.write(**changes)

    def close(self) -> None:
        """The connection is closed, which may have folded the rest: note that, if possible, and let go of the file."""
        try:
            # Where this fails, the next start only takes a closer look.
            with contextlib.suppress(OSError):
                self.write_digest()
        finally:
            self._database.close()


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
