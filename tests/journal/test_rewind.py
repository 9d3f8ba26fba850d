"""Setting a run back to an earlier step."""

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch, Group
from orchestrator.journal import Journal, JournalReader
from orchestrator.journal.rewinding import find_obstacle, rewind
from tests.support.journal_groups import facts, make_group
from tests.support.journal_opening import open_journal, open_store


async def form(journal: Journal, step: int, groups: Collection[Group]) -> Batch:
    """A batch on disk, with the states and the version that go with it."""
    batch, durable = Batch(step, step - 1, tuple(groups)), asyncio.Event()
    version = {
        "published": list(range(step)),
        "serving": step - 1,
        "path": f"ckpt/{step - 1}",
        "trained": step - 1,
    }
    journal.record_batch(batch, durable.set, states={"version": version, "mix": {"step": step}})
    await durable.wait()
    return batch


async def train(journal: Journal, steps: int, *, positions: list[int]) -> dict[int, Batch]:
    """Steps of two groups each; a task is filtered out after each, and the step's version is published."""
    batches = {}
    for step in range(1, steps + 1):
        groups = [make_group(positions.pop(0)) for _ in range(2)]
        for group in groups:
            journal.record_group(group)
        batches[step] = await form(journal, step, groups)
        journal.record_task("math", positions.pop(0), "equal_rewards")
        journal.record_version(step, step, f"ckpt/{step}")
        journal.record_ack(step, 0, world_size=1)
        journal.record_acknowledged(step)
        journal.record_report(step, {"loss": float(step)})
        journal.record_eval({"env": "math", "step": step, "version": step})
        journal.record_states({"mix": {"step": step, "acknowledged": True}})
    return batches


def resolved(run_dir: Path) -> set[int]:
    """Positions of the env that are not asked again."""
    with JournalReader(run_dir) as reader:
        low, above = reader.recover().resolved.get("math", (0, []))
    return {*range(low), *above}


async def test_later_batches_are_given_up_and_their_tasks_asked_again(tmp_path: Path) -> None:
    """Whatever was pruned or given back meanwhile; what was filtered out stays so, and what is kept has its bytes."""
    async with open_journal(tmp_path, keep_batches=5) as journal:
        batches = await train(journal, 8, positions=list(range(24)))
        journal.record_group(make_group(100))
        journal.prune("math", 24)
    async with open_journal(tmp_path, keep_batches=5, rewind_to=4) as journal:
        rewound, recovered = journal.rewound, journal.recover()
        assert rewound is not None
        assert (rewound.last_step, rewound.batches, rewound.tasks, rewound.version) == (8, 4, 8, 4)
        assert rewound.path == "ckpt/4"
        assert (recovered.last_step, recovered.last_acknowledged, recovered.groups) == (4, 4, [])
        given_up = {group.task.position for step in range(5, 9) for group in batches[step].groups}
        assert resolved(tmp_path) == set(range(24)) - given_up
        assert recovered.state["mix"] == {"step": 4}
        assert recovered.state["version"]["published"] == [0, 1, 2, 3, 4]
        assert recovered.state["version"]["loaded_path"] == "ckpt/4"
        assert recovered.state["version"]["trained"] == 4
        kept = journal.load_batch(4)
        assert kept is not None
        assert [facts(group) for group in kept.groups] == [facts(group) for group in batches[4].groups]
        with JournalReader(tmp_path) as reader:
            assert [batch.step for batch in reader.batches()] == [1, 2, 3, 4]
            assert [result["step"] for result in reader.evals()] == [1, 2, 3]
        for group in (make_group(12), make_group(13)):
            journal.record_group(group)
        await form(journal, 5, [make_group(12), make_group(13)])
    async with open_journal(tmp_path) as journal:
        assert journal.recover().last_step == 5


async def test_what_is_queued_stays_if_the_weights_that_are_left_sampled_it(tmp_path: Path) -> None:
    """A group of later weights is asked again, one of earlier weights is trained on."""
    async with open_journal(tmp_path) as journal:
        await train(journal, 3, positions=list(range(20, 29)))
        for position in (0, 1, 7):  # made by the versions of their own number
            journal.record_group(make_group(position))
    async with open_journal(tmp_path, rewind_to=2) as journal:
        assert [group.task.position for group in journal.recover().groups] == [0, 1]


async def test_a_group_that_was_split_between_two_batches_is_not_trained_on_twice(tmp_path: Path) -> None:
    """Where an earlier batch has a part of it, the rest is given up; where none has, the whole task is asked again."""
    async with open_journal(tmp_path) as journal:
        for position in (0, 1):
            journal.record_group(make_group(position))
        first, rest = journal.split_group(make_group(0), 2)
        await form(journal, 1, [first])
        other_first, other_rest = journal.split_group(make_group(1), 2)
        await form(journal, 2, [rest, other_first])
        assert other_rest.part == 2  # stays queued
    async with open_journal(tmp_path, rewind_to=1) as journal:
        assert journal.recover().groups == []
        assert resolved(tmp_path) == {0}


@pytest.mark.parametrize("seed", range(20))
async def test_any_history_can_be_set_back_to_any_step(tmp_path: Path, seed: int) -> None:
    """Trained on, filtered out and open add up to all positions, each in one place, and the journal opens again and again."""
    rng = random.Random(seed)
    steps = rng.randint(2, 9)
    positions = list(range(3 * steps))
    rng.shuffle(positions)
    async with open_journal(tmp_path, keep_batches=rng.randint(1, 4)) as journal:
        batches = await train(journal, steps, positions=positions)
        low = rng.choice([0, 3 * steps])
        if low:
            journal.prune("math", low)
    at = steps
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(1, at)
        async with open_journal(tmp_path, rewind_to=at) as journal:
            assert journal.recover().last_step == at
        trained = {group.task.position for step in range(1, at + 1) for group in batches[step].groups}
        all_trained = {group.task.position for batch in batches.values() for group in batch.groups}
        assert resolved(tmp_path) == set(range(3 * steps)) - (all_trained - trained)


async def test_a_process_that_dies_on_the_way_leaves_a_journal_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the commit nothing has changed, and the same command works afterwards."""
    async with open_journal(tmp_path) as journal:
        await train(journal, 5, positions=list(range(15)))

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.journal.rewinding.reopen", die)
        with pytest.raises(KeyboardInterrupt):
            rewind(tmp_path, 2, fsync=True, find_flaw=lambda version, path: "")
    async with open_journal(tmp_path) as journal:
        assert journal.recover().last_step == 5
    async with open_journal(tmp_path, rewind_to=2) as journal:
        assert journal.recover().last_step == 2


async def test_a_process_that_dies_as_it_overwrites_a_file_of_a_given_up_step_leaves_a_journal_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its new number before it has its new header; the old one tells of a step that nobody has any more."""
    async with open_journal(tmp_path) as journal:
        await train(journal, 5, positions=list(range(15)))
    async with open_journal(tmp_path) as journal:
        journal.record_group(make_group(100))  # in a file that was begun behind step 5
    rewind(tmp_path, 2, fsync=True, find_flaw=lambda version, path: "")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    store = open_store(tmp_path)
    store.begin(sync=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", die)
        with pytest.raises(KeyboardInterrupt):
            store.add_group(make_group(101))
    store.close()
    async with open_journal(tmp_path) as journal:
        assert journal.recover().last_step == 2


async def test_a_copy_from_before_is_refused(tmp_path: Path) -> None:
    """Its later steps would be served again, although others were served in their place."""
    async with open_journal(tmp_path) as journal:
        await train(journal, 5, positions=list(range(15)))
    shutil.copy(tmp_path / "journal" / "journal.sqlite3", tmp_path / "copy")
    async with open_journal(tmp_path, rewind_to=2):
        pass
    shutil.copy(tmp_path / "copy", tmp_path / "journal" / "journal.sqlite3")
    with pytest.raises(JournalError, match="from before the run was set back"):
        open_journal(tmp_path)


@pytest.mark.parametrize("step", [0, -1, 4, 100])
async def test_a_step_that_is_not_there_is_refused(tmp_path: Path, step: int) -> None:
    """With the steps that are, and nothing changes."""
    async with open_journal(tmp_path) as journal:
        await train(journal, 3, positions=list(range(9)))
    with pytest.raises(JournalError, match="it has the steps 1 to 3"):
        open_journal(tmp_path, rewind_to=step)
    async with open_journal(tmp_path) as journal:
        assert journal.recover().last_step == 3


async def test_where_nothing_can_be_set_back_it_says_so(tmp_path: Path) -> None:
    """No run at all, and steps of an older version of the program."""
    with pytest.raises(JournalError, match="no run here"):
        open_journal(tmp_path, rewind_to=1)
    async with open_journal(tmp_path) as journal:
        await train(journal, 3, positions=list(range(9)))
    with sqlite3.connect(tmp_path / "journal" / "journal.sqlite3") as connection:
        connection.execute("UPDATE batches SET states = NULL WHERE step < 3")
    connection.close()
    with pytest.raises(JournalError, match="set it back to step 3 or later"):
        open_journal(tmp_path, rewind_to=2)


async def test_a_step_whose_weights_are_gone_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    """Before anything changes: found only now, the run would wait for weights that nobody has."""
    async with open_journal(tmp_path) as journal:
        await train(journal, 5, positions=list(range(15)))

    def find_flaw(version: int, path: str | None) -> str:
        return "" if path in ("ckpt/3", "ckpt/5") else f"there is nothing in {path}"

    with pytest.raises(JournalError, match=r"there is nothing in ckpt/2; there are weights of steps 3, 5$"):
        open_journal(tmp_path, rewind_to=2, find_flaw=find_flaw)
    async with open_journal(tmp_path, rewind_to=3, find_flaw=find_flaw) as journal:
        assert journal.recover().last_step == 3


async def test_a_checkpoint_that_was_reported_after_the_step_does_not_count_any_more(tmp_path: Path) -> None:
    """Batches that are formed again under the numbers of given up ones are kept until they are reported as saved."""
    async with open_journal(tmp_path, keep_batches=None) as journal:
        await train(journal, 6, positions=list(range(18)))
        journal.record_checkpoint(5)
    async with open_journal(tmp_path, keep_batches=None, rewind_to=3) as journal:
        for step in (4, 5, 6):
            group = make_group(100 + step)
            journal.record_group(group)
            await form(journal, step, [group])
            journal.record_acknowledged(step)
    async with open_journal(tmp_path, keep_batches=None) as journal:
        assert journal.kept[0] == 3
        group = make_group(200)
        journal.record_group(group)
        await form(journal, 7, [group])
        journal.record_acknowledged(7)
        await journal.flush()
        assert journal.kept[0] == 4
        assert [journal.load_batch(step) is not None for step in range(3, 8)] == [
            False,
            True,
            True,
            True,
            True,
        ]


async def test_a_run_that_goes_on_can_be_asked_whether_it_could_be_set_back(tmp_path: Path) -> None:
    """The answer is what setting it back would say; asking changes nothing."""
    assert "unable to open" in find_obstacle(tmp_path, 1, find_flaw=lambda version, path: "")
    async with open_journal(tmp_path) as journal:
        await train(journal, 4, positions=list(range(12)))
        await journal.flush()
        assert find_obstacle(tmp_path, 2, find_flaw=lambda version, path: "") == ""
        assert "it has the steps 1 to 4" in find_obstacle(tmp_path, 5, find_flaw=lambda version, path: "")
        gone = find_obstacle(
            tmp_path, 2, find_flaw=lambda version, path: "it is gone" if path == "ckpt/2" else ""
        )
        assert (
            "its weights (version 2) cannot be gone back to: it is gone; there are weights of steps" in gone
        )
        assert journal.recover().last_step == 4


async def test_a_version_without_a_path_is_asked_for_before_anything_is_given_up(tmp_path: Path) -> None:
    """Where later ones were published; the engines of a run that never had another still have it."""
    asked: list[tuple[int, str | None]] = []

    def find_flaw(version: int, path: str | None) -> str:
        asked.append((version, path))
        return "nobody can load it" if path is None else ""

    async with open_journal(tmp_path) as journal:
        for step in (1, 2):
            journal.record_group(group := make_group(step))
            await form(journal, step, [group])
        journal.record_version(0, 1, None)
    async with open_journal(tmp_path, rewind_to=1, find_flaw=find_flaw):
        assert asked == []
    async with open_journal(tmp_path) as journal:
        journal.record_group(group := make_group(2))
        await form(journal, 2, [group])
        journal.record_version(2, 2, "ckpt/2")
    with pytest.raises(
        JournalError, match=r"version 0\) cannot be gone back to: nobody can load it; .* step 2"
    ):
        open_journal(tmp_path, rewind_to=1, find_flaw=find_flaw)
    assert asked[0] == (0, None)
    with JournalReader(tmp_path) as reader:
        assert [row.step for row in reader.batches()] == [1, 2]
