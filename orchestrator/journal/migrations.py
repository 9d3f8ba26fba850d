"""From every older schema of the journal to the present one, a step at a time.

`MIGRATIONS` has, for each older version, what makes a database of that version one of the next. All the steps
that a journal needs are one transaction: it is brought up to date as a whole, or stays as it was. A step that
was released does not change any more; a later schema that counts a checksum in another way counts it anew.
"""

import sqlite3
import uuid
from collections.abc import Callable
from pathlib import Path

import structlog

from orchestrator.journal.reopening import reopen
from orchestrator.journal.rows import batch_checksum, group_checksum
from orchestrator.journal.schema import SCHEMA_VERSION

log = structlog.get_logger()

_IDENTITY_2 = (
    "id, env, split, position, part, task_index, epoch, version, version_end, rollouts, sequences, tokens, bytes,"
    " transcript_bytes, codec, checksum"
)
"""What a group's checksum covered in schema 2."""

_IDENTITY_3 = (
    "id, env, split, position, part, task_index, epoch, version, version_end, rollouts, sequences, tokens, bytes,"
    " details_bytes, transcript_bytes, codec, checksum, digest"
)
"""And in schema 3."""


def migrate(path: Path, connection: sqlite3.Connection, version: int) -> None:
    """Bring a journal of an older version up to date; raises sqlite3.Error, and then nothing has changed."""
    if version == SCHEMA_VERSION:
        return
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for older in range(version, SCHEMA_VERSION):
            MIGRATIONS[older](connection)
            connection.execute(f"PRAGMA user_version = {older + 1}")
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    log.info("journal.migrated", path=str(path), from_schema=version, to_schema=SCHEMA_VERSION)


def _resolve_in_batches(connection: sqlite3.Connection) -> None:
    """1 to 2: a queued group's position is not resolved yet, and rows have a checksum.

    A position whose first part went into a batch stays resolved.
    """
    connection.execute(
        "CREATE TEMP TABLE reopened AS SELECT env, position FROM groups"
        " GROUP BY env, position HAVING max(step) IS NULL AND min(part) = 0"
    )
    reopen(connection)
    connection.execute("ALTER TABLE groups ADD COLUMN row_checksum INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE batches ADD COLUMN row_checksum INTEGER NOT NULL DEFAULT 0")
    connection.execute("INSERT OR IGNORE INTO meta VALUES ('run_id', ?)", (uuid.uuid4().hex,))
    connection.create_function("group_checksum", -1, lambda *row: group_checksum(row), deterministic=True)
    connection.execute(f"UPDATE groups SET row_checksum = group_checksum({_IDENTITY_2})")  # noqa: S608 # names of columns
    for step, version in connection.execute("SELECT step, version FROM batches WHERE kept").fetchall():
        ids = [
            row[0]
            for row in connection.execute("SELECT id FROM groups WHERE step = ? ORDER BY slot", (step,))
        ]
        connection.execute(
            "UPDATE batches SET row_checksum = ? WHERE step = ?", (batch_checksum(step, version, ids), step)
        )


def _add_details(connection: sqlite3.Connection) -> None:
    """2 to 3: groups know the digest of their task, and facts about single sequences; those that are there have none.
    What people changed while a run went on has a table.

    Batches have the record of their step, their tasks and the states that held with them; published versions and what a
    trainer reports have tables.

    A row that was not what had been recorded is left as it is, so that it is still found out.
    """
    connection.execute("ALTER TABLE groups ADD COLUMN details_bytes INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE groups ADD COLUMN digest INTEGER NOT NULL DEFAULT 0")
    for column in ("facts TEXT", "tasks TEXT", "states BLOB"):
        connection.execute(f"ALTER TABLE batches ADD COLUMN {column}")
    connection.execute(
        "CREATE TABLE versions (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, path TEXT, at REAL NOT NULL)"
    )
    connection.execute("CREATE TABLE reports (step INTEGER PRIMARY KEY, data TEXT NOT NULL)")
    connection.execute(
        "CREATE TABLE control (id INTEGER PRIMARY KEY AUTOINCREMENT,"
        " at REAL NOT NULL, origin TEXT NOT NULL, command TEXT NOT NULL)"
    )
    connection.create_function("group_checksum", -1, lambda *row: group_checksum(row), deterministic=True)
    connection.execute(
        f"UPDATE groups SET row_checksum = group_checksum({_IDENTITY_3})"  # noqa: S608 # names of columns
        f" WHERE row_checksum = group_checksum({_IDENTITY_2})"
    )


def _add_learned(connection: sqlite3.Connection) -> None:
    """3 to 4: which task a curriculum chose for a position, and what groups said about their tasks.

    Nothing of that was recorded before, so the statistics of tasks begin here.
    """
    connection.execute(
        "CREATE TABLE choices (env TEXT NOT NULL, position INTEGER NOT NULL, task_index INTEGER NOT NULL,"
        " PRIMARY KEY (env, position)) WITHOUT ROWID"
    )
    connection.execute(
        "CREATE TABLE learned (id INTEGER PRIMARY KEY, env TEXT NOT NULL, task_index INTEGER NOT NULL,"
        " version INTEGER NOT NULL, reward REAL NOT NULL, rollouts INTEGER NOT NULL, equal INTEGER NOT NULL)"
    )
    connection.execute("ALTER TABLE batches ADD COLUMN learned BLOB")


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {
    1: _resolve_in_batches,
    2: _add_details,
    3: _add_learned,
}
"""From which version to the next."""
