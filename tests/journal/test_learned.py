"""Statistics of tasks and choices of a curriculum in the journal: with the commit that changed them, and back again."""

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from orchestrator.curriculum import OUTCOMES, TaskOutcome
from orchestrator.groups.group import Batch
from orchestrator.journal import Journal, JournalReader
from tests.support.journal_groups import make_group
from tests.support.journal_opening import open_journal


def outcome(task: int, version: int = 0) -> TaskOutcome:
    return TaskOutcome(task, version, task / 100, 4, equal=task % 2 == 0)


def tasks_of(run_dir: Path, env: str = "math") -> list[int]:
    with JournalReader(run_dir) as reader:
        return list(reader.learned().get(env, np.empty(0, OUTCOMES))["task"].tolist())


async def record_step(journal: Journal, step: int) -> None:
    """A batch of one group; a filtered one and one that came too late were learned from beside it."""
    group = make_group(3 * step)
    journal.record_choice("math", 3 * step, 30 + step)
    journal.record_choice("math", 3 * step + 1, 60 + step)
    journal.record_group(group, outcome(10 * step, step))
    journal.record_task("math", 3 * step + 1, "equal_rewards", outcome(10 * step + 1))
    journal.record_late("math", outcome(10 * step + 2))
    journal.record_late("code", outcome(step))
    version = {"published": [0], "path": None, "trained": step - 1}
    durable = asyncio.Event()
    journal.record_batch(Batch(step, step - 1, (group,)), durable.set, states={"version": version})
    await durable.wait()
    journal.record_acknowledged(step)


async def test_what_was_learned_comes_back_in_its_order(tmp_path: Path) -> None:
    """From the batches and from what came after the last one, of each env by itself."""
    async with open_journal(tmp_path) as journal:
        for step in (1, 2):
            await record_step(journal, step)
        journal.record_late("math", outcome(99, 7))
        journal.record_late("math", None)
    async with open_journal(tmp_path) as journal:
        learned = journal.recover().learned
    assert learned["math"]["task"].tolist() == [10, 11, 12, 20, 21, 22, 99]
    assert learned["code"]["task"].tolist() == [1, 2]
    last = learned["math"][-1]
    assert TaskOutcome(*last.tolist()) == (99, 7, 0.99, 4, False)
    assert learned["math"]["equal"].tolist() == [1, 0, 1, 1, 0, 1, 0]
    with JournalReader(tmp_path) as reader:
        assert reader.counters()["math"]["late"] == 4, "also the one that said nothing"


async def test_rows_go_into_the_batch_that_follows_them(tmp_path: Path) -> None:
    """The table stays small however long the run is."""
    async with open_journal(tmp_path) as journal:
        for step in range(1, 5):
            await record_step(journal, step)
        journal.record_late("math", outcome(5))
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite3") as connection:
        (rows,) = connection.execute("SELECT count(*) FROM learned").fetchone()
        sizes = [size for (size,) in connection.execute("SELECT length(learned) FROM batches")]
    connection.close()
    assert rows == 1
    assert len(sizes) == 4
    assert max(sizes) < 200


async def test_a_run_that_is_set_back_knows_what_it_knew_then(tmp_path: Path) -> None:
    """Nothing that was learned later is left, and positions that are open again are chosen for anew."""
    async with open_journal(tmp_path) as journal:
        for step in range(1, 5):
            await record_step(journal, step)
        journal.record_late("math", outcome(99))
        journal.record_choice("math", 50, 5)
    async with open_journal(tmp_path, rewind_to=2) as journal:
        recovered = journal.recover()
        assert recovered.learned["math"]["task"].tolist() == [10, 11, 12, 20, 21, 22]
        chosen = recovered.chosen["math"]
        assert not {9, 12} & chosen.keys(), "their groups were in batches that are given up"
        assert chosen[50] == 5, "it was open and stays so"
        journal.record_late("math", outcome(1))
    assert tasks_of(tmp_path) == [10, 11, 12, 20, 21, 22, 1]


async def test_choices_below_the_low_water_mark_are_given_up(tmp_path: Path) -> None:
    """Those above it come back, the latest of each position."""
    async with open_journal(tmp_path) as journal:
        for position in range(10):
            journal.record_choice("math", position, position * 2)
        journal.record_choice("math", 9, 77)
        journal.record_choice("code", 0, 1)
        journal.prune("math", 8)
    async with open_journal(tmp_path) as journal:
        recovered = journal.recover()
    assert recovered.chosen == {"math": {8: 16, 9: 77}, "code": {0: 1}}
    assert not recovered.empty, "a task that was handed out is asked again, even if nothing else happened"


@pytest.mark.parametrize("damage", [b"nonsense", b"x\x9c\x03\x00\x00\x00\x00\x01", "text", 7])
async def test_damaged_statistics_of_a_step_are_left_out_and_told(tmp_path: Path, damage: object) -> None:
    """They choose tasks and prove nothing, so they do not keep a run from going on."""
    async with open_journal(tmp_path) as journal:
        for step in (1, 2, 3):
            await record_step(journal, step)
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite3") as connection:
        connection.execute("UPDATE batches SET learned = ? WHERE step = 2", (damage,))
    connection.close()
    with capture_logs() as records:
        async with open_journal(tmp_path) as journal:
            learned = journal.recover().learned
    assert learned["math"]["task"].tolist() == [10, 11, 12, 30, 31, 32]
    (record,) = (record for record in records if record["event"] == "journal.learned_lost")
    assert record["step"] == 2
