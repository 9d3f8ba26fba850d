"""The journal tells the truth: files that are gone, empty, older or of another run are noticed and said."""

import asyncio
import os
import shutil
import sqlite3
import stat
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch
from orchestrator.journal import Journal, JournalReader
from orchestrator.journal.directory import MARK
from orchestrator.journal.mark import Mark, read_mark
from tests.support.journal_groups import make_batch, make_group
from tests.support.journal_opening import open_journal, open_store


async def run_steps(run_dir: Path, first: int, last: int) -> None:
    """Form and acknowledge batches, in a process of its own in effect."""
    async with open_journal(run_dir) as journal:
        for step in range(first, last + 1):
            await form(journal, make_batch(step))
            journal.record_ack(step, 0, world_size=1)
            journal.record_acknowledged(step)


async def form(journal: Journal, batch: Batch) -> None:
    for group in batch.groups:
        journal.record_group(group)
    durable = asyncio.Event()
    journal.record_batch(batch, durable.set)
    await durable.wait()


def refusal(run_dir: Path) -> str:
    """What is said to somebody who opens the journal; and that nothing was changed by it."""
    before = snapshot(run_dir)
    with pytest.raises(JournalError) as refused:
        open_journal(run_dir)
    assert snapshot(run_dir) == before
    return str(refused.value)


def snapshot(run_dir: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run_dir)): path.read_bytes()
        for path in (run_dir / "journal").rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


async def warnings_of(run_dir: Path) -> list[str]:
    with capture_logs() as logs:
        async with open_journal(run_dir):
            pass
    return [event["note"] for event in logs if event["event"] == "journal.changed"]


async def test_the_mark_has_a_served_step_before_the_trainer_can_ask_for_it(tmp_path: Path) -> None:
    """It is written when a batch is on disk, and says what was acknowledged by then."""
    async with open_journal(tmp_path) as journal:
        seen = list[Mark | None]()
        for step in (1, 2):
            for group in make_batch(step).groups:
                journal.record_group(group)
            journal.record_batch(make_batch(step), lambda: seen.append(read_mark(tmp_path / "journal")))
            await journal.flush()
            journal.record_acknowledged(step)
    assert [(mark.run_id, mark.step, mark.acknowledged) for mark in seen if mark is not None] == [
        (journal.run_id, 1, 0),
        (journal.run_id, 2, 1),
    ]


async def test_an_older_copy_of_the_database_is_refused_by_both_steps(tmp_path: Path) -> None:
    """Going on would give other bytes for steps that were served."""
    await run_steps(tmp_path, 1, 2)
    database = tmp_path / "journal" / "journal.sqlite3"
    copy = shutil.copy(database, tmp_path / "copy")
    await run_steps(tmp_path, 3, 5)
    newer = shutil.copy(database, tmp_path / "newer")
    shutil.copy(copy, database)
    said = refusal(tmp_path)
    assert f"{database}: ends at step 2, but step 5 was served" in said
    assert "replaced by an older copy, or cut; put the newer one back, or start over with --fresh" in said
    shutil.copy(newer, database)
    assert await warnings_of(tmp_path) == []


async def test_an_older_copy_is_noticed_by_the_payload_files_too(tmp_path: Path) -> None:
    """Each begins with the last step that was on disk by then, should the mark be lost as well."""
    await run_steps(tmp_path, 1, 2)
    database = tmp_path / "journal" / "journal.sqlite3"
    copy = shutil.copy(database, tmp_path / "copy")
    await run_steps(tmp_path, 3, 5)
    await run_steps(tmp_path, 6, 6)
    shutil.copy(copy, database)
    (tmp_path / "journal" / "mark.json").unlink()
    assert "ends at step 2, but step 5 was served" in refusal(tmp_path)


async def test_a_database_that_is_gone_or_empty_is_refused(tmp_path: Path) -> None:
    """A run does not silently begin at step 1 again; --fresh does, and keeps what is left aside."""
    await run_steps(tmp_path, 1, 3)
    database = tmp_path / "journal" / "journal.sqlite3"
    database.unlink()
    assert "is gone, but step 3 of run" in refusal(tmp_path)
    database.write_bytes(b"")
    assert "is empty, but step 3 of run" in refusal(tmp_path)
    (tmp_path / "journal" / "mark.json").unlink()
    assert "is empty, but 1 payload files lie beside it" in refusal(tmp_path)
    async with open_journal(tmp_path, fresh=True) as journal:
        assert journal.recover().empty


async def test_a_lost_mark_is_said_and_written_anew(tmp_path: Path) -> None:
    """Missing or damaged: the run goes on."""
    await run_steps(tmp_path, 1, 3)
    mark = tmp_path / "journal" / "mark.json"
    for damage in (lambda: mark.unlink(), lambda: mark.write_bytes(mark.read_bytes().replace(b"3", b"9", 1))):
        damage()
        (said,) = await warnings_of(tmp_path)
        assert "mark.json is missing or damaged" in said
        found = read_mark(tmp_path / "journal")
        assert found is not None
        assert (found.step, found.acknowledged) == (3, 3)
        assert await warnings_of(tmp_path) == []


async def test_files_of_two_runs_are_not_taken_for_one(tmp_path: Path) -> None:
    """Neither a database nor a payload file of another run is believed."""
    one, other = tmp_path / "one", tmp_path / "other"
    await run_steps(one, 1, 2)
    await run_steps(other, 1, 3)
    saved = shutil.copytree(one, tmp_path / "saved")
    shutil.copy(other / "journal" / "journal.sqlite3", one / "journal" / "journal.sqlite3")
    assert "mark.json beside it is of run" in refusal(one)
    shutil.rmtree(one)
    shutil.copytree(saved, one)
    shutil.copy(
        other / "journal" / "payloads" / "00000001.bin", one / "journal" / "payloads" / "00000007.bin"
    )
    assert "payloads/00000007.bin beside it is of run" in refusal(one)


async def test_a_wal_that_is_lost_is_said_even_when_no_batch_was_in_it(tmp_path: Path) -> None:
    """Finished groups are lost with it; their tasks are asked again."""
    live = tmp_path / "live"
    await run_steps(live, 1, 2)
    async with open_journal(live) as journal:
        journal.record_group(make_group(50))
        await journal.flush()
        shutil.copytree(live, tmp_path / "killed")
    killed = tmp_path / "killed" / "journal"
    (killed / "journal.sqlite3-wal").unlink()
    (killed / "journal.sqlite3-shm").unlink()
    (said,) = await warnings_of(tmp_path / "killed")
    assert "older than its mark" in said


async def test_a_torn_end_of_the_wal_is_said(tmp_path: Path) -> None:
    """SQLite itself reads up to the last whole commit and is silent about the rest."""
    live = tmp_path / "live"
    async with open_journal(live) as journal:
        await form(journal, make_batch(1))
        journal.record_group(make_group(50))
        await journal.flush()
        shutil.copytree(live, tmp_path / "killed")
    killed = tmp_path / "killed" / "journal"
    (killed / "journal.sqlite3-shm").unlink()
    whole = shutil.copytree(tmp_path / "killed", tmp_path / "whole")
    os.truncate(killed / "journal.sqlite3-wal", (killed / "journal.sqlite3-wal").stat().st_size - 1000)
    (said,) = await warnings_of(tmp_path / "killed")
    assert "bytes of the WAL are no whole commit" in said
    assert await warnings_of(whole) == []


async def test_a_database_that_another_program_has_written_to_is_said(tmp_path: Path) -> None:
    """The file changes only when the journal folds its WAL, so a digest of it tells."""
    await run_steps(tmp_path, 1, 2)
    connection = sqlite3.connect(tmp_path / "journal" / "journal.sqlite3")
    with connection:
        connection.execute("UPDATE resolved SET position = 1000 WHERE position = 3")
    connection.close()
    (said,) = await warnings_of(tmp_path)
    assert "another program has written to the database" in said
    assert await warnings_of(tmp_path) == []


async def test_a_run_that_folds_its_wal_and_is_killed_opens_without_a_word(tmp_path: Path) -> None:
    """The mark keeps up with a database that is changed while the run goes on."""
    store = open_store(tmp_path / "live")
    for step in range(1, 5):
        store.begin(sync=True)
        for group in make_batch(step).groups:
            store.add_group(group)
        store.add_batch(make_batch(step), None, {})
        store.commit(sync=True)
        store._fold_at_bytes = 0
        store.tidy()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    store.close()
    (tmp_path / "killed" / "journal" / "journal.sqlite3-shm").unlink()
    assert await warnings_of(tmp_path / "killed") == []
    (tmp_path / "killed" / "journal" / "journal.sqlite3-wal").unlink(missing_ok=True)
    assert await warnings_of(tmp_path / "killed") == []


@pytest.mark.parametrize("failed_before", [True, False])
async def test_a_mark_that_cannot_be_written_is_an_error_of_the_journal(
    tmp_path: Path, failed_before: bool
) -> None:
    """Also when the journal is closed: a supervisor goes by the exit code, and a person reads one line."""
    failed = asyncio.Event()
    journal = open_journal(tmp_path, on_error=lambda error: failed.set())
    (tmp_path / "journal" / f"{MARK}.new").mkdir()
    for group in make_batch(1).groups:
        journal.record_group(group)
    await journal.flush()
    if failed_before:
        journal.record_batch(make_batch(1), lambda: None)
        await failed.wait()
    with pytest.raises(JournalError, match="cannot be written"):
        await journal.aclose()
    with JournalReader(tmp_path) as reader:
        assert reader.recover().last_step == failed_before


async def test_what_a_run_records_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """Directories 0700, files 0600, whatever the umask allows."""
    umask = os.umask(0o000)
    try:
        run_dir = tmp_path / "runs" / "one"
        async with open_journal(run_dir) as journal:
            await form(journal, make_batch(1))
            made = [run_dir, *run_dir.rglob("*")]
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
            directories = {path.name for path in made if path.is_dir()}
    finally:
        os.umask(umask)
    assert directories == {"one", "journal", "payloads"}
    files = {
        "lock",
        "journal.sqlite3",
        "journal.sqlite3-wal",
        "journal.sqlite3-shm",
        "mark.json",
        "00000001.bin",
    }
    assert set(modes) - directories == files
    assert {
        name: mode for name, mode in modes.items() if mode != (0o700 if name in directories else 0o600)
    } == {}


async def test_others_who_look_into_a_journal_in_use_do_not_take_its_wal_away(tmp_path: Path) -> None:
    """The writer's locks hold although it reads the database file itself, so nobody takes himself for the last to leave."""
    look = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM meta').fetchall(); c.close()"
    database = tmp_path / "journal" / "journal.sqlite3"
    async with open_journal(tmp_path) as journal:
        await form(journal, make_batch(1))
        before = [database.with_name(f"{database.name}-{name}").stat().st_ino for name in ("wal", "shm")]
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", look, str(database))
            assert await process.wait() == 0
        assert before == [
            database.with_name(f"{database.name}-{name}").stat().st_ino for name in ("wal", "shm")
        ]
        await form(journal, make_batch(2))
    async with open_journal(tmp_path) as journal:
        assert [batch.step for batch in journal.recover().batches] == [1, 2]
