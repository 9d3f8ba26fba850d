"""The journal's writing side: what each record does to the tables and the payload files.

Synchronous and single-threaded. A transaction is `begin`, any number of records, then `commit` or `rollback`;
payloads are written before the rows that refer to them become visible. `commit(sync=True)` returns when all
of it is on disk (payloads first, then the WAL), so that not even a power cut takes it back; without `sync`
it survives the death of the process. Space is given back here: the groups of acknowledged batches beyond
the kept ones are deleted, with every segment that nothing refers to any more.
"""

import json
import sqlite3
import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import structlog

from orchestrator.curriculum import TaskOutcome
from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch, Group
from orchestrator.journal import learned
from orchestrator.journal.directory import DATABASE, DIRECTORY, PAYLOADS, make_private
from orchestrator.journal.opening import open_checked, set_generation
from orchestrator.journal.payloads import DamagedPayloadError, PayloadWriter, Place, parts_of, segments_in
from orchestrator.journal.rows import (
    GROUP_COLUMNS,
    batch_checksum,
    group_row,
    insert_rows,
    shares_of,
    tasks_of,
)

log = structlog.get_logger()

CHECKPOINT_BYTES = 16 * 1024 * 1024
"""Size of the WAL at which it is folded into the database, while that is small."""

_READ_FOR_EACH = 8
"""How many bytes of the database may be read for each byte of the WAL that is folded into it."""

CHECKPOINT = "checkpointed_step"
"""Under which the step is noted that the trainer reported as saved last."""

# As a number, by which an index is: there are as many rows as there were steps.
_ACKNOWLEDGED = "SELECT step FROM batches WHERE kept = 1 AND acknowledged_at IS NOT NULL"


class JournalStore:
    """Applies records to one run directory, which the caller has locked."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_batches: int | None,
        compress: int,
        fsync: bool,
        segment_bytes: int,
    ) -> None:
        directory = run_dir / DIRECTORY
        make_private(directory)
        self._path = directory / DATABASE
        self._wal = directory / f"{DATABASE}-wal"
        self._keep_batches = keep_batches
        """How many acknowledged batches; None for all behind the step that the trainer reported as saved."""
        self._fsync = fsync
        self._connection, self._mark = open_checked(directory, fsync=fsync)
        try:
            # Bytes per segment that rows refer to. A segment that none refers to is an uncommitted rest; one that
            # rows refer to and that is not there has taken its groups along, which `recover` finds out.
            self._live: dict[int, int] = dict.fromkeys(segments_in(directory / PAYLOADS), 0)
            self._lost: set[int] = set()
            for segment, size in self._connection.execute(
                "SELECT segment, sum(bytes) FROM groups GROUP BY segment"
            ).fetchall():
                if segment in self._live:
                    self._live[segment] = size
                else:
                    self._lost.add(segment)
            self._payloads = PayloadWriter(
                directory / PAYLOADS,
                run_id=self._mark.mark.run_id,
                compress=compress,
                segment_bytes=segment_bytes,
                lost=self._lost,
                fsync=fsync,
            )
            self._payloads.step = self._mark.mark.step
            self._give_back()
            # A run that was set back is behind what was reported before; that was another run's checkpoint.
            self._connection.execute(
                "UPDATE meta SET value = (SELECT coalesce(max(step), 0) FROM batches)"
                " WHERE key = ? AND CAST(value AS INTEGER) > (SELECT coalesce(max(step), 0) FROM batches)",
                (CHECKPOINT,),
            )
            (self._checkpoint,) = self._connection.execute(
                "SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM meta WHERE key = ?", (CHECKPOINT,)
            ).fetchone()
            self.kept: tuple[int, int] = self._connection.execute(
                f"SELECT count(DISTINCT step), coalesce(sum(bytes), 0) FROM groups WHERE step IN ({_ACKNOWLEDGED})"  # noqa: S608
            ).fetchone()
            """Acknowledged batches that can be read back, and the bytes of their payloads, as committed."""
        except (OSError, sqlite3.Error) as error:
            self._connection.close()
            self._mark.close()
            raise JournalError(f"{self._path}: cannot be used: {error}") from error
        self._segment_bytes = segment_bytes
        self._new_groups: list[tuple[object, ...]] = []
        self._new_resolved: list[tuple[object, ...]] = []
        self._new_choices: list[tuple[object, ...]] = []
        self._new_learned: list[tuple[object, ...]] = []
        self._counted: Counter[tuple[str, str]] = Counter()
        self._changed: Counter[int] = Counter()
        # The last step formed and acknowledged: in this transaction, and as committed.
        self._ends = self._committed_ends = (self._mark.mark.step, self._mark.mark.acknowledged)
        # What becomes of `kept` and the checkpoint when this transaction is committed.
        self._next_kept, self._next_checkpoint = self.kept, self._checkpoint
        self._now = 0.0
        self._on_disk = False
        """Whether the last commit is."""
        self._fold_at_bytes = self._foldable_bytes()

    def begin(self, *, sync: bool) -> None:
        """Start a transaction; `sync` as its commit will have it."""
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if sync and self._fsync else 'NORMAL'}")
        self._connection.execute("BEGIN IMMEDIATE")
        self._now = time.time()

    def add_group(self, group: Group) -> None:
        place = self._payloads.add(parts_of(group))
        self._new_groups.append(group_row(group, place, self._now))
        self._changed[place.segment] += place.bytes
        self._counted[group.env, "finished"] += 1

    def add_task(self, env: str, position: int, outcome: str) -> None:
        self._new_resolved.append((env, position, outcome))
        self._counted[env, outcome] += 1

    def add_choice(self, env: str, position: int, index: int) -> None:
        self._new_choices.append((env, position, index))

    def add_late(self, env: str, outcome: TaskOutcome | None) -> None:
        self.add_learned(env, outcome)
        self._counted[env, "late"] += 1

    def add_learned(self, env: str, outcome: TaskOutcome | None) -> None:
        if outcome is not None:
            self._new_learned.append((env, *outcome))

    def evict_group(self, group_id: str, env: str, reason: str) -> None:
        self._insert_new()
        for segment, size in self._connection.execute(
            "DELETE FROM groups WHERE id = ? AND step IS NULL RETURNING segment, bytes", (group_id,)
        ).fetchall():
            self._changed[segment] -= size
            self._counted[env, f"evicted: {reason}"] += 1

    def split_group(self, whole: Group, parts: Collection[Group]) -> None:
        """Put the parts of a queued group in its place; one of them has its id."""
        self._insert_new()
        for segment, size in self._connection.execute(
            "DELETE FROM groups WHERE id = ? AND step IS NULL RETURNING segment, bytes", (whole.id,)
        ).fetchall():
            self._changed[segment] -= size
        for part in parts:
            self.add_group(part)
        self._counted[whole.env, "finished"] -= len(parts)
        self._counted[whole.env, "split"] += 1

    def forget_damaged(self, rows: Collection[int]) -> None:
        """Delete queued groups that cannot be read, by their `seq`; their tasks are not resolved, so they are asked again."""
        for seq in rows:
            for env, segment, size in self._connection.execute(
                "DELETE FROM groups WHERE seq = ? AND step IS NULL RETURNING env, segment, bytes", (seq,)
            ).fetchall():
                if segment in self._live:
                    self._changed[segment] -= size
                self._counted[env, "damaged"] += 1

    def add_batch(self, batch: Batch, facts: str | None, states: Mapping[str, str]) -> None:
        """Groups become a batch, which resolves their tasks; `facts` is the record of the step, `states` what held with it."""
        self._insert_new()
        ids = [group.id for group in batch.groups]
        changed = self._connection.execute(
            "UPDATE groups SET step = ?, slot = chosen.key FROM json_each(?) AS chosen"
            " WHERE groups.id = chosen.value AND groups.step IS NULL",
            (batch.step, json.dumps(ids)),
        ).rowcount
        if changed != len(batch.groups):
            raise JournalError(
                f"batch {batch.step}: {len(batch.groups) - changed} of its groups are not recorded, or are in a batch already"
            )
        for group in batch.groups:
            self._counted[group.env, "batched"] += 1
            self._new_resolved.append((group.env, group.task.position, "trained"))
        self._ends = (batch.step, self._ends[1])
        shares = shares_of(batch)
        sequences = batch.size
        reward = sum(share["reward"] * share["sequences"] for share in shares.values()) / max(sequences, 1)
        tokens = sum(len(group.tokens) for group in batch.groups)
        self._connection.execute(
            "INSERT INTO batches (step, version, groups, sequences, tokens, reward, envs, formed_at, row_checksum, facts,"
            " tasks, states, learned) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                batch.step,
                batch.version,
                len(batch.groups),
                sequences,
                tokens,
                reward,
                json.dumps(shares),
                self._now,
                batch_checksum(batch.step, batch.version, ids),
                facts,
                json.dumps(tasks_of(batch)),
                zlib.compress(json.dumps(states).encode()) if states else None,
                self._take_learned(),
            ),
        )
        self.set_states(states)

    def _take_learned(self) -> bytes | None:
        """What was learned about tasks since the last batch: from now on it belongs to this one."""
        query = f"SELECT {learned.COLUMNS} FROM learned ORDER BY id"  # noqa: S608  # names of columns
        rows = self._connection.execute(query).fetchall()
        self._connection.execute("DELETE FROM learned")
        return learned.pack(learned.arrays_of(rows))

    def add_ack(self, step: int, rank: int, world_size: int) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO acks VALUES (?, ?, ?, ?)", (step, rank, world_size, self._now)
        )

    def acknowledge(self, step: int) -> None:
        """Every rank has acknowledged the batch: give back the groups of those beyond the kept ones."""
        new = self._connection.execute(
            "UPDATE batches SET acknowledged_at = ? WHERE step = ? AND acknowledged_at IS NULL",
            (self._now, step),
        ).rowcount
        self._ends = (self._ends[0], max(step, self._ends[1]))
        (size,) = self._connection.execute(
            "SELECT coalesce(sum(bytes), 0) FROM groups WHERE step = ?", (step,)
        ).fetchone()
        self._next_kept = (self._next_kept[0] + new, self._next_kept[1] + new * size)
        self._trim()

    def set_checkpoint(self, step: int) -> None:
        """The trainer can go on from behind a step."""
        if step > self._next_checkpoint:
            self._next_checkpoint = step
            self.set_meta(CHECKPOINT, str(step))
            self._trim()

    def _trim(self) -> None:
        """Give back the groups of acknowledged batches beyond those that are kept."""
        if self._keep_batches is None:
            bound, value = "AND step <= ?", self._next_checkpoint
        else:
            bound, value = "ORDER BY step DESC LIMIT -1 OFFSET ?", self._keep_batches
        for (old,) in self._connection.execute(f"{_ACKNOWLEDGED} {bound}", (value,)).fetchall():
            for segment, size in self._connection.execute(
                "SELECT segment, sum(bytes) FROM groups WHERE step = ? GROUP BY segment", (old,)
            ).fetchall():
                self._changed[segment] -= size
                self._next_kept = (self._next_kept[0], self._next_kept[1] - size)
            self._next_kept = (self._next_kept[0] - 1, self._next_kept[1])
            self._connection.execute("DELETE FROM groups WHERE step = ?", (old,))
            self._connection.execute("DELETE FROM acks WHERE step = ?", (old,))
            self._connection.execute("UPDATE batches SET kept = 0 WHERE step = ?", (old,))

    def prune(self, env: str, low: int) -> None:
        """Everything of an env below `low` is resolved: one number says so instead of a row each."""
        self._insert_new()
        self._connection.execute(
            "INSERT INTO low_water VALUES (?, ?) ON CONFLICT DO UPDATE SET position = max(position, excluded.position)",
            (env, low),
        )
        for table in ("resolved", "choices"):
            self._connection.execute(f"DELETE FROM {table} WHERE env = ? AND position < ?", (env, low))  # noqa: S608

    def set_states(self, states: Mapping[str, str]) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?)",
            [(key, value, self._now) for key, value in states.items()],
        )

    def add_version(self, version: int, step: int, path: str | None) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?)", (version, step, path, self._now)
        )

    def forget_version(self, version: int) -> None:
        self._connection.execute("DELETE FROM versions WHERE version = ?", (version,))

    def add_report(self, step: int, data: str) -> None:
        self._connection.execute(
            "INSERT INTO reports VALUES (?, ?) ON CONFLICT DO UPDATE SET data = json_patch(data, excluded.data)",
            (step, data),
        )

    def set_meta(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def add_eval(self, data: dict[str, Any], encoded: str) -> None:
        self._connection.execute(
            "INSERT INTO evals (env, step, version, at, data) VALUES (?, ?, ?, ?, ?)",
            (data.get("env"), data.get("step"), data.get("version"), self._now, encoded),
        )

    def add_control(self, at: float, origin: str, command: str) -> None:
        self._connection.execute(
            "INSERT INTO control (at, origin, command) VALUES (?, ?, ?)", (at, origin, command)
        )

    def commit(self, *, sync: bool) -> None:
        """End the transaction; see the module's docstring for what `sync` promises."""
        self._payloads.write()
        self._insert_new()
        for (env, what), n in self._counted.items():
            self._connection.execute(
                "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n",
                (env, what, n),
            )
        if sync and self._fsync:
            self._payloads.sync()
        self._connection.execute("COMMIT")
        self._payloads.keep()
        self._committed_ends = self._ends
        self.kept, self._checkpoint = self._next_kept, self._next_checkpoint
        if sync or not self._fsync:
            self._payloads.step = self._ends[0]
        for segment in self._changed.keys() - self._lost:
            self._live[segment] = self._live.get(segment, 0) + self._changed[segment]
        self._clear()
        self._on_disk = sync or not self._fsync

    def rollback(self) -> None:
        """Undo the transaction, on disk too."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._payloads.discard()
        self._next_kept, self._next_checkpoint = self.kept, self._checkpoint
        self._clear()

    def tidy(self, *, force: bool = False) -> None:
        """Between transactions: mark a new batch, give back segments, move the last payloads out of old segments, fold a long WAL."""
        step, acknowledged = self._committed_ends
        if step > self._mark.mark.step:
            # A batch's commit was brought to disk, and everything before it too.
            self._mark.write(step=step, acknowledged=acknowledged)
        if self._on_disk:
            # Only now: what says that nothing refers to a segment must be on disk before the segment goes. And not in the
            # commit, which would seem to have failed where a segment cannot go.
            self._give_back()
        self._compact()
        if force or self._wal_bytes() > self._fold_at_bytes:
            self._fold(last=force)

    def _fold(self, *, last: bool) -> None:
        """Fold the WAL into the database, which makes the last rows durable and changes the file."""
        # The payloads that they refer to go to disk first.
        if self._fsync:
            self._payloads.sync()
        self._mark.write(database=None)
        # TRUNCATE leaves an empty WAL: whatever is torn off a later one, the rest is a consistent prefix.
        # Somebody who reads meanwhile prevents it; then the WAL grows and this is tried again, without waiting.
        self._connection.execute("PRAGMA busy_timeout = 0")
        busy, *_ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._connection.execute("PRAGMA busy_timeout = 5000")
        self._fold_at_bytes = self._foldable_bytes() + (self._wal_bytes() if busy else 0)
        generation = self._mark.mark.generation
        if not last:
            # So that there is always something in the WAL that would be missed if the file were lost.
            generation += 1
            set_generation(self._connection, generation, fsync=self._fsync)
        self._mark.write_digest(generation=generation)
        self._give_back()

    def _compact(self) -> None:
        """Rewrite what is left in the oldest segment when most of the disk space holds nothing that is needed.

        A group that waits for long would keep its whole segment otherwise.
        """
        if len(self._live) < 4:
            return
        current = self._payloads.segment
        sizes = {segment: self._payloads.size_of(segment) for segment in self._live if segment != current}
        if sum(sizes.values()) <= 4 * sum(self._live.values()) + 2 * self._segment_bytes:
            return
        oldest = min(sizes, key=lambda segment: self._live[segment] / max(sizes[segment], 1))
        self.begin(sync=True)
        try:
            for seq, step, acknowledged, *numbers in self._connection.execute(
                f"SELECT seq, step, step IN ({_ACKNOWLEDGED}), segment, offset, bytes, codec, checksum FROM groups"  # noqa: S608
                " WHERE segment = ?",
                (oldest,),
            ).fetchall():
                place = Place(*numbers)
                try:
                    new = self._payloads.move(place)
                except DamagedPayloadError as error:
                    if not acknowledged:
                        raise
                    # As at a start: nobody needs it who has not had it already.
                    log.warning("journal.batch_lost", step=step, note=str(error))
                    # A number whatever a damaged row holds, as `sum` has counted it.
                    (size,) = self._connection.execute(
                        "DELETE FROM groups WHERE seq = ? RETURNING bytes + 0", (seq,)
                    ).fetchone()
                    self._changed[oldest] -= size
                    self._next_kept = (self._next_kept[0], self._next_kept[1] - size)
                    continue
                self._connection.execute(
                    "UPDATE groups SET segment = ?, offset = ? WHERE seq = ?", (new.segment, new.offset, seq)
                )
                self._changed[oldest] -= new.bytes
                self._changed[new.segment] += new.bytes
            self.commit(sync=True)
        except BaseException:
            self.rollback()
            raise
        self._give_back()

    def _insert_new(self) -> None:
        """Insert the rows that have gathered, many with one statement: each statement waits for the interpreter."""
        insert_rows(self._connection, f"INSERT INTO groups ({GROUP_COLUMNS})", self._new_groups)
        insert_rows(
            self._connection, "INSERT OR IGNORE INTO resolved (env, position, outcome)", self._new_resolved
        )
        insert_rows(
            self._connection, "INSERT OR REPLACE INTO choices (env, position, task_index)", self._new_choices
        )
        insert_rows(self._connection, f"INSERT INTO learned ({learned.COLUMNS})", self._new_learned)

    def _give_back(self) -> None:
        for segment in [segment for segment, live in self._live.items() if live <= 0]:
            if segment != self._payloads.segment or not self._payloads.open:
                del self._live[segment]
                self._payloads.give_back(segment)

    def close(self) -> None:
        try:
            self._connection.close()
            self._mark.close()
        finally:
            self._payloads.close()

    def _wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    def _foldable_bytes(self) -> int:
        """How long a WAL is folded. All of the database is read then, for its digest: so the larger it is, the longer."""
        return max(CHECKPOINT_BYTES, self._path.stat().st_size // _READ_FOR_EACH)

    def _clear(self) -> None:
        self._new_groups.clear()
        self._new_resolved.clear()
        self._new_choices.clear()
        self._new_learned.clear()
        self._counted.clear()
        self._changed.clear()
        self._ends = self._committed_ends
