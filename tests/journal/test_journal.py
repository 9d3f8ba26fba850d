"""The journal: what was recorded is there again, once, in order, and takes no more room than it needs."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch
from orchestrator.journal import Journal, JournalReader, Recovered
from orchestrator.journal.payloads import Place
from tests.support.journal_groups import batch_facts, facts, make_batch, make_group
from tests.support.journal_opening import open_journal


@asynccontextmanager
async def opened(run_dir: Path, **options: Any) -> AsyncIterator[Journal]:
    async with open_journal(run_dir, commit_interval_s=0.01, **options) as journal:
        yield journal


async def record_durably(journal: Journal, batch: Batch) -> None:
    """Record a batch and wait until it may be offered."""
    durable = asyncio.Event()
    journal.record_batch(batch, durable.set)
    await durable.wait()


def counters(run_dir: Path) -> dict[str, dict[str, int]]:
    with JournalReader(run_dir) as reader:
        return reader.counters()


def damage(run_dir: Path, place: Place) -> None:
    """Overwrite a part of a payload."""
    with (run_dir / "journal" / "payloads" / f"{place.segment:08d}.bin").open("r+b") as file:
        file.seek(place.offset + 20)
        file.write(bytes(16))


async def recovered(run_dir: Path, **options: Any) -> Recovered:
    async with opened(run_dir) as journal:
        return journal.recover(**options)


async def test_finished_groups_come_back_whole_and_in_the_order_of_recording(tmp_path: Path) -> None:
    """What recover() yields equals what was recorded, array by array."""
    groups = [
        make_group(position, env) for position, env in ((3, "math"), (0, "code"), (1, "math"), (9, "code"))
    ]
    async with opened(tmp_path) as journal:
        for group in groups:
            journal.record_group(group)
    again = await recovered(tmp_path)
    assert [facts(group) for group in again.groups] == [facts(group) for group in groups]
    assert again.resolved == {}, "a task is resolved when its group is in a batch"
    assert again.last_step == 0
    assert not again.batches


async def test_compressed_groups_come_back_whole(tmp_path: Path) -> None:
    """A zlib level changes what lies on disk and nothing else."""
    group = make_group(5, transcript=b"the same again " * 1000)
    async with opened(tmp_path, compress=6) as journal:
        journal.record_group(group)
    again = await recovered(tmp_path)
    assert [facts(found) for found in again.groups] == [facts(group)]


async def test_a_batch_is_readable_by_others_when_its_callback_runs(tmp_path: Path) -> None:
    """on_durable runs on the event loop, after the batch and its groups are committed."""
    batch = make_batch(1)
    seen: list[tuple[object, ...]] = []
    done = asyncio.Event()

    def durable() -> None:
        assert asyncio.get_running_loop()
        with JournalReader(tmp_path) as reader:
            found = reader.batch(1)
            assert found is not None
            seen.append(batch_facts(found))
        done.set()

    async with opened(tmp_path) as journal:
        for group in batch.groups:
            journal.record_group(group)
        journal.record_batch(batch, durable)
        await done.wait()
    assert seen == [batch_facts(batch)]


async def test_a_formed_batch_is_the_same_after_a_restart_and_its_groups_are_queued_no_more(
    tmp_path: Path,
) -> None:
    """The order of the groups in a batch is part of it."""
    groups = [make_group(position) for position in range(5)]
    batch = Batch(1, 7, (groups[3], groups[0]))
    async with opened(tmp_path) as journal:
        for group in groups:
            journal.record_group(group)
        await record_durably(journal, batch)
    again = await recovered(tmp_path)
    assert [batch_facts(found) for found in again.batches] == [batch_facts(batch)]
    assert [group.task.position for group in again.groups] == [1, 2, 4]
    assert again.resolved == {"math": (0, [0, 3])}
    assert again.last_step == 1
    assert again.last_acknowledged == 0


async def test_acknowledged_batches_beyond_the_kept_ones_are_gone_and_the_others_are_told_apart(
    tmp_path: Path,
) -> None:
    """recover() has the unacknowledged batches with their acks, plus the kept acknowledged ones."""
    async with opened(tmp_path, keep_batches=2) as journal:
        for step in range(1, 7):
            batch = make_batch(step)
            for group in batch.groups:
                journal.record_group(group)
            await record_durably(journal, batch)
            if step <= 4:
                journal.record_ack(step, 0, world_size=2)
                journal.record_ack(step, 1, world_size=2)
                journal.record_acknowledged(step)
        journal.record_ack(5, 1, world_size=2)
    again = await recovered(tmp_path)
    assert [batch.step for batch in again.batches] == [3, 4, 5, 6]
    assert again.acknowledged == {3, 4}
    assert again.acks == {5: frozenset({1})}
    assert (again.last_step, again.last_acknowledged) == (6, 4)
    with JournalReader(tmp_path) as reader:
        assert reader.batch(2) is None
        assert [(row.step, row.kept) for row in reader.batches(last=5)] == [(n, n > 2) for n in range(2, 7)]


async def test_acks_given_under_another_world_size_do_not_count(tmp_path: Path) -> None:
    """A trainer that comes back with more ranks trains on the batch as a whole."""
    async with opened(tmp_path) as journal:
        for group in make_batch(1).groups:
            journal.record_group(group)
        await record_durably(journal, make_batch(1))
        journal.record_ack(1, 0, world_size=2)
    assert (await recovered(tmp_path, world_size=2)).acks == {1: frozenset({0})}
    assert (await recovered(tmp_path, world_size=4)).acks == {}


async def test_resolved_positions_are_pruned_below_the_low_water_mark(tmp_path: Path) -> None:
    """One number stands for every position below it."""
    async with opened(tmp_path) as journal:
        for position in range(6):
            journal.record_task("math", position, "filtered")
        journal.record_task("code", 2, "given_up")
        journal.prune("math", 4)
        journal.prune("math", 3)
        journal.record_group(make_group(8))
    again = await recovered(tmp_path)
    assert again.resolved == {"math": (4, [4, 5]), "code": (0, [2])}
    assert counters(tmp_path) == {"code": {"given_up": 1}, "math": {"filtered": 6, "finished": 1}}


async def test_an_evicted_group_is_gone_and_its_task_can_be_asked_again(tmp_path: Path) -> None:
    """The position is not resolved, and the group that comes of asking again is recorded like any other."""
    async with opened(tmp_path) as journal:
        journal.record_group(make_group(0))
        journal.record_group(make_group(1))
        journal.evict_group(make_group(0), "stale")
    again = await recovered(tmp_path)
    assert [group.task.position for group in again.groups] == [1]
    assert again.resolved == {}
    assert counters(tmp_path)["math"]["evicted: stale"] == 1
    async with opened(tmp_path) as journal:
        journal.record_group(make_group(0))
        await record_durably(journal, Batch(1, 0, (make_group(0),)))
    again = await recovered(tmp_path)
    assert [group.task.position for group in again.groups] == [1]
    assert again.resolved == {"math": (0, [0])}


async def test_states_evals_and_meta_survive_and_the_latest_state_wins(tmp_path: Path) -> None:
    """What the service notes about itself is there again."""
    async with opened(tmp_path) as journal:
        journal.record_states({"mix": {"deficit": [0.1, 0.2]}})
        journal.record_states({"mix": {"deficit": [0.3]}})
        journal.record_eval({"env": "math", "step": 20, "version": 19, "avg@4": 0.5})
        journal.record_eval({"env": "math", "step": 40, "version": 39, "avg@4": 0.75})
        journal.set_meta("seed", "7")
        run_id = journal.run_id
    async with opened(tmp_path) as journal:
        assert journal.recover().state == {"mix": {"deficit": [0.3]}}
        assert journal.meta["seed"] == "7"
        assert journal.run_id == run_id
    with JournalReader(tmp_path) as reader:
        assert [result["avg@4"] for result in reader.evals()] == [0.5, 0.75]
        assert [result["step"] for result in reader.evals(last=1)] == [40]


async def test_flush_returns_when_everything_before_it_is_on_disk(tmp_path: Path) -> None:
    """A reader sees what was recorded before flush, even with a long commit interval."""
    async with open_journal(tmp_path, commit_interval_s=3600) as journal:
        journal.record_group(make_group(0))
        await journal.flush()
        with JournalReader(tmp_path) as reader:
            assert [row.task.position for row in reader.group_rows(queued=True)] == [0]


async def test_the_backlog_is_bounded_by_a_flag_that_clears_when_the_disk_has_caught_up(
    tmp_path: Path,
) -> None:
    """`full` is what stops dispatch while the disk is behind."""
    async with open_journal(tmp_path, commit_interval_s=3600, max_backlog_bytes=1000) as journal:
        await journal.flush()
        assert not journal.full
        journal.record_group(make_group(0, size=8))
        assert journal.backlog_bytes > 1000
        assert journal.full
        await journal.flush()
        assert journal.backlog_bytes == 0
        assert not journal.full


async def test_who_waits_for_room_in_the_backlog_is_told_when_there_is_some(tmp_path: Path) -> None:
    """Once each time that the journal was full and is not any more, on the event loop; not for other commits."""
    async with open_journal(tmp_path, commit_interval_s=0.01, max_backlog_bytes=1000) as journal:
        seen: list[bool] = []
        room = asyncio.Event()

        def on_room() -> None:
            assert asyncio.get_running_loop()
            seen.append(journal.full)
            room.set()

        journal.on_room = on_room
        journal.record_task("math", 100, "filtered")
        await journal.flush()
        assert seen == []
        for position in range(2):
            journal.record_group(make_group(position, size=8))
            await room.wait()
            room.clear()
        assert seen == [False, False]


async def test_a_journal_that_cannot_be_written_has_no_room(tmp_path: Path) -> None:
    """It stays full: nobody is told to go on."""
    journal = open_journal(tmp_path, commit_interval_s=0.01, max_backlog_bytes=100)
    journal.on_room = lambda: pytest.fail("there is no room")
    journal.record_batch(make_batch(1), lambda: None)
    with pytest.raises(JournalError, match="batch 1"):
        await journal.flush()
    assert journal.full
    with pytest.raises(JournalError, match="batch 1"):
        await journal.aclose()
    assert journal.full


async def test_a_second_orchestrator_on_the_run_directory_is_refused_by_name(tmp_path: Path) -> None:
    """The message names the directory and the process that uses it."""
    async with opened(tmp_path):
        with pytest.raises(JournalError, match=r"in use by pid \d+"):
            open_journal(tmp_path)
    async with opened(tmp_path):
        pass


async def test_fresh_starts_over_and_keeps_the_old_journal_aside(tmp_path: Path) -> None:
    """Nothing of the old run is in the new one, and nothing of it is deleted."""
    async with opened(tmp_path) as journal:
        journal.record_group(make_group(0))
        old_id = journal.run_id
    async with opened(tmp_path, fresh=True) as journal:
        assert journal.recover().empty
        assert journal.run_id != old_id
        assert journal.moved_aside == tmp_path / "journal.old-1"
    old = sqlite3.connect(tmp_path / "journal.old-1" / "journal.sqlite3")
    assert old.execute("SELECT position FROM groups").fetchall() == [(0,)]
    old.close()
    async with opened(tmp_path, fresh=True) as journal:
        assert journal.moved_aside == tmp_path / "journal.old-2"


async def test_a_journal_of_another_schema_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    """Both versions are named, and the lock is given back."""
    async with opened(tmp_path):
        pass
    path = tmp_path / "journal" / "journal.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalError, match="schema 99, this orchestrator has 4"):
        open_journal(tmp_path)
    for name in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        name.unlink(missing_ok=True)
    path.write_bytes(b"something else altogether" * 100)
    with pytest.raises(JournalError, match="journal"):
        open_journal(tmp_path)
    async with opened(tmp_path, fresh=True):
        pass


async def test_a_run_directory_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    """A mistake in the config is one clear line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="the run directory cannot be written"):
        open_journal(tmp_path / "file" / "run")


async def test_a_batch_of_unrecorded_groups_is_an_error_and_what_was_recorded_before_stays(
    tmp_path: Path,
) -> None:
    """on_error is called once; the journal takes nothing more and says why."""
    errors: list[JournalError] = []
    failed = asyncio.Event()

    def on_error(error: JournalError) -> None:
        errors.append(error)
        failed.set()

    journal = open_journal(tmp_path, commit_interval_s=0.01, on_error=on_error)
    journal.record_group(make_group(0))
    await journal.flush()
    journal.record_batch(
        make_batch(5), lambda: pytest.fail("a batch that is not recorded was called durable")
    )
    await failed.wait()
    assert journal.full
    with pytest.raises(JournalError, match="batch 5"):
        await journal.flush()
    with pytest.raises(JournalError, match="batch 5"):
        await journal.aclose()
    assert len(errors) == 1
    assert [group.task.position for group in (await recovered(tmp_path)).groups] == [0]


async def test_a_damaged_payload_costs_its_group_and_its_task_is_asked_again(tmp_path: Path) -> None:
    """After a power cut a row may outlive its payload; the checksum tells."""
    async with opened(tmp_path) as journal:
        for position in range(3):
            journal.record_group(make_group(position))
    with JournalReader(tmp_path) as reader:
        place = [row.place for row in reader.group_rows()][1]
    damage(tmp_path, place)
    async with opened(tmp_path) as journal:
        again = journal.recover()
        assert again.damaged == ["math/train/1"]
        assert [group.task.position for group in again.groups] == [0, 2]
        assert again.resolved == {}
        journal.record_group(make_group(1))
    assert [group.task.position for group in (await recovered(tmp_path)).groups] == [0, 2, 1]


async def test_a_damaged_part_of_a_split_group_costs_that_part_alone(tmp_path: Path) -> None:
    """The other part is in a batch or in the queue as before, and the task stays resolved if it is in a batch."""
    whole, other = make_group(0), make_group(1)
    async with opened(tmp_path) as journal:
        journal.record_group(whole)
        journal.record_group(other)
        first, rest = journal.split_group(whole, 3)
        await record_durably(journal, Batch(1, 0, (first,)))
        one, two = journal.split_group(other, 2)
    with JournalReader(tmp_path) as reader:
        places = {row.id: row.place for row in reader.group_rows(queued=True)}
    for name in (rest.id, two.id):
        damage(tmp_path, places[name])
    async with opened(tmp_path) as journal:
        again = journal.recover()
        assert again.damaged == [rest.id, two.id]
        assert [group.id for group in again.groups] == [one.id]
        assert again.resolved == {"math": (0, [0])}
    again = await recovered(tmp_path)
    assert again.damaged == []
    assert [group.id for group in again.groups] == [one.id]
    assert [facts(group) for group in again.batches[0].groups] == [facts(first)]


async def test_evicting_the_rest_of_a_split_group_leaves_its_task_resolved(tmp_path: Path) -> None:
    """A part of it was trained on, and no position is trained on twice."""
    whole = make_group(0)
    async with opened(tmp_path) as journal:
        journal.record_group(whole)
        first, rest = journal.split_group(whole, 3)
        await record_durably(journal, Batch(1, 0, (first,)))
        journal.evict_group(rest, "stale")
    again = await recovered(tmp_path)
    assert again.groups == []
    assert again.resolved == {"math": (0, [0])}


async def test_the_sqlite_shell_can_read_a_live_run(tmp_path: Path) -> None:
    """A plain connection sees what is committed while the journal is open."""
    async with opened(tmp_path) as journal:
        for group in make_batch(1).groups:
            journal.record_group(group)
        await record_durably(journal, make_batch(1))
        shell = sqlite3.connect(tmp_path / "journal" / "journal.sqlite3")
        (row,) = shell.execute("SELECT step, sequences, json_extract(envs, '$.math.groups') FROM batches")
        assert row == (1, 8, 2)
        assert shell.execute("SELECT count(*) FROM groups WHERE step = 1").fetchone() == (2,)
        shell.close()


async def test_transcripts_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    """The reader filters by env and step."""
    async with opened(tmp_path) as journal:
        journal.record_group(make_group(0, "math"))
        journal.record_group(make_group(0, "code"))
        await journal.flush()
        with JournalReader(tmp_path) as reader:
            assert [group.transcript for group in reader.groups(env="code")] == [b"transcript of code/0"]
            assert [row.task.env for row in reader.group_rows()] == ["math", "code"]


def test_a_directory_without_a_journal_is_an_error_for_the_reader(tmp_path: Path) -> None:
    """`report` on a wrong directory says so."""
    with pytest.raises(JournalError, match="there is no journal here"):
        JournalReader(tmp_path)


async def test_the_parts_of_a_split_group_take_its_place(tmp_path: Path) -> None:
    """One part goes into a batch, the rest stays queued; nothing is lost or doubled by a restart in between."""
    whole = make_group(0, size=4)
    async with opened(tmp_path) as journal:
        journal.record_group(whole)
        first, rest = journal.split_group(whole, 3)
        await record_durably(journal, Batch(1, 0, (first,)))
    again = await recovered(tmp_path)
    assert [facts(group) for group in again.batches[0].groups] == [facts(first)]
    assert [group.id for group in again.groups] == [rest.id] == [f"{whole.id}+3"]
    assert [facts(group) for group in again.groups] == [facts(rest)]
    assert again.resolved == {"math": (0, [0])}
    assert counters(tmp_path)["math"]["finished"] == 1
