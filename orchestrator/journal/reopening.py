"""Positions that are open again although they were resolved; their tasks are asked again.

The caller has put them into the temporary table `reopened` (`env`, `position`), each once, inside its own transaction.
"""

import sqlite3


def reopen(connection: sqlite3.Connection) -> None:
    """Undo that the positions in `reopened` are resolved, and drop that table.

    Where the low-water mark has passed a position that is open again, it is lowered to it, and every other position in
    between gets a row.
    """
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
