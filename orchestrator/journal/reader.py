"""Reading a journal: what a restart recovers, and what people look at while or after a run.

Owns a connection that can change nothing, so it may be used beside a running orchestrator. Whatever the files hold, what
is returned is what was recorded: a queued group that cannot be read, or whose row has changed, is reported as damaged
(a power cut can do that); a batch that somebody still needs and anything else that makes no sense is a JournalError.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import structlog

from orchestrator.curriculum import Outcomes
from orchestrator.errors import JournalError
from orchestrator.facts import StepRecord
from orchestrator.facts.facts import HISTORY
from orchestrator.groups.group import Batch, Group
from orchestrator.journal.directory import DATABASE, DIRECTORY, PAYLOADS
from orchestrator.journal.learned import COLUMNS as LEARNED_COLUMNS
from orchestrator.journal.learned import arrays_of, unpack
from orchestrator.journal.payloads import DamagedPayloadError, Place, group_from, read_payload
from orchestrator.journal.rows import batch_checksum, group_checksum
from orchestrator.journal.schema import check_readable, open_for_reading
from orchestrator.tasks.task import TrainTask

log = structlog.get_logger()

_step_decoder = msgspec.json.Decoder(StepRecord)


@dataclass(frozen=True, slots=True)
class Recovered:
    """All that a restart needs.

    `groups` are finished and in no batch, in the order in which they were recorded. `batches` are formed and not
    acknowledged by every rank, plus the kept acknowledged ones, in step order; `acknowledged` names the steps
    of the latter, `acks` the ranks that acknowledged each of the former. `resolved` has, per env, the position
    below which everything is resolved, and the resolved positions above it. The positions of `groups` are not
    among them, unless another part of the group is in a batch: who recovers holds them until they are in a batch, or
    are evicted and asked again. `chosen` has, per env, the tasks that a curriculum chose, by position; `learned` what
    groups said about their tasks. `damaged` names groups that are lost, `damaged_rows` has their rows: nobody holds
    their positions, so they are asked again.
    """

    groups: list[Group] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    acknowledged: frozenset[int] = frozenset()
    acks: dict[int, frozenset[int]] = field(default_factory=dict)
    resolved: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    chosen: dict[str, dict[int, int]] = field(default_factory=dict)
    learned: dict[str, Outcomes] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    last_step: int = 0
    last_acknowledged: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    damaged_rows: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether the run had not got anywhere yet."""
        return not (self.groups or self.last_step or self.resolved or self.state or self.chosen)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One row of the `groups` table, without its payload."""

    task: TrainTask
    place: Place
    seq: int
    version: int
    version_end: int
    rollouts: int
    sequences: int
    tokens: int
    reward: float
    finished_at: float
    step: int | None
    transcript_bytes: int
    part: int
    id: str
    row_checksum: int
    details_bytes: int
    digest: int

    COLUMNS: ClassVar[str] = (
        "env, split, task_index, epoch, position, segment, offset, bytes, codec, checksum, seq, version, version_end,"
        " rollouts, sequences, tokens, reward, finished_at, step, transcript_bytes, part, id, row_checksum,"
        " details_bytes, digest"
    )

    @classmethod
    def from_sql(cls, row: tuple[Any, ...]) -> "GroupRow":
        """A row selected with COLUMNS."""
        return cls(TrainTask(*row[:5]), Place(*row[5:10]), *row[10:])

    @property
    def intact(self) -> bool:
        """Whether the row still says what was recorded."""
        task, place = self.task, self.place
        named = (self.id, task.env, task.split, task.position, self.part, task.index, task.epoch)
        held = (self.version, self.version_end, self.rollouts, self.sequences, self.tokens)
        sizes = (place.bytes, self.details_bytes, self.transcript_bytes)
        stored = (*sizes, place.codec, place.checksum, self.digest)
        return group_checksum((*named, *held, *stored)) == self.row_checksum


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One row of the `batches` table; `envs` has groups, sequences, tokens and mean reward per env."""

    step: int
    version: int
    groups: int
    sequences: int
    tokens: int
    reward: float
    formed_at: float
    acknowledged_at: float | None
    kept: bool
    envs: dict[str, dict[str, float]]


class JournalReader:
    """Looks into the journal of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / DIRECTORY / DATABASE
        self._payloads = run_dir / DIRECTORY / PAYLOADS
        if not self._path.is_file():
            raise JournalError(f"{self._path}: there is no journal here; is this the run_dir of a run?")
        try:
            self._connection = open_for_reading(self._path)
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: cannot be read: {error}") from error
        try:
            check_readable(self._path, self._connection)
        except sqlite3.Error as error:
            self.close()
            raise JournalError(f"{self._path}: cannot be read: {error}") from error
        except JournalError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def meta(self) -> dict[str, str]:
        """What was noted about the run: its id, its generation, what the service added."""
        return dict(self._rows("SELECT key, value FROM meta"))

    def states(self) -> dict[str, Any]:
        """The latest value of every recorded state."""
        return {key: self._json(value) for key, value in self._rows("SELECT key, value FROM states")}

    def counters(self) -> dict[str, dict[str, int]]:
        """Per env, how many groups and tasks ended how."""
        counters: dict[str, dict[str, int]] = {}
        for env, what, n in self._rows("SELECT env, what, n FROM counters ORDER BY env, what"):
            counters.setdefault(env, {})[what] = n
        return counters

    def batches(self, *, last: int | None = None) -> list[BatchRow]:
        """The batches formed so far in step order, or the last few of them."""
        rows = self._rows(
            "SELECT step, version, groups, sequences, tokens, reward, formed_at, acknowledged_at, kept, envs"
            " FROM batches ORDER BY step DESC LIMIT ?",
            -1 if last is None else last,
        )
        columns: list[tuple[Any, ...]] = [(*row[:8], bool(row[8]), self._json(row[9])) for row in rows]
        return [BatchRow(*row) for row in reversed(columns)]

    def steps(self, *, since: int = 0, last: int | None = None) -> list[StepRecord]:
        """Records of the steps after `since` in order, or the last few of them; batches of older schemas have none."""
        rows = self._rows(
            "SELECT facts, formed_at, acknowledged_at, reports.data FROM batches LEFT JOIN reports USING (step)"
            " WHERE step > ? AND facts IS NOT NULL ORDER BY step DESC LIMIT ?",
            since,
            -1 if last is None else last,
        )
        return [self._step(*row) for row in reversed(rows)]

    def _step(
        self, facts: str, formed_at: float, acknowledged_at: float | None, report: str | None
    ) -> StepRecord:
        try:
            record = _step_decoder.decode(facts)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise JournalError(f"{self._path}: cannot be read: {error} in {facts!r:.80}") from error
        record.at, record.acknowledged_at = formed_at, acknowledged_at
        record.trainer = {} if report is None else self._json(report)
        return record

    def evals(self, *, since: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        """Recorded evaluations behind the first `since`, oldest first, or the last few of them."""
        # Counted, because a run that was set back has gaps in the ids.
        rows = self._rows(
            "SELECT data, at FROM (SELECT id, data, at FROM evals ORDER BY id LIMIT -1 OFFSET ?) ORDER BY id DESC LIMIT ?",
            since,
            -1 if last is None else last,
        )
        return [{**self._json(data), "at": at} for data, at in rows][::-1]

    def controls(self) -> list[dict[str, Any]]:
        """What people changed while the run went on, oldest first: when, from where, and the command."""
        rows = self._rows("SELECT at, origin, command FROM control ORDER BY id")
        return [{"at": at, "origin": origin, "command": self._json(text)} for at, origin, text in rows]

    def learned(self) -> dict[str, Outcomes]:
        """Per env, what groups said about their tasks, in the order of recording; a batch of which it cannot be read is left out."""
        parts: dict[str, list[Outcomes]] = {}
        query = "SELECT step, learned FROM batches WHERE learned IS NOT NULL ORDER BY step"
        for step, blob in self._rows(query):
            try:
                found = unpack(blob)
            except (zlib.error, msgspec.DecodeError, ValueError, TypeError) as error:
                # Statistics choose tasks and prove nothing: a run goes on with a few less.
                note = f"{error}; the statistics of tasks are without what the groups of this step taught"
                log.warning("journal.learned_lost", step=step, note=note)
                continue
            for env, rows in found.items():
                parts.setdefault(env, []).append(rows)
        query = f"SELECT {LEARNED_COLUMNS} FROM learned ORDER BY id"  # noqa: S608  # names of columns
        for env, rows in arrays_of(self._rows(query)).items():
            parts.setdefault(env, []).append(rows)
        return {env: np.concatenate(several) for env, several in parts.items()}

    def group_rows(
        self,
        *,
        env: str | None = None,
        step: int | None = None,
        queued: bool = False,
        ids: Sequence[str] | None = None,
    ) -> Iterator[GroupRow]:
        """Recorded groups that still have their payload, without reading it."""
        conditions, arguments = ["1"], list[object]()
        if env is not None:
            conditions.append("env = ?")
            arguments.append(env)
        if step is not None:
            conditions.append("step = ?")
            arguments.append(step)
        if queued:
            conditions.append("step IS NULL")
        if ids is not None:
            conditions.append(f"id IN ({', '.join('?' * len(ids))})")
            arguments += ids
        order = "step, slot, seq" if step is not None else "seq"
        # Only the fixed texts above are joined; values are bound.
        query = f"SELECT {GroupRow.COLUMNS} FROM groups WHERE {' AND '.join(conditions)} ORDER BY {order}"  # noqa: S608
        for row in self._rows(query, *arguments):
            yield GroupRow.from_sql(row)

    def group(self, row: GroupRow) -> Group:
        """A group with its arrays and transcript; raises DamagedPayloadError."""
        try:
            return self._group(row)
        except DamagedPayloadError:
            # A running orchestrator may have moved it since the row was read.
            found = next(self.group_rows(ids=[row.id]), row)
            if found.seq != row.seq or found.place == row.place:
                raise
        return self.group(found)

    def _group(self, row: GroupRow) -> Group:
        if not row.intact:
            raise DamagedPayloadError(f"the row of {row.id!r} is not what was recorded")
        payload = read_payload(self._payloads, row.place)
        try:
            return group_from(
                payload,
                row.task,
                version=row.version,
                version_end=row.version_end,
                rollouts=row.rollouts,
                sequences=row.sequences,
                tokens=row.tokens,
                codec=row.place.codec,
                details_bytes=row.details_bytes,
                digest=row.digest,
                transcript_bytes=row.transcript_bytes,
                part=row.part,
            )
        except ValueError as error:
            raise DamagedPayloadError(f"the payload of {row.id!r} has another size: {error}") from error

    def groups(self, *, env: str | None = None, step: int | None = None) -> Iterator[Group]:
        """Recorded groups with their transcripts, oldest first; those that a running orchestrator gives back are left out."""
        for row in self.group_rows(env=env, step=step):
            try:
                yield self.group(row)
            except DamagedPayloadError:
                continue

    def batch(self, step: int) -> Batch | None:
        """A formed batch whose groups are still kept, the same as it was formed; None when there is none."""
        found = self._rows("SELECT version, groups, row_checksum FROM batches WHERE step = ? AND kept", step)
        if not found:
            return None
        version, count, row_checksum = found[0]
        try:
            groups = tuple(self.group(row) for row in self.group_rows(step=step))
        except DamagedPayloadError as error:
            raise JournalError(f"{self._path}: batch {step} cannot be read: {error}") from error
        if len(groups) != count:
            raise JournalError(f"{self._path}: batch {step} has {len(groups)} of its {count} groups")
        if batch_checksum(step, version, [group.id for group in groups]) != row_checksum:
            raise JournalError(f"{self._path}: batch {step} cannot be read: its row is not what was recorded")
        return Batch(step, version, groups)

    def recover(self, *, world_size: int | None = None, again: int | None = None) -> Recovered:
        """What a restart needs; acknowledgements given under another world size do not count.

        Of the acknowledged batches the last `again` are read, all by default; whatever is kept can be read by `batch`.
        """
        groups, damaged = list[Group](), list[GroupRow]()
        for row in self.group_rows(queued=True):
            try:
                groups.append(self.group(row))
            except DamagedPayloadError as error:
                damaged.append(row)
                log.warning("journal.group_lost", group=row.id, note=f"{error}; its task is asked again")
        kept = self._kept()
        old = [step for step, acknowledged in kept if acknowledged]
        unread = set() if again is None else set(old[: max(0, len(old) - again)])
        batches = [
            batch
            for step, acknowledged in kept
            if step not in unread and (batch := self._kept_batch(step, acknowledged)) is not None
        ]
        (last_step, last_acknowledged), *_ = self._rows(
            "SELECT coalesce(max(step), 0), coalesce(max(step) FILTER (WHERE acknowledged_at IS NOT NULL), 0) FROM batches"
        )
        return Recovered(
            groups=groups,
            batches=batches,
            acknowledged=frozenset(step for step, acknowledged in kept if acknowledged),
            acks=self._acks(world_size),
            resolved=self._resolved(),
            chosen=self._chosen(),
            learned=self.learned(),
            state=self.states(),
            last_step=last_step,
            last_acknowledged=last_acknowledged,
            steps=self.steps(last=HISTORY),
            damaged=[str(row.id) for row in damaged],
            damaged_rows=[row.seq for row in damaged],
        )

    def _kept(self) -> list[tuple[int, bool]]:
        """The steps whose groups are there, and whether each is acknowledged; every step has a row."""
        (count, first, last, given_back), *_ = self._rows(
            "SELECT count(*), min(step), max(step), count(*) FILTER (WHERE NOT kept AND acknowledged_at IS NULL) FROM batches"
        )
        if count and (first, last) != (1, count):
            raise JournalError(
                f"{self._path}: has {count} batches of the steps {first} to {last}; some are lost"
            )
        if given_back:
            raise JournalError(f"{self._path}: {given_back} batches are given back, but not acknowledged")
        rows = self._rows(
            "SELECT step, acknowledged_at IS NOT NULL FROM batches WHERE kept = 1 ORDER BY step"
        )
        return [(step, bool(acknowledged)) for step, acknowledged in rows]

    def _kept_batch(self, step: int, acknowledged: bool) -> Batch | None:
        try:
            return self.batch(step)
        except JournalError as error:
            # Nobody needs it who has not had it already.
            if acknowledged:
                log.warning("journal.batch_lost", step=step, note=str(error))
                return None
            raise

    def _acks(self, world_size: int | None) -> dict[int, frozenset[int]]:
        acks: dict[int, set[int]] = {}
        for step, rank, size in self._rows(
            "SELECT step, rank, world_size FROM acks JOIN batches USING (step) WHERE acknowledged_at IS NULL"
        ):
            if world_size is None or size == world_size:
                acks.setdefault(step, set()).add(rank)
        return {step: frozenset(ranks) for step, ranks in acks.items()}

    def _resolved(self) -> dict[str, tuple[int, list[int]]]:
        resolved: dict[str, tuple[int, list[int]]] = {}
        for env, position in self._rows("SELECT env, position FROM low_water"):
            resolved[env] = (self._position(position), [])
        for env, position in self._rows("SELECT env, position FROM resolved ORDER BY env, position"):
            resolved.setdefault(env, (0, []))[1].append(self._position(position))
        return resolved

    def _chosen(self) -> dict[str, dict[int, int]]:
        chosen: dict[str, dict[int, int]] = {}
        for env, position, index in self._rows("SELECT env, position, task_index FROM choices"):
            chosen.setdefault(env, {})[self._position(position)] = self._position(index)
        return chosen

    def _position(self, position: object) -> int:
        if not isinstance(position, int) or position < 0:
            raise JournalError(f"{self._path}: cannot be read: {position!r} is no position of a task")
        return position

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise JournalError(f"{self._path}: cannot be read: {error} in {text!r:.80}") from error

    def _rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        # All at once: a read that stays open would keep a running orchestrator from folding its WAL.
        try:
            return self._connection.execute(query, arguments).fetchall()
        except (sqlite3.Error, OverflowError) as error:
            raise JournalError(f"{self._path}: cannot be read: {error}") from error
