"""The archive's file: its name, its tables, how a connection to it is opened, and how it gives way to a new one.

Owns the SQL (documented in docs/rollouts.md) and nothing of what the rows mean. The file is in WAL mode, so that any number
of processes read while the run writes, and so that what was committed is there after kill -9. It names its run: a file of
another run, of another schema, or one that is no archive at all is moved aside and never changed.
"""

import os
import sqlite3
from pathlib import Path

from orchestrator.journal.directory import open_private

FILE = "rollouts.sqlite"
"""The archive in the run directory."""

SCHEMA_VERSION = 1
APPLICATION_ID = 0x524C4F41
"""Tells an archive from any other SQLite file."""

CHECKED_BYTES = 64 * 1024 * 1024
"""A larger file is not searched for damage as a whole when it is opened; it would take seconds."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE groups (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    env TEXT NOT NULL,
    split TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    position INTEGER NOT NULL,
    step INTEGER,
    version INTEGER NOT NULL,
    version_end INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    rollouts INTEGER NOT NULL,
    rewards TEXT NOT NULL,
    lengths TEXT NOT NULL,
    min_reward REAL,
    max_reward REAL,
    mean_reward REAL,
    tokens INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL
);
CREATE INDEX groups_by_env ON groups (env);
CREATE INDEX groups_by_step ON groups (step);
CREATE INDEX groups_by_task ON groups (env, task_index);

CREATE TABLE counts (
    env TEXT NOT NULL,
    split TEXT NOT NULL,
    outcome TEXT NOT NULL,
    groups INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    PRIMARY KEY (env, split, outcome)
) WITHOUT ROWID;
CREATE TRIGGER group_is_counted AFTER INSERT ON groups BEGIN
    INSERT INTO counts VALUES (new.env, new.split, new.outcome, 1, new.rollouts)
    ON CONFLICT DO UPDATE SET groups = groups + 1, rollouts = rollouts + excluded.rollouts;
END;
CREATE TRIGGER group_is_counted_anew AFTER UPDATE OF outcome ON groups BEGIN
    UPDATE counts SET groups = groups - 1, rollouts = rollouts - old.rollouts
    WHERE (env, split, outcome) = (old.env, old.split, old.outcome);
    INSERT INTO counts VALUES (new.env, new.split, new.outcome, 1, new.rollouts)
    ON CONFLICT DO UPDATE SET groups = groups + 1, rollouts = rollouts + excluded.rollouts;
END;

CREATE TABLE texts (
    seq INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    text BLOB NOT NULL
);
CREATE INDEX texts_by_step ON texts (step, bytes);
CREATE TRIGGER group_is_gone AFTER DELETE ON groups BEGIN
    DELETE FROM texts WHERE seq = old.seq;
    UPDATE counts SET groups = groups - 1, rollouts = rollouts - old.rollouts
    WHERE (env, split, outcome) = (old.env, old.split, old.outcome);
END;

CREATE TABLE failures (
    env TEXT NOT NULL,
    kind TEXT NOT NULL,
    pattern TEXT NOT NULL,
    split TEXT NOT NULL,
    text TEXT NOT NULL,
    detail TEXT NOT NULL,
    count INTEGER NOT NULL,
    first_at REAL NOT NULL,
    last_at REAL NOT NULL,
    task_index INTEGER NOT NULL,
    PRIMARY KEY (env, kind, pattern)
) WITHOUT ROWID;
CREATE INDEX failures_by_time ON failures (last_at);
"""


class ForeignFileError(Exception):
    """A file that is no archive of this run, or is damaged; the message says what it is instead."""


def open_for_writing(path: Path, run_id: str) -> sqlite3.Connection:
    """The writer's connection to the archive of a run, made anew where there is none.

    Raises ForeignFileError for a file that must be moved aside, and sqlite3.Error and OSError.
    """
    if not path.exists():
        os.close(open_private(path, os.O_RDWR | os.O_CREAT))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        try:
            empty = _check(path, connection, run_id)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise ForeignFileError(f"damaged, or no archive: {error}") from error
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise OSError(f"this filesystem cannot hold a WAL database (got {mode})")
        connection.execute("PRAGMA synchronous = NORMAL")
        # Texts go with the rows that a group asked again replaces.
        connection.execute("PRAGMA recursive_triggers = 1")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        if empty:
            connection.executescript(
                f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID};"
                f" PRAGMA user_version = {SCHEMA_VERSION};"
            )
            connection.execute("INSERT INTO meta VALUES ('run_id', ?)", (run_id,))
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _check(path: Path, connection: sqlite3.Connection, run_id: str) -> bool:
    """Whether the file is empty; ForeignFileError unless it can be written to."""
    application, version = identity_of(connection)
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if (application, version, tables) == (0, 0, 0):
        return True
    if application != APPLICATION_ID:
        raise ForeignFileError("an SQLite file, but no archive")
    if version != SCHEMA_VERSION:
        raise ForeignFileError(f"an archive of schema {version}, this orchestrator writes {SCHEMA_VERSION}")
    found = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    if found is None or found[0] != run_id:
        raise ForeignFileError(f"of another run ({found[0] if found else 'which it does not name'})")
    if path.stat().st_size <= CHECKED_BYTES:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise ForeignFileError(f"damaged: {verdict}".replace("\n", " "))
    return False


def identity_of(connection: sqlite3.Connection) -> tuple[int, int]:
    """The application id and the schema that a file says it has."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return application, version


def move_aside(path: Path) -> Path:
    """Rename the archive to `rollouts.sqlite.old-N`, with what SQLite keeps beside it; returns where it is."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    for ending in ("-wal", "-shm"):
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + ending))
    return path.rename(aside)
