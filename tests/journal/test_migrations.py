"""Journals of older schemas: opened, brought up to date, and everything recovers as it did."""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch
from orchestrator.journal import JournalReader
from orchestrator.journal.migrations import MIGRATIONS
from orchestrator.journal.schema import SCHEMA_VERSION
from tests.journal.fixtures.make import digest, expectations, record_first_life, record_second_life
from tests.support.journal_groups import all_facts, make_group
from tests.support.journal_opening import open_journal

FIXTURES = Path(__file__).parent / "fixtures"


def old_journal(run_dir: Path, schema: int = 1) -> dict[str, Any]:
    """Put a journal of an older schema into a run directory; returns what that version recovered."""
    shutil.copytree(FIXTURES / f"schema_{schema}" / "journal", run_dir / "journal")
    expected: dict[str, Any] = json.loads((FIXTURES / f"schema_{schema}" / "expected.json").read_text())
    return expected


def positions(low: int, above: list[int]) -> set[int]:
    return {*range(low), *above}


def test_every_older_schema_has_a_way_to_the_next_and_a_journal_to_show_it() -> None:
    """Nobody raises the version without a migration and a fixture."""
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))
    assert {path.name for path in FIXTURES.glob("schema_*")} >= {f"schema_{n}" for n in MIGRATIONS}


async def test_the_script_that_makes_such_journals_still_runs(tmp_path: Path) -> None:
    """Written today, the same run has the same groups and batches; whoever raises the version runs it before."""
    await record_first_life(tmp_path)
    await record_second_life(tmp_path)
    today = json.loads(json.dumps(expectations(tmp_path)))
    assert today["schema"] == SCHEMA_VERSION
    before = json.loads((FIXTURES / "schema_1" / "expected.json").read_text())
    with JournalReader(tmp_path) as reader:
        # What is left of a split group is named by its place in the group; then it was named by a count.
        groups = [replace(group, part=min(group.part, 1)) for group in reader.recover(world_size=2).groups]
    today["groups"] = {group.id: digest(group) for group in groups}
    for what in ("groups", "batches", "acknowledged", "acks", "state", "last_step", "counters", "evals"):
        assert today[what] == before[what]


@pytest.mark.parametrize("schema", MIGRATIONS)
async def test_a_journal_of_an_older_schema_recovers_as_it_did(tmp_path: Path, schema: int) -> None:
    """Groups, batches, acknowledgements, states, evaluations, counters, the run's name: all the same, and said."""
    expected = old_journal(tmp_path, schema)
    with capture_logs() as logs:
        async with open_journal(tmp_path) as journal:
            found = journal.recover(world_size=2)
            assert journal.run_id == expected["meta"]["run_id"]
            assert journal.meta["seed"] == expected["meta"]["seed"]
    assert {group.id: digest(group) for group in found.groups} == expected["groups"]
    assert [group.id for group in found.groups] == list(expected["groups"])
    batches: dict[str, Any] = {
        str(b.step): [b.version, {g.id: digest(g) for g in b.groups}] for b in found.batches
    }
    assert batches == expected["batches"]
    assert [list(batch[1]) for batch in batches.values()] == [
        list(b[1]) for b in expected["batches"].values()
    ]
    assert sorted(found.acknowledged) == expected["acknowledged"]
    assert {str(step): sorted(ranks) for step, ranks in found.acks.items()} == expected["acks"]
    assert found.state == expected["state"]
    assert (found.last_step, found.last_acknowledged) == (
        expected["last_step"],
        expected["last_acknowledged"],
    )
    assert not found.damaged
    with JournalReader(tmp_path) as reader:
        assert reader.counters() == expected["counters"]
        evals = [{key: row[key] for key in row if key != "at"} for row in reader.evals()]
        assert evals == expected["evals"]
    said = [event for event in logs if event["event"] == "journal.migrated"]
    assert [(event["from_schema"], event["to_schema"]) for event in said] == [(schema, SCHEMA_VERSION)]
    assert [event for event in logs if event["log_level"] == "warning"] == []


async def test_sequences_of_an_older_schema_have_their_groups_versions_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Nobody recorded more of them then; new groups beside them have it all."""
    old_journal(tmp_path, 2)
    async with open_journal(tmp_path) as journal:
        found = journal.recover(world_size=2)
        journal.record_group(make_group(10))
    for group in found.groups:
        assert set(group.facts["version"]) == {group.version}
        assert set(group.facts["version_end"]) == {group.version_end}
        assert np.isnan(group.facts["temperature"]).all()
        assert (group.digest, group.decode_details().metrics) == (0, [])
    with JournalReader(tmp_path) as reader:
        newest = list(reader.groups())[-1]
    assert all_facts(newest) == all_facts(make_group(10))


async def test_a_row_of_schema_2_that_changed_on_disk_is_still_found_out(tmp_path: Path) -> None:
    """Bringing a journal up to date must not make a wrong row right."""
    old_journal(tmp_path, 2)
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite3") as connection:
        connection.execute("UPDATE groups SET version = version + 5 WHERE id = 'math/train/6'")
    connection.close()
    async with open_journal(tmp_path) as journal:
        found = journal.recover()
    assert found.damaged == ["math/train/6"]


async def test_positions_of_queued_groups_of_schema_1_are_open_again_and_no_others(tmp_path: Path) -> None:
    """Also where the low-water mark had passed one; a group whose first part is in a batch stays resolved."""
    expected = old_journal(tmp_path)
    async with open_journal(tmp_path) as journal:
        found = journal.recover()
    before = {env: positions(*resolved) for env, resolved in expected["resolved"].items()}
    after = {env: positions(*resolved) for env, resolved in found.resolved.items()}
    assert after == {"math": before["math"] - {1, 6, 7}, "code": before["code"] - {5}}
    assert found.resolved["math"][0] == 1
    assert 4 in after["code"]


async def test_a_damaged_queued_group_below_the_low_water_mark_is_told_and_asked_again(
    tmp_path: Path,
) -> None:
    """Under schema 1 its position counted as resolved, so that the task was lost without a word."""
    old_journal(tmp_path)
    with (tmp_path / "journal" / "payloads" / "00000001.bin").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(bytes(size))
    async with open_journal(tmp_path) as journal:
        found = journal.recover()
        assert found.damaged == ["math/train/1", "math/train/6", "math/train/7"]
        assert positions(*found.resolved["math"]) == {0, 2, 3, 4, 5, 9}
        journal.record_group(make_group(1))
    async with open_journal(tmp_path) as journal:
        found = journal.recover()
    assert found.damaged == []
    assert [group.id for group in found.groups if group.env == "math"] == ["math/train/1"]


async def test_a_migrated_journal_goes_on_and_is_not_migrated_again(tmp_path: Path) -> None:
    """Old and new payload files side by side, and what was queued gets into a batch."""
    expected = old_journal(tmp_path)
    async with open_journal(tmp_path, keep_batches=8) as journal:
        queue = {group.id: group for group in journal.recover().groups}
        journal.record_group(make_group(10))
        journal.record_batch(Batch(5, 4, (make_group(10), queue["math/train/1"])), lambda: None)
    with capture_logs() as logs:
        async with open_journal(tmp_path, keep_batches=8) as journal:
            found = journal.recover()
    assert logs == []
    assert [batch.step for batch in found.batches] == [2, 3, 4, 5]
    assert digest(found.batches[-1].groups[1]) == expected["groups"]["math/train/1"]
    assert {1, 10} <= positions(*found.resolved["math"])


async def test_a_wide_gap_below_the_low_water_mark_is_filled(tmp_path: Path) -> None:
    """A group that waited for long while a hundred thousand others were trained on."""
    old_journal(tmp_path)
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite3") as connection:
        connection.execute("UPDATE low_water SET position = 100000 WHERE env = 'math'")
    connection.close()
    async with open_journal(tmp_path) as journal:
        low, above = journal.recover().resolved["math"]
    assert (low, len(above)) == (1, 100_000 - 4)
    assert positions(low, above) == set(range(100_000)) - {1, 6, 7}


def test_who_only_reads_an_older_journal_is_told_what_to_do(tmp_path: Path) -> None:
    """A reader must not change the file, so it cannot bring it up to date."""
    old_journal(tmp_path)
    database = tmp_path / "journal" / "journal.sqlite3"
    before = database.read_bytes()
    with pytest.raises(
        JournalError, match="schema 1, this orchestrator reads 4; open it once with `orchestrator run`"
    ):
        JournalReader(tmp_path)
    assert database.read_bytes() == before


async def test_a_migration_that_fails_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    """All steps are one transaction, and the failure is a JournalError."""
    old_journal(tmp_path)
    database = tmp_path / "journal" / "journal.sqlite3"
    with sqlite3.connect(database) as connection:
        connection.execute("ALTER TABLE batches ADD COLUMN row_checksum INTEGER")
    connection.close()
    with pytest.raises(JournalError, match="row_checksum"):
        open_journal(tmp_path)
    connection = sqlite3.connect(database)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT position FROM low_water WHERE env = 'math'").fetchone() == (6,)
    connection.close()
