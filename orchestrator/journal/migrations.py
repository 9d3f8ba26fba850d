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

    A position whose first part went into a batch stays resolved. Where the low-water mark has passed a position
    that is open again, it is lowered to it, and every other position in between gets a row.
    """
    connection.execute(
        "CREATE TEMP TABLE reopened AS SELECT env, position FROM groups"
        " GROUP BY env, position HAVING max(step) IS NULL AND min(part) = 0"
    )
    connection.execute("CREATE UNIQUE INDEX temp.reopened_positions ON reopened (env, position)")
    connection.execute("DELETE FROM resolved WHERE (env, position) IN (SELECT env, position FROM reopened)")
    for env, low, old in connection.execute(
        "SELECT env, min(reopened.position), low_water.position FROM reopened JOIN low_water USING (env)"
        " GROUP BY env HAVING min(reopened.position) < low_water.position"
    ).fetchall():
        # One row at a time goes through the queue of a recursive query, however wide the span is.
        connection.execute(
            "WITH RECURSIVE span (position) AS (SELECT ?2 UNION ALL SELECT position + 1 FROM span WHERE position + 1 < ?3)"
            " INSERT OR IGNORE INTO resolved SELECT ?1, position, 'unknown' FROM span"
            " WHERE NOT EXISTS (SELECT 1 FROM reopened WHERE env = ?1 AND reopened.position = span.position)",
            (env, low, old),
        )
        connection.execute("UPDATE low_water SET position = ? WHERE env = ?", (low, env))
    connection.execute("DROP TABLE reopened")
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

    A row that was not what had been recorded is left as it is, so that it is still found out.
    """
    connection.execute("ALTER TABLE groups ADD COLUMN details_bytes INTEGER NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE groups ADD COLUMN digest INTEGER NOT NULL DEFAULT 0")
    connection.execute(
        "CREATE TABLE control (id INTEGER PRIMARY KEY AUTOINCREMENT,"
        " at REAL NOT NULL, origin TEXT NOT NULL, command TEXT NOT NULL)"
    )
    connection.create_function("group_checksum", -1, lambda *row: group_checksum(row), deterministic=True)
    connection.execute(
        f"UPDATE groups SET row_checksum = group_checksum({_IDENTITY_3})"  # noqa: S608 # names of columns
        f" WHERE row_checksum = group_checksum({_IDENTITY_2})"
    )


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _resolve_in_batches, 2: _add_details}
"""From which version to the next."""
