"""The journal's database: its tables, its version, and how a connection to it is opened.

Owns the SQL that creates the tables (documented for the sqlite3 shell in docs/journal.md) and the settings that every
connection needs. The database is in WAL mode and is checkpointed by its one writer only, never automatically: the
writer has payload files to bring to disk first, and knows what the file looks like afterwards. An older schema is
brought up to date by `migrations`, a newer one is refused. Reads and writes of rows are elsewhere.
"""

import os
import sqlite3
import uuid
from pathlib import Path

from orchestrator.errors import JournalError
from orchestrator.journal.directory import open_private

SCHEMA_VERSION = 4
APPLICATION_ID = 0x524C4F4A
"""Tells a journal from any other SQLite file."""

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
    details_bytes INTEGER NOT NULL DEFAULT 0,
    transcript_bytes INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    checksum INTEGER NOT NULL,
    digest INTEGER NOT NULL DEFAULT 0,
    row_checksum INTEGER NOT NULL DEFAULT 0
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
    kept INTEGER NOT NULL DEFAULT 1,
    row_checksum INTEGER NOT NULL DEFAULT 0,
    facts TEXT,
    tasks TEXT,
    states BLOB,
    learned BLOB
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

CREATE TABLE choices (
    env TEXT NOT NULL,
    position INTEGER NOT NULL,
    task_index INTEGER NOT NULL,
    PRIMARY KEY (env, position)
) WITHOUT ROWID;

CREATE TABLE learned (
    id INTEGER PRIMARY KEY,
    env TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    version INTEGER NOT NULL,
    reward REAL NOT NULL,
    rollouts INTEGER NOT NULL,
    equal INTEGER NOT NULL
);

CREATE TABLE counters (
    env TEXT NOT NULL,
    what TEXT NOT NULL,
    n INTEGER NOT NULL,
    PRIMARY KEY (env, what)
) WITHOUT ROWID;

CREATE TABLE states (key TEXT PRIMARY KEY, value TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;

CREATE TABLE versions (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, path TEXT, at REAL NOT NULL);

CREATE TABLE reports (step INTEGER PRIMARY KEY, data TEXT NOT NULL);

CREATE TABLE evals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    env TEXT,
    step INTEGER,
    version INTEGER,
    at REAL NOT NULL,
    data TEXT NOT NULL
);

CREATE TABLE control (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    origin TEXT NOT NULL,
    command TEXT NOT NULL
);
"""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The writer's connection, with nothing created or changed yet; raises sqlite3.Error and OSError."""
    if not path.exists():
        os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(
                f"{path}: this filesystem cannot hold a WAL database (got {mode}); use a local disk for run_dir"
            )
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, JournalError):
        connection.close()
        raise
    return connection


def create_tables(connection: sqlite3.Connection) -> None:
    """Make a new journal of an empty database: the tables and the name of the run."""
    connection.executescript(
        f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID};"
        f" PRAGMA user_version = {SCHEMA_VERSION};"
    )
    connection.execute("INSERT INTO meta VALUES ('run_id', ?)", (uuid.uuid4().hex,))
    connection.execute("COMMIT")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that can change nothing, to a file of any version; raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=5.0
    )
    try:
        connection.execute("PRAGMA query_only = 1")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def version_of(path: Path, connection: sqlite3.Connection) -> int:
    """The schema of a journal, 0 when the database is empty; raises JournalError when it is something else."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID or version < 1:
        raise JournalError(f"{path}: an SQLite file, but not a journal; use another run_dir")
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"{path}: written with journal schema {version}, this orchestrator has {SCHEMA_VERSION}; "
            "go on with the version that wrote it, or start over with --fresh"
        )
    return version


def check_readable(path: Path, connection: sqlite3.Connection) -> None:
    """Raise JournalError unless the file is a journal of this schema; who only reads cannot bring it up to date."""
    version = version_of(path, connection)
    if version == 0:
        raise JournalError(f"{path}: this journal is empty; is this the run_dir of a run?")
    if version < SCHEMA_VERSION:
        raise JournalError(
            f"{path}: written with journal schema {version}, this orchestrator reads {SCHEMA_VERSION}; open it once "
            "with `orchestrator run`, which brings it up to date, or read it with the version that wrote it"
        )
