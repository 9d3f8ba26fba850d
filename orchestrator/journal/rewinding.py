"""Setting a run back to an earlier step, for a trainer that fell back further than batches are kept.

Later batches are given up and their tasks are open again; so is what is queued and was sampled by weights that came after
that step. States, versions, evaluations and the statistics of tasks are those of the step, so a curriculum chooses anew
for a position that is open again. It is one transaction, and the mark beside the database is
lowered before it: whenever the process dies, the journal is as it was or set back, and can be opened. What was filtered out
since the step stays filtered out.
"""

import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import JournalError
from orchestrator.journal.directory import DATABASE, DIRECTORY, PAYLOADS
from orchestrator.journal.opening import open_checked
from orchestrator.journal.payloads import segments_in
from orchestrator.journal.reopening import reopen

FindFlaw = Callable[[int, str | None], str]
"""Says why the run could not go on with a version, which lies at a path or has none; empty when it could."""

LOOKED_AT = 20
"""Versions that are looked at for one that can be loaded."""


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind did: given up are batches, asked again are tasks; the run goes on with `version`, which lies at `path`."""

    last_step: int
    step: int
    version: int
    path: str | None
    batches: int
    tasks: int


def find_obstacle(run_dir: Path, step: int, *, find_flaw: FindFlaw) -> str:
    """Why a run, which may be going on, cannot be set back to a step; empty when it can."""
    path = run_dir / DIRECTORY / DATABASE
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            last = connection.execute("SELECT coalesce(max(step), 0) FROM batches").fetchone()[0]
            _check(connection, run_dir, step, last, find_flaw)
        finally:
            connection.close()
    except (JournalError, sqlite3.Error, OSError, ValueError, KeyError, TypeError) as error:
        return str(error) or repr(error)
    return ""


def rewind(run_dir: Path, step: int, *, fsync: bool, find_flaw: FindFlaw) -> Rewound:
    """Set the run in a directory that the caller has locked back to a step; raises JournalError, and then it is as it was.

    `find_flaw` is asked for the version of that step.
    """
    directory = run_dir / DIRECTORY
    path = directory / DATABASE
    if not path.exists():
        raise JournalError(f"{run_dir}: there is no run here that could be set back")
    connection, mark = open_checked(directory, fsync=fsync)
    try:
        last = mark.mark.step
        states = _check(connection, run_dir, step, last, find_flaw)
        mark.write(step=step, acknowledged=min(step, mark.mark.acknowledged))
        connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            rewound = _set_back(
                connection, step, last, states, max(segments_in(directory / PAYLOADS), default=0)
            )
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        mark.write(rewinds=mark.mark.rewinds + 1, acknowledged=step)
    except (sqlite3.Error, OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path}: cannot be set back to step {step}: {error!r}") from error
    finally:
        connection.close()
        mark.close()
    return rewound


def _check(
    connection: sqlite3.Connection, run_dir: Path, step: int, last: int, find_flaw: FindFlaw
) -> dict[str, Any]:
    """What held at the step; JournalError when the run cannot be set back to it."""
    if not 0 < step <= last:
        raise JournalError(f"{run_dir}: cannot be set back to step {step}: it has the steps 1 to {last}")
    states = _states_at(connection, run_dir / DIRECTORY / DATABASE, step)
    version, weights = _weights(connection, step, states["version"])
    # Engines that were given nothing since still have what they were started with.
    moved_on = connection.execute("SELECT count(*) FROM versions WHERE version > ?", (version,)).fetchone()[0]
    if (weights is not None or moved_on) and (flaw := find_flaw(version, weights)):
        loadable = _loadable(connection, find_flaw)
        remedy = (
            f"there are weights of {loadable}" if loadable else "put them back, or start over with --fresh"
        )
        raise JournalError(
            f"{run_dir}: cannot be set back to step {step}: its weights (version {version}) cannot be gone back to: {flaw}; {remedy}"
        )
    return states


def _states_at(connection: sqlite3.Connection, path: Path, step: int) -> dict[str, Any]:
    """What a restart at that step would have found."""
    row = connection.execute("SELECT states FROM batches WHERE step = ?", (step,)).fetchone()
    if row is None or row[0] is None:
        found = connection.execute("SELECT min(step) FROM batches WHERE states IS NOT NULL").fetchone()[0]
        remedy = f"set it back to step {found} or later" if found else "start over with --fresh"
        raise JournalError(
            f"{path}: cannot be set back to step {step}: what held then was not recorded by the version that formed it; {remedy}"
        )
    return {key: json.loads(value) for key, value in json.loads(zlib.decompress(row[0])).items()}


def _set_back(
    connection: sqlite3.Connection, step: int, last: int, states: dict[str, Any], segment: int
) -> Rewound:
    book = states["version"]
    version, path = _weights(connection, step, book)
    connection.execute("CREATE TEMP TABLE reopened (env TEXT, position INTEGER)")
    connection.executemany("INSERT INTO reopened VALUES (?, ?)", sorted(set(_given_up(connection, step))))
    tasks = connection.execute("SELECT count(*) FROM reopened").fetchone()[0]
    connection.execute(
        "DELETE FROM groups WHERE step > ?1 OR (step IS NULL AND (version_end > ?2 OR"
        " (env, position) IN (SELECT env, position FROM reopened)))",
        (step, version),
    )
    connection.execute("DELETE FROM choices WHERE (env, position) IN (SELECT env, position FROM reopened)")
    reopen(connection)
    # What was learned up to the step is with its batch and those before it.
    connection.execute("DELETE FROM learned")
    for table in ("batches", "acks", "reports", "versions"):
        connection.execute(f"DELETE FROM {table} WHERE step > ?", (step,))  # noqa: S608  # names of tables
    # Those that came after what the states know will be due again.
    connection.execute("DELETE FROM evals WHERE step > ?", (book["trained"],))
    now = time.time()
    connection.execute(
        "UPDATE batches SET acknowledged_at = ? WHERE acknowledged_at IS NULL AND step <= ?", (now, step)
    )
    published = sorted({*(one for one in book["published"] if one < version), version})
    states["version"] = {
        **book,
        "published": published,
        "serving": version,
        "path": path,
        "loaded_path": path,
        "trained": step,
    }
    connection.executemany(
        "INSERT OR REPLACE INTO states VALUES (?, ?, ?)",
        [(key, json.dumps(value), now) for key, value in states.items()],
    )
    meta = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('rewinds', 'rewound')"))
    told = [*json.loads(meta.get("rewound", "[]")), {"at": now, "from": last, "to": step}]
    connection.executemany(
        "INSERT OR REPLACE INTO meta VALUES (?, ?)",
        [
            ("rewinds", str(int(meta.get("rewinds", 0)) + 1)),
            ("rewound", json.dumps(told)),
            # Headers of these payload files tell of steps that were given up.
            ("rewound_segment", str(segment)),
        ],
    )
    return Rewound(last, step, version, path, last - step, tasks)


def _weights(connection: sqlite3.Connection, step: int, book: dict[str, Any]) -> tuple[int, str | None]:
    """The version that was published after the step, or the newest before it, and where it lies."""
    row = connection.execute(
        "SELECT version, path FROM versions WHERE step <= ? ORDER BY version DESC LIMIT 1", (step,)
    ).fetchone()
    return (row[0], row[1]) if row is not None else (book["published"][-1], book["path"])


def _loadable(connection: sqlite3.Connection, find_flaw: FindFlaw) -> str:
    """The last steps whose weights are still where they were."""
    rows = connection.execute(
        "SELECT step, version, path FROM versions WHERE path IS NOT NULL ORDER BY version DESC LIMIT ?",
        (LOOKED_AT,),
    ).fetchall()
    steps = sorted({step for step, version, path in rows if not find_flaw(version, path)})
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}" if steps else ""


def _given_up(connection: sqlite3.Connection, step: int) -> Iterator[tuple[str, int]]:
    """Positions of the batches after the step, but those of which an earlier batch has a part."""
    later = connection.execute("SELECT tasks FROM batches WHERE step > ?", (step,)).fetchall()
    parts: set[tuple[str, int]] = set()
    for (tasks,) in later:
        for env, places in json.loads(tasks).items():
            for position, part in places:
                if part:
                    parts.add((env, position))
                else:
                    yield env, position
    if parts:
        for (tasks,) in connection.execute(
            "SELECT tasks FROM batches WHERE step <= ? AND tasks IS NOT NULL", (step,)
        ):
            for env, places in json.loads(tasks).items():
                parts.difference_update((env, position) for position, _ in places)
        yield from parts
