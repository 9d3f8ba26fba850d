"""The journal's database: its tables, its version, and how a connection to it is opened.

Owns the SQL that creates the tables (documented for the sqlite3 shell in docs/journal.md), the settings that
every connection needs, and the lock that keeps a second orchestrator out of a run directory. The database is in
WAL mode and is checkpointed by its one writer only, never automatically: the writer has payload files to
bring to disk first. Reads and writes of rows are elsewhere.
"""

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import IO

from orchestrator.errors import JournalError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x524C4F4A
"""Tells a journal from any other SQLite file."""

DIRECTORY = "journal"
"""Directory of the journal in the run directory, and in it:"""
DATABASE = "journal.sqlite3"
PAYLOADS = "payloads"

LOCK = "lock"
"""File in the run directory that is locked while an orchestrator uses it."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE groups (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    env TEXT NOT NULL,
    split TEXT NOT NULL,
    position INTEGER NOT NULL,
    part INTEGER NOT NULL,
    task_index INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    version INTEGER NOT NULL,
    version_end INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    sequences INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    reward REAL,
    finished_at REAL NOT NULL,
    step INTEGER,
    slot INTEGER,
    segment INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    transcript_bytes INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    checksum INTEGER NOT NULL
);
CREATE INDEX groups_by_step ON groups (step, slot) WHERE step IS NOT NULL;

CREATE TABLE batches (
    step INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    sequences INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    reward REAL,
    envs TEXT NOT NULL,
    formed_at REAL NOT NULL,
    acknowledged_at REAL,
    kept INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX batches_kept ON batches (kept, step);

CREATE TABLE acks (
    step INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (step, rank)
) WITHOUT ROWID;

CREATE TABLE resolved (
    env TEXT NOT NULL,
    position INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    PRIMARY KEY (env, position)
) WITHOUT ROWID;
CREATE TABLE low_water (env TEXT PRIMARY KEY, position INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE counters (
    env TEXT NOT NULL,
    what TEXT NOT NULL,
    n INTEGER NOT NULL,
    PRIMARY KEY (env, what)
) WITHOUT ROWID;

CREATE TABLE states (key TEXT PRIMARY KEY, value TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;

CREATE TABLE evals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    env TEXT,
    step INTEGER,
    version INTEGER,
    at REAL NOT NULL,
    data TEXT NOT NULL
);
"""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The writer's connection; creates the tables in a new file."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    except sqlite3.Error as error:
        raise JournalError(f"{path}: cannot be opened: {error}; is the run directory writable?") from error
    try:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"{path}: this filesystem cannot hold a WAL database (got {mode}); use a local disk for run_dir"
            )
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA synchronous = NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(
                f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        else:
            check_version(path, connection)
    except sqlite3.Error as error:
        connection.close()
        raise JournalError(
            f"{path}: {error}; is the run directory writable and the file a journal?"
        ) from error
    except JournalError:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that can change nothing; a running orchestrator goes on beside it."""
    if not path.is_file():
        raise JournalError(f"{path}: there is no journal here; is this the run_dir of a run?")
    try:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=5.0
        )
    except sqlite3.Error as error:
        raise JournalError(f"{path}: cannot be read: {error}") from error
    try:
        connection.execute("PRAGMA query_only = 1")
        check_version(path, connection)
    except sqlite3.Error as error:
        connection.close()
        raise JournalError(f"{path}: cannot be read: {error}") from error
    except JournalError:
        connection.close()
        raise
    return connection


def check_version(path: Path, connection: sqlite3.Connection) -> None:
    """Raise JournalError unless the file is a journal of this version."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise JournalError(f"{path}: an SQLite file, but not a journal; use another run_dir")
    if version != SCHEMA_VERSION:
        raise JournalError(
            f"{path}: written with journal schema {version}, this orchestrator has {SCHEMA_VERSION}; "
            "finish the run with the version that started it, or start over with --fresh"
        )


def lock_run_dir(run_dir: Path) -> IO[str]:
    """Take the run directory for this process, until the file that is returned is closed."""
    path = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
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
