"""The journal's disk space: given back as batches are acknowledged, and a full disk loses nothing."""

import asyncio
import errno
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch, Group
from orchestrator.journal import journal as journals
from orchestrator.journal import store as stores
from orchestrator.journal.mark import DatabaseFile
from orchestrator.journal.reader import JournalReader
from orchestrator.journal.stage import BLOCK_BYTES
from orchestrator.journal.store import JournalStore
from tests.support.journal_groups import all_facts, facts, make_batch, make_group
from tests.support.journal_opening import open_journal, open_store

SEGMENT_BYTES = 8 * 1024


def make_store(run_dir: Path, keep_batches: int | None = 2) -> JournalStore:
    return open_store(run_dir, keep_batches=keep_batches, segment_bytes=SEGMENT_BYTES, fsync=False)


def payload_bytes(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / "journal" / "payloads").iterdir())


def run_steps(store: JournalStore, first: int, last: int, groups: int = 4) -> None:
    """Record, form and acknowledge batches, one transaction each."""
    for step in range(first, last + 1):
        batch = make_batch(step, groups)
        store.begin(sync=False)
        for group in batch.groups:
            store.add_group(group)
        store.add_batch(batch, None, {})
        store.add_ack(step, 0, 1)
        store.acknowledge(step)
        store.prune("math", step * groups)
        store.commit(sync=False)
        store.tidy()


def test_the_files_do_not_grow_with_the_run(tmp_path: Path) -> None:
    """After many steps the payloads take no more than after a few, and the tables hold the kept groups only."""
    store = make_store(tmp_path)
    run_steps(store, 1, 20)
    early = payload_bytes(tmp_path)
    run_steps(store, 21, 300)
    store.tidy(force=True)
    assert payload_bytes(tmp_path) <= early + 2 * SEGMENT_BYTES
    assert (tmp_path / "journal" / "journal.sqlite3").stat().st_size < 400_000
    with JournalReader(tmp_path) as reader:
        assert len(list(reader.group_rows())) == 8
        assert reader.recover().resolved == {"math": (1200, [])}
        assert len(reader.batches()) == 300
    store.close()


class Counting(sqlite3.Connection):
    """Counts the steps of SQLite's machine, which are the same on every computer."""

    steps = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_progress_handler(self._count, 1)

    def _count(self) -> int:
        Counting.steps += 1
        return 0


def test_a_step_costs_no_more_late_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is looked up for it is found without going through all the steps before."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Counting))
    store = make_store(tmp_path)
    took = []
    for step in range(1, 401):
        Counting.steps = 0
        run_steps(store, step, step)
        took.append(Counting.steps)
    assert sum(took[-20:]) < 1.1 * sum(took[20:40])
    store.close()


def test_looking_the_database_over_costs_no_more_than_writing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is taken whenever the WAL is folded into it: the more seldom, the larger it is."""
    monkeypatch.setattr(stores, "CHECKPOINT_BYTES", 64 * 1024)
    database, wal = (tmp_path / "journal" / f"journal.sqlite3{end}" for end in ("", "-wal"))
    read = []
    digest = DatabaseFile.digest

    def counted(file: DatabaseFile) -> str:
        read.append(database.stat().st_size)
        return digest(file)

    monkeypatch.setattr(DatabaseFile, "digest", counted)
    store = make_store(tmp_path)
    folded = 0
    read.clear()
    states = {"large": "".join(f"{number} " for number in range(2000))}
    for step in range(1, 501):
        batch = make_batch(step, 1)
        store.begin(sync=False)
        store.add_group(batch.groups[0])
        store.add_batch(batch, None, states)
        store.acknowledge(step)
        store.commit(sync=False)
        before, size = len(read), wal.stat().st_size
        store.tidy()
        folded += size if len(read) > before else 0
    assert len(read) > 10
    assert read[-1] > 8 * stores.CHECKPOINT_BYTES
    assert sum(read) < 9 * folded
    store.close()


def test_a_group_that_waits_for_long_does_not_keep_its_segment(tmp_path: Path) -> None:
    """What is left of old segments is moved together, and is still whole."""
    store = make_store(tmp_path)
    waiting = [make_group(position, "slow") for position in range(12)]
    for number, group in enumerate(waiting):
        store.begin(sync=False)
        store.add_group(group)
        store.commit(sync=False)
        run_steps(store, 1 + 20 * number, 20 * (number + 1))
    live = sum(len(group.tokens) * 9 + group.facts.nbytes + len(group.details) + 200 for group in waiting)
    assert payload_bytes(tmp_path) < 4 * live + 8 * (SEGMENT_BYTES + BLOCK_BYTES)
    with JournalReader(tmp_path) as reader:
        assert [all_facts(group) for group in reader.recover().groups] == [
            all_facts(group) for group in waiting
        ]
    store.close()


def test_a_group_that_is_moved_while_somebody_reads_is_read_where_it_is(tmp_path: Path) -> None:
    """Its row was read before; a batch that a trainer asks for again is among what may be moved."""
    store = make_store(tmp_path, None)
    first = make_batch(1)
    others = [make_group(500 + number) for number in range(30)]
    store.begin(sync=False)
    for group in [*first.groups, *others]:
        store.add_group(group)
    store.add_batch(first, None, {})
    store.commit(sync=False)
    reader = JournalReader(tmp_path)
    rows = list(reader.group_rows(step=1))
    store.begin(sync=False)
    for group in others:
        store.evict_group(group.id, group.env, "stale")
    store.commit(sync=False)
    for number in range(12):
        several = [make_group(1000 + 20 * number + other) for other in range(20)]
        store.begin(sync=False)
        for group in several:
            store.add_group(group)
        for group in several[1:]:
            store.evict_group(group.id, group.env, "stale")
        store.commit(sync=False)
        store.tidy()
    moved = list(reader.group_rows(step=1))
    assert all(row.place.segment != now.place.segment for row, now in zip(rows, moved, strict=True))
    assert [all_facts(reader.group(row)) for row in rows] == [all_facts(group) for group in first.groups]
    reader.close()
    store.close()


def test_a_damaged_batch_that_nobody_needs_does_not_keep_its_segment_or_end_the_run(tmp_path: Path) -> None:
    """It is given up when what is left of its segment is moved."""

    def change(
        recorded: Iterable[Group] = (), evicted: Iterable[Group] = (), batch: Batch | None = None
    ) -> None:
        store.begin(sync=True)
        for group in recorded:
            store.add_group(group)
        for group in evicted:
            store.evict_group(group.id, group.env, "stale")
        if batch is not None:
            store.add_batch(batch, None, {})
            store.acknowledge(batch.step)
        store.commit(sync=True)
        store.tidy()

    store = open_store(tmp_path, segment_bytes=SEGMENT_BYTES)
    batch, others = make_batch(1), [make_group(500 + number) for number in range(30)]
    change([*batch.groups, *others], others[1:], batch)
    with JournalReader(tmp_path) as reader:
        place = next(reader.group_rows(step=1)).place
    segment = tmp_path / "journal" / "payloads" / f"{place.segment:08d}.bin"
    with segment.open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.bytes))
    for number in range(12):
        several = [make_group(1000 + 20 * number + other) for other in range(20)]
        change(several)
        change([], several[1:])
    assert not segment.exists()
    assert store.kept[0] == 1
    with JournalReader(tmp_path) as reader:
        recovered = reader.recover()
        assert recovered.batches == []
        assert recovered.damaged == []
        assert len(recovered.groups) == 13
    store.close()


def test_payloads_that_no_row_refers_to_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    """A process killed between writing payloads and committing leaves no litter for ever."""
    store = make_store(tmp_path)
    run_steps(store, 1, 2)
    store.close()
    orphan = tmp_path / "journal" / "payloads" / "00000099.bin"
    orphan.write_bytes(b"x" * 1000)
    make_store(tmp_path).close()
    assert not orphan.exists()


def open_below(directory: Path) -> int:
    """How many files of a directory this process has open."""
    return sum(link.resolve().is_relative_to(directory) for link in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("fsync", [True, False])
def test_files_that_are_full_are_not_kept_open(tmp_path: Path, fsync: bool) -> None:
    """However much a run writes, it has as many files open as at its start."""
    store = open_store(tmp_path, segment_bytes=SEGMENT_BYTES, fsync=fsync)
    counts = set()
    for step in range(1, 41):
        batch = make_batch(step, 8)
        store.begin(sync=True)
        for group in batch.groups:
            store.add_group(group)
        store.add_batch(batch, None, {})
        store.acknowledge(step)
        store.commit(sync=True)
        store.tidy()
        counts.add(open_below(tmp_path))
    assert max(counts) <= min(counts) + 1
    store.close()


def leave_little_in_many_files(run_dir: Path) -> None:
    """Twelve queued groups, each in a segment of which nothing else is needed: the next process moves them together."""
    store = open_store(run_dir, segment_bytes=SEGMENT_BYTES, keep_batches=0)
    for step in range(1, 13):
        batch = make_batch(step, 8)
        store.begin(sync=True)
        for group in [make_group(1000 + step), *batch.groups]:
            store.add_group(group)
        store.add_batch(batch, None, {})
        store.acknowledge(step)
        store.commit(sync=True)
    store.close()


def refuse(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_payload_file_that_cannot_be_begun_is_not_written_to_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that it had is another file's by then; what comes last is recorded all the same."""
    monkeypatch.setattr(journals, "SEGMENT_BYTES", SEGMENT_BYTES)
    leave_little_in_many_files(tmp_path)
    failed = asyncio.Event()
    journal = open_journal(tmp_path, on_error=lambda error: failed.set())
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        # What is left in old files is about to be moved together.
        journal.record_task("math", 2000, "equal_rewards")
        await failed.wait()
    others = [(tmp_path / str(number)).open("wb") for number in range(5)]
    journal.record_states({"mix": {"step": 12}})
    await journal.aclose()
    assert [os.fstat(other.fileno()).st_size for other in others] == [0] * 5
    for other in others:
        other.close()
    with JournalReader(tmp_path) as reader:
        assert reader.states() == {"mix": {"step": 12}}
        assert len(reader.recover().groups) == 12


async def test_a_move_that_fails_by_whatever_it_is_ends_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move is undone; what comes after it is recorded when the journal is closed."""
    monkeypatch.setattr(journals, "SEGMENT_BYTES", SEGMENT_BYTES)
    leave_little_in_many_files(tmp_path)

    def exhaust(*_: Any) -> int:
        raise MemoryError

    failed = asyncio.Event()
    journal = open_journal(tmp_path, on_error=lambda error: failed.set())
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", exhaust)
        # What is left in old files is about to be moved together.
        journal.record_task("math", 2000, "equal_rewards")
        await failed.wait()
    with pytest.raises(JournalError, match="MemoryError"):
        await journal.flush()
    journal.record_states({"mix": {"step": 12}})
    await journal.aclose()
    with JournalReader(tmp_path) as reader:
        assert reader.states() == {"mix": {"step": 12}}
        assert len(reader.recover().groups) == 12


async def test_a_payload_file_that_cannot_be_given_back_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded with it is committed, and what comes after it is recorded when the journal is closed."""
    monkeypatch.setattr(journals, "SEGMENT_BYTES", SEGMENT_BYTES)
    failed, durable = asyncio.Event(), asyncio.Event()
    journal = open_journal(tmp_path, keep_batches=0, on_error=lambda error: failed.set())
    for step in range(1, 4):
        batch = make_batch(step, 8)
        for group in batch.groups:
            journal.record_group(group)
        journal.record_batch(batch, lambda: None)
        await journal.flush()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        patch.setattr(Path, "unlink", refuse)
        journal.record_acknowledged(1)
        journal.record_eval({"env": "math", "step": 1, "version": 1})
        journal.when_durable(durable.set)
        await failed.wait()
    journal.record_group(make_group(1001))
    await journal.aclose()
    assert durable.is_set()
    with JournalReader(tmp_path) as reader:
        assert len(reader.evals()) == 1
        assert [group.task.position for group in reader.recover().groups] == [1001]


def test_a_file_that_cannot_be_brought_to_disk_is_tried_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it are closed, and their numbers may be other files' by then."""
    store = open_store(tmp_path, segment_bytes=SEGMENT_BYTES)
    for position in range(24):
        store.begin(sync=False)
        store.add_group(make_group(position))
        store.commit(sync=False)
    fdatasync, asked = os.fdatasync, list[int]()

    def fail_second(fd: int) -> None:
        asked.append(fd)
        if len(asked) == 2:
            refuse()
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", fail_second)
    for attempt in range(2):
        with (tmp_path / "other").open("wb") as other:
            store.begin(sync=True)
            store.add_group(make_group(24))
            if attempt:
                store.commit(sync=True)
            else:
                with pytest.raises(OSError, match="No space"):
                    store.commit(sync=True)
                store.rollback()
            other.write(b"still open")
    store.close()
    with JournalReader(tmp_path) as reader:
        assert len(reader.recover().groups) == 25


def test_the_number_of_a_lost_file_is_not_given_again(tmp_path: Path) -> None:
    """What is in a new one is kept when the rows that refer to the lost one are given up."""
    store = open_store(tmp_path, keep_batches=2)
    run_steps(store, 1, 1, groups=40)
    store.close()
    (newest,) = (tmp_path / "journal" / "payloads").glob("*.bin")
    newest.unlink()
    store = open_store(tmp_path, keep_batches=2, segment_bytes=SEGMENT_BYTES)
    waiting = [make_group(1000 + number) for number in range(3)]
    for number, group in enumerate(waiting):
        store.begin(sync=True)
        store.add_group(group)
        for other in range(12):
            store.add_group(make_group(2000 + 12 * number + other))
        store.commit(sync=True)
    for step in range(2, 6):
        batch = make_batch(step, 40)
        store.begin(sync=True)
        for group in batch.groups:
            store.add_group(group)
        store.add_batch(batch, None, {})
        store.acknowledge(step)
        store.commit(sync=True)
        store.tidy()
    with JournalReader(tmp_path) as reader:
        recovered = reader.recover()
        assert [batch.step for batch in recovered.batches] == [4, 5]
        assert recovered.damaged == []
        assert len(recovered.groups) == 39
    store.close()


def test_a_transaction_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    """Neither rows nor payload bytes, and the store goes on."""
    store = open_store(tmp_path)
    run_steps(store, 1, 1)
    before = payload_bytes(tmp_path)
    store.begin(sync=False)
    store.add_group(make_group(100))
    store.add_group(make_group(0))
    with pytest.raises(sqlite3.IntegrityError):
        store.commit(sync=False)
    assert payload_bytes(tmp_path) > before
    store.rollback()
    assert payload_bytes(tmp_path) == before
    store.begin(sync=True)
    store.add_group(make_group(101))
    store.commit(sync=True)
    store.close()
    with JournalReader(tmp_path) as reader:
        assert [facts(group) for group in reader.recover().groups] == [facts(make_group(101))]


def test_somebody_who_reads_does_not_stop_the_writer(tmp_path: Path) -> None:
    """An open read transaction delays the folding of the WAL and nothing else."""
    store = make_store(tmp_path)
    run_steps(store, 1, 2)
    reader = JournalReader(tmp_path)
    reader._connection.execute("BEGIN")
    reader._connection.execute("SELECT count(*) FROM groups").fetchall()
    run_steps(store, 3, 6)
    store.tidy(force=True)
    reader._connection.execute("COMMIT")
    store.tidy(force=True)
    assert (tmp_path / "journal" / "journal.sqlite3-wal").stat().st_size == 0
    reader.close()
    store.close()


FULL_DISK = """
import asyncio, json, resource, sys
from pathlib import Path
from tests.support.journal_groups import make_group
from tests.support.journal_opening import open_journal

async def main():
    # No file of this process may grow further than this: what a full disk does to the files that grow.
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    errors, failed, durable = [], asyncio.Event(), -1
    def on_error(error):
        errors.append(str(error))
        failed.set()
    journal = open_journal(Path(sys.argv[1]), commit_interval_s=0.001, on_error=on_error)
    for position in range(100_000):
        journal.record_group(make_group(position, longest=int(sys.argv[3])))
        try:
            await journal.flush()
        except Exception:
            break
        durable = position
    await failed.wait()
    try:
        await journal.aclose()
        closed = ""
    except Exception as error:
        closed = str(error)
    print(json.dumps({"errors": errors, "durable": durable, "full": journal.full, "closed": closed}))

asyncio.run(main())
"""


@pytest.mark.parametrize(("limit", "longest"), [(400_000, 40), (2_000_000, 5000)], ids=["wal", "payloads"])
def test_a_full_disk_is_said_once_and_loses_nothing_that_was_recorded(
    tmp_path: Path, limit: int, longest: int
) -> None:
    """Everything up to the last flush that returned is there again; dispatch was told to stop."""
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "run"), str(limit), str(longest)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    said = json.loads(child.stdout)
    assert len(said["errors"]) == 1
    assert "cannot be written" in said["errors"][0]
    assert said["full"]
    assert said["closed"]
    assert said["durable"] > 3
    with JournalReader(tmp_path / "run") as reader:
        again = reader.recover()
    assert not again.damaged
    assert [group.task.position for group in again.groups] == list(range(len(again.groups)))
    assert len(again.groups) >= said["durable"] + 1
    assert facts(again.groups[-1]) == facts(make_group(len(again.groups) - 1, longest=longest))


def test_what_is_kept_since_a_checkpoint_is_counted_and_given_back(tmp_path: Path) -> None:
    """Also when a transaction is undone and applied again, and after the journal was opened anew."""
    store = make_store(tmp_path, None)

    def apply(*records: Callable[[], None], undo: bool = False) -> None:
        store.begin(sync=False)
        for record in records:
            record()
        if undo:
            store.rollback()
        else:
            store.commit(sync=False)

    def form(step: int) -> list[Callable[[], None]]:
        batch = make_batch(step)
        adding = [partial(store.add_group, group) for group in batch.groups]
        return [*adding, partial(store.add_batch, batch, None, {})]

    for step in range(1, 7):
        apply(*form(step))
        apply(partial(store.acknowledge, step), undo=True)
        apply(partial(store.acknowledge, step))
        apply(partial(store.acknowledge, step))
    assert store.kept[0] == 6
    before = store.kept
    apply(partial(store.set_checkpoint, 4), undo=True)
    assert store.kept == before
    apply(partial(store.set_checkpoint, 4))
    assert store.kept[0] == 2
    assert 0 < store.kept[1] < before[1]
    kept = store.kept
    store.close()
    store = make_store(tmp_path, None)
    assert store.kept == kept
    apply(*form(7))
    apply(partial(store.acknowledge, 7))
    assert store.kept[0] == 3
    store.close()
    with JournalReader(tmp_path) as reader:
        assert [row.step for row in reader.batches() if row.kept] == [5, 6, 7]
        assert [batch.step for batch in reader.recover(again=1).batches] == [7]
        assert [batch.step for batch in reader.recover().batches] == [5, 6, 7]
