"""Directories for the sockets of servers on this machine."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "envs-"
_TEMP_PATH_BYTES = 60
"""Unix socket paths end at 107 bytes; ours add some 30 to the directory for temporary files."""


class PrivateDirectory:
    """A directory that only the user can enter, short enough for Unix sockets, removed with its owner.

    A lock that is held as long as the owner lives tells others whose owner could not remove it any more.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _TEMP_PATH_BYTES:
            parent = Path("/tmp")  # noqa: S108  what is made in it is private
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / "locking").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its name only once it is held, so that nobody finds it free in between.
        (self.path / "locking").rename(self.path / "lock")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    """Remove what owners left behind that were killed."""
    for lock in parent.glob(f"{_PREFIX}*/lock"):
        with contextlib.suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
