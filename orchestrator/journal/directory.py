"""The run directory and the journal in it: names, permissions, the lock, and how an old journal gives way.

What a run records may be private, so everything made here is readable by its owner alone. One orchestrator per
run directory: the lock is an advisory lock of the operating system, so it ends with the process that holds it.
"""

import fcntl
import os
from pathlib import Path
from typing import IO

from orchestrator.errors import JournalError

DIRECTORY = "journal"
"""Directory of the journal in the run directory, and in it:"""
DATABASE = "journal.sqlite3"
PAYLOADS = "payloads"
MARK = "mark.json"

LOCK = "lock"
"""File in the run directory that is locked while an orchestrator uses it."""

PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can look into; one that exists stays as it is, so do the parents."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)


def open_private(path: Path | str, flags: int) -> int:
    """A file descriptor; a new file is readable by its owner alone. Also an `opener` of `open`."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE_FILE)


def sync_file(path: Path) -> None:
    """Bring a file to disk, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_run_dir(run_dir: Path) -> IO[str]:
    """Take the run directory for this process, until the file that is returned is closed."""
    path = run_dir / LOCK
    try:
        make_private(run_dir)
        file = os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", encoding="utf-8")
    except OSError as error:
        raise JournalError(f"{run_dir}: the run directory cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise JournalError(
            f"{run_dir}: in use by {owner}; stop that orchestrator or choose another run_dir"
        ) from error
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file


def move_aside(run_dir: Path) -> Path | None:
    """Give way to a fresh run: an old journal is renamed to `journal.old-N`. None when there is none."""
    journal = run_dir / DIRECTORY
    if not journal.exists():
        return None
    number = 1
    while (aside := run_dir / f"{DIRECTORY}.old-{number}").exists():
        number += 1
    return journal.rename(aside)
