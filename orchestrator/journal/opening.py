"""How a journal is opened for writing: what is on disk is held against its mark before anything is changed.

A database that is gone, empty, cut, damaged, of another run or older than what was promised is refused, with what is
known and the remedy: a run that went on with it would serve other bytes for a step that a trainer has had. What can be
gone on with is gone on with and said in the log: a mark that is lost, a file that another program has written to.
Only then are the tables created or brought up to date.
"""

import sqlite3
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from orchestrator.errors import JournalError
from orchestrator.journal.directory import DATABASE, MARK, PAYLOADS, sync_file
from orchestrator.journal.mark import DatabaseFile, Mark, MarkFile, read_mark
from orchestrator.journal.migrations import migrate
from orchestrator.journal.payloads import SegmentHeader, segment_path, segments_in
from orchestrator.journal.schema import create_tables, open_for_reading, open_for_writing, version_of
from orchestrator.journal.wal import fold_and_measure

log = structlog.get_logger()

CHECKED_BYTES = 256 * 1024 * 1024
"""A larger database is not searched for damage as a whole; 100 MB take about a second."""

REMEDY = "put the newer one back, or start over with --fresh"


@dataclass(frozen=True, slots=True)
class Found:
    """What a database says before it is opened for writing. `generation` is 0 where no mark was ever written."""

    version: int
    run_id: str | None = None
    step: int = 0
    acknowledged: int = 0
    generation: int = 0
    rewinds: int = 0
    rewound_segment: int = 0


class Beside:
    """What lies beside the database and tells of it, and the file itself."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / DATABASE
        self.mark = read_mark(directory)
        self.file = DatabaseFile(self.path) if self.path.exists() else None
        self.digest = None if self.file is None else self.file.digest()
        payloads = directory / PAYLOADS
        self.segments = sorted(segments_in(payloads))
        headers = ((number, SegmentHeader.read(segment_path(payloads, number))) for number in self.segments)
        self.headers = {number: header for number, header in headers if header is not None}

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    @property
    def changed(self) -> bool:
        """Whether the database file is not known to be as it was left."""
        return self.mark is None or self.mark.database != self.digest

    @property
    def known(self) -> str:
        """What the mark promised, to be put into a message."""
        return "" if self.mark is None else f"step {self.mark.step} of run {self.mark.run_id} was served; "


def open_checked(directory: Path, *, fsync: bool) -> tuple[sqlite3.Connection, MarkFile]:
    """Open the journal in a directory that the caller has locked, or create it; raises JournalError."""
    path = directory / DATABASE
    with ExitStack() as undo:
        try:
            beside = Beside(directory)
            undo.callback(beside.close)
            found = _look(beside)
            _check_present(beside, found)
            _check_run(beside, found)
            _check_steps(beside, found)
            connection = open_for_writing(path)
            undo.callback(connection.close)
            if beside.file is None:
                beside.file = DatabaseFile(path)
            mark = _begin(connection, beside, found, beside.file, fsync=fsync)
        except (sqlite3.Error, OSError) as error:
            raise JournalError(
                f"{path}: {error}; is the run directory writable and the file a journal?"
            ) from error
        undo.pop_all()
    return connection, mark


def _look(beside: Beside) -> Found:
    """Read what the database says, and search it for damage unless it is as it was left."""
    path = beside.path
    if not path.exists() or path.stat().st_size == 0:
        return Found(version=0)
    try:
        connection = open_for_reading(path)
        try:
            version = version_of(path, connection)
            if version and beside.changed and path.stat().st_size <= CHECKED_BYTES:
                (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict.replace("\n", " "))
            return _ends(connection, version) if version else Found(version=0)
        finally:
            connection.close()
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise JournalError(
            f"{path}: damaged, or not a journal: {error}; {beside.known}put a whole copy of it back, "
            "or start over with --fresh"
        ) from error


def _ends(connection: sqlite3.Connection, version: int) -> Found:
    """How far a run has got."""
    step, acknowledged = connection.execute(
        "SELECT coalesce(max(step), 0), coalesce(max(step) FILTER (WHERE acknowledged_at IS NOT NULL), 0) FROM batches"
    ).fetchone()
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    if "run_id" not in meta and version > 1:
        raise sqlite3.DatabaseError("it does not name its run")
    numbers = (int(meta.get(key, 0)) for key in ("generation", "rewinds", "rewound_segment"))
    return Found(version, meta.get("run_id"), int(step), int(acknowledged), *numbers)


def _check_present(beside: Beside, found: Found) -> None:
    if found.version > 0 or (beside.mark is None and not beside.segments):
        return
    what = "is empty" if beside.path.exists() else "is gone"
    known = beside.known or f"{len(beside.segments)} payload files lie beside it; "
    raise JournalError(f"{beside.path}: {what}, but {known}{REMEDY}")


def _check_run(beside: Beside, found: Found) -> None:
    others = {} if beside.mark is None else {MARK: beside.mark.run_id}
    others.update(
        (f"{PAYLOADS}/{number:08d}.bin", header.run_id) for number, header in beside.headers.items()
    )
    for name, run_id in others.items():
        if found.run_id is not None and run_id != found.run_id:
            raise JournalError(
                f"{beside.path}: is of run {found.run_id}, but {name} beside it is of run {run_id}; "
                "put the files of one run together again, or start over with --fresh"
            )


def _check_steps(beside: Beside, found: Found) -> None:
    """Nobody may be given other bytes for a step that was served."""
    mark = beside.mark
    # A file that was about to be overwritten as a new segment may still have the header of the one that it was.
    begun = max(
        (
            header.step
            for number, header in beside.headers.items()
            if number == header.segment > found.rewound_segment
        ),
        default=0,
    )
    served = begun if mark is None else max(begun, mark.step)
    cause = f"the file was replaced by an older copy, or cut; {REMEDY}"
    if found.step < served:
        raise JournalError(f"{beside.path}: ends at step {found.step}, but step {served} was served; {cause}")
    if mark is not None and found.rewinds < mark.rewinds:
        raise JournalError(f"{beside.path}: is from before the run was set back; {cause}")
    if mark is not None and found.acknowledged < mark.acknowledged:
        raise JournalError(
            f"{beside.path}: was acknowledged up to step {found.acknowledged}, "
            f"but step {mark.acknowledged} was too; {cause}"
        )


def _begin(
    connection: sqlite3.Connection, beside: Beside, found: Found, file: DatabaseFile, *, fsync: bool
) -> MarkFile:
    """Bring the database up to date and start a new generation, in the database first and then in the mark."""
    old = beside.mark or Mark("", found.step, found.acknowledged, found.generation, None)
    mark = MarkFile(beside.directory, old, file, fsync=fsync)
    if beside.mark is not None:
        # From here on the file changes.
        mark.write(database=None)
    if fsync:
        # What an earlier process left in the WAL is folded now; its payloads go to disk first.
        for number in beside.segments:
            sync_file(segment_path(beside.directory / PAYLOADS, number))
    torn = fold_and_measure(connection, beside.path)
    _tell(beside, found, torn)
    if found.version == 0:
        create_tables(connection)
    else:
        migrate(beside.path, connection, found.version)
    generation = 1 + max(found.generation, old.generation)
    set_generation(connection, generation, fsync=fsync)
    (run_id,) = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
    mark.write_digest(
        run_id=run_id,
        step=found.step,
        acknowledged=found.acknowledged,
        generation=generation,
        rewinds=found.rewinds,
    )
    if fsync:
        sync_file(beside.directory)
    return mark


def _tell(beside: Beside, found: Found, torn: int) -> None:
    """Say what is not as it was left, but can be gone on with."""
    mark, notes = beside.mark, []
    if mark is None and found.generation:
        notes.append(f"{MARK} is missing or damaged; nothing tells whether this is the newest copy")
    if mark is not None and found.generation < mark.generation:
        notes.append(
            "the database is older than its mark; what was recorded since is lost, its tasks are asked again"
        )
    if mark is not None and mark.database is not None and beside.changed:
        notes.append(
            "another program has written to the database, or it is damaged where that cannot be seen"
        )
    if torn:
        notes.append(
            f"the last {torn} bytes of the WAL are no whole commit: the process died while it wrote them, "
            "or they are damaged; what they recorded is asked again"
        )
    for note in notes:
        log.warning("journal.changed", path=str(beside.path), step=found.step, note=note)


def set_generation(connection: sqlite3.Connection, generation: int, *, fsync: bool) -> None:
    """Note the generation in the database, in a transaction of its own; the mark is written after it."""
    connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (str(generation),))
