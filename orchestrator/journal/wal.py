"""What of a WAL file SQLite does not use: the rest of a write that was cut short, or that is damaged.

SQLite reads a WAL up to the last whole commit and says nothing of what follows. This reads the two headers that
tell (both are documented file formats of SQLite): how many frames the WAL's index counts, and which run of frames the
WAL itself is in. Frames of an earlier run are left over from a WAL that was begun anew, and are nobody's loss.
"""

import struct
from pathlib import Path

_WAL_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_INDEX = struct.Struct("=14xHI")
"""Page size and number of frames in the header of the index."""
_SALTS = slice(16, 24), slice(8, 16)
"""Where the number of a run of frames stands: in the header of the WAL, and of each frame."""


def unused_bytes(database: Path) -> int:
    """Number of bytes behind the last whole commit of the WAL; a connection must have read from the database before."""
    try:
        index = database.with_name(f"{database.name}-shm").read_bytes()[: _INDEX.size]
        wal = database.with_name(f"{database.name}-wal")
        size: int = wal.stat().st_size
    except FileNotFoundError:
        return 0
    if len(index) < _INDEX.size or size <= _WAL_HEADER_BYTES:
        return size
    page_bytes, frames = _INDEX.unpack(index)
    frame_bytes: int = _FRAME_HEADER_BYTES + (65536 if page_bytes == 1 else page_bytes)
    used: int = _WAL_HEADER_BYTES + frames * frame_bytes
    with wal.open("rb") as file:
        salts = file.read(_WAL_HEADER_BYTES)[_SALTS[0]]
        for start in range(used, size, frame_bytes):
            file.seek(start)
            if file.read(_FRAME_HEADER_BYTES)[_SALTS[1]] == salts:
                return size - used
    return 0
