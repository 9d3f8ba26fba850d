"""What an archive gives up when it is too large or too old, so that the early steps of a run stay readable too.

Conversations are thinned out: of the older half of the steps that have any, every other one loses them, again and again, so
that what is left is dense where it is new and sparse where it is old, with the first step always among it. Rows without a conversation go from
the oldest on. What SQLite frees it uses again, so that the file stays below its limit and need not shrink.
"""

import sqlite3

ENOUGH = 0.9
"""Down to which part of the limit things are given up, so that it is not done at every commit."""

ROWS_AT_ONCE = 10
"""The part of all rows that goes at once is one in this many."""

DAY_S = 86400.0


def used_bytes(connection: sqlite3.Connection) -> int:
    """What the file holds; what SQLite has freed and will use again does not count."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def make_room(connection: sqlite3.Connection, *, max_bytes: int) -> bool:
    """Give up what is beyond the limit; whether anything was. The caller has begun a transaction."""
    if used_bytes(connection) <= max_bytes:
        return False
    enough = int(ENOUGH * max_bytes)
    while (used := used_bytes(connection)) > enough:
        (texts,) = connection.execute("SELECT coalesce(sum(bytes), 0) FROM texts").fetchone()
        given_up = _thin_texts(connection) if texts > used // 2 else _cut_rows(connection)
        if not given_up and not _thin_texts(connection) and not _cut_rows(connection):
            break
    return True


def forget_older(connection: sqlite3.Connection, *, before: float) -> None:
    """Forget groups that ended, and failures that last occurred, before a time."""
    connection.execute("DELETE FROM groups WHERE finished_at < ?", (before,))
    connection.execute("DELETE FROM failures WHERE last_at < ?", (before,))


def _thin_texts(connection: sqlite3.Connection) -> int:
    """Give up the conversations of some steps; how many texts that were."""
    steps = [step for (step,) in connection.execute("SELECT DISTINCT step FROM texts ORDER BY step")]
    going = steps[: len(steps) // 2][1::2] or steps[1:2]
    if going:
        deleted = connection.executemany("DELETE FROM texts WHERE step = ?", [(step,) for step in going])
    else:
        deleted = connection.execute("DELETE FROM texts WHERE seq = (SELECT min(seq) FROM texts)")
    return deleted.rowcount


def _cut_rows(connection: sqlite3.Connection) -> int:
    """Give up the oldest rows that have no conversation; how many that were."""
    (rows,) = connection.execute("SELECT count(*) FROM groups").fetchone()
    deleted = connection.execute(
        "DELETE FROM groups WHERE seq IN (SELECT seq FROM groups"
        " WHERE NOT EXISTS (SELECT 1 FROM texts WHERE texts.seq = groups.seq) ORDER BY seq LIMIT ?)",
        (rows // ROWS_AT_ONCE + 1,),
    )
    return deleted.rowcount
