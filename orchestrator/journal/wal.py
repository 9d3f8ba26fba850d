"""What of a WAL file SQLite does not use: the rest of a write that was cut short, or that is damaged.

SQLite reads a WAL up to the last whole commit and says nothing of what follows. Frames that follow and carry the
number of the present run of frames ("salts") are such a rest; those of an earlier run are left over from a WAL that was begun
anew, and are nobody's loss. Only the WAL is opened here: SQLite holds locks on its other two files, and closing any
descriptor of a file drops every lock that the process has on it.
"""

import sqlite3
from pathlib import Path

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_SALTS, _FRAME_SALTS = slice(16, 24), slice(8, 16)


def fold_and_measure(connection: sqlite3.Connection, database: Path) -> int:
    """Fold what a WAL holds into the database; returns the number of bytes in it that are no whole commit."""
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    wal = database.with_name(f"{database.name}-wal")
    size: int = wal.stat().st_size if wal.exists() else 0
    if size == 0:
        return 0
    frame_bytes: int = _FRAME_HEADER_BYTES + page_bytes
    used: int = _HEADER_BYTES + max(frames, 0) * frame_bytes
    with wal.open("rb") as file:
        salts = file.read(_HEADER_BYTES)[_SALTS]
        for start in range(used, size, frame_bytes):
            file.seek(start)
            if file.read(_FRAME_HEADER_BYTES)[_FRAME_SALTS] == salts:
                return size - used
    return 0
