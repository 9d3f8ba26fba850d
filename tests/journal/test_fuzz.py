"""Damaged journals: whatever byte is flipped, wherever a file is cut, whichever is gone, nothing is made up.

A small real journal, closed in order or copied while it was in use, is damaged in one place at random. Then it is opened,
recovered and read in every way there is. Each batch and group that comes back is the one that was recorded, every
failure is a JournalError, and whatever is missing or different was told.
"""

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch, Group
from orchestrator.journal import Journal, JournalReader, Recovered
from tests.support.journal_groups import batch_facts, facts, make_group
from tests.support.journal_opening import open_journal

KEEP = 2


class Original:
    """A journal on disk as it was recorded, and what it holds."""

    def __init__(self, run_dir: Path, groups: dict[str, Group], batches: dict[int, Batch]) -> None:
        self.run_dir = run_dir
        self.groups = groups
        self.batches = {step: batch_facts(batch) for step, batch in batches.items()}
        self.files = sorted(path for path in (run_dir / "journal").rglob("*") if path.is_file())
        self.picture: Any = None


async def record(run_dir: Path, copy: Path) -> Original:
    """Two lives, the second compressed; the run directory is copied while the second is going on."""
    groups = {
        f"{env}/train/{n}": make_group(n, env, longest=30) for env in ("math", "code") for n in range(8)
    }
    batches: dict[int, Batch] = {}

    async def form(journal: Journal, *names: str) -> None:
        step, durable = len(batches) + 1, asyncio.Event()
        batches[step] = Batch(step, step - 1, tuple(groups[name] for name in names))
        journal.record_batch(batches[step], durable.set)
        await durable.wait()

    async with open_journal(run_dir, keep_batches=KEEP, fsync=False) as journal:
        journal.set_meta("seed", "7")
        for group in list(groups.values())[:10]:
            journal.record_group(group)
        for step, names in enumerate(
            (("math/train/0", "math/train/2"), ("math/train/3",), ("math/train/1",)), 1
        ):
            await form(journal, *names)
            journal.record_ack(step, 0, world_size=2)
            journal.record_ack(step, 1, world_size=2)
            journal.record_acknowledged(step)
        journal.prune("math", 4)
        journal.record_task("math", 5, "filtered")
        journal.record_eval({"env": "math", "step": 2, "version": 1, "avg": 0.5})
    async with open_journal(run_dir, keep_batches=KEEP, compress=6, fsync=False) as journal:
        for group in list(groups.values())[10:]:
            journal.record_group(group)
        whole = groups["code/train/4"]
        for part in journal.split_group(whole, 3):
            groups[part.id] = part
        await form(journal, "code/train/4", "math/train/6")
        await form(journal, "math/train/4", "code/train/2", "code/train/0")
        journal.record_ack(4, 1, world_size=2)
        journal.record_states({"version": {"published": [0, 1], "path": "ckpt/1", "trained": 3}})
        journal.record_task("code", 9, "given_up:timeout")
        await journal.flush()
        shutil.copytree(run_dir, copy)
        (copy / "journal" / "journal.sqlite3-shm").unlink()
    return Original(run_dir, groups, batches)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Original]:
    """The journal as it is after a close in order, and as a kill leaves it."""
    directory = tmp_path_factory.mktemp("fuzz")
    closed = asyncio.run(record(directory / "closed", directory / "killed"))
    killed = Original(directory / "killed", closed.groups, {})
    killed.batches = closed.batches
    for original in (closed, killed):
        shutil.copytree(original.run_dir, directory / "whole")
        told, original.picture = asyncio.run(use(original, directory / "whole"))
        assert told == []
        shutil.rmtree(directory / "whole")
    assert closed.picture == killed.picture
    return [closed, killed]


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one of the ways there are; says how. Flips are where something is written, not in empty pages."""
    data = path.read_bytes()
    size = len(data)
    way = rng.choice([*["flip"] * 7, "cut", "remove", "zero"])
    place = rng.randrange(size) if size else 0
    if way == "flip" and any(data):
        place = rng.choice([number for number, byte in enumerate(data) if byte])
    if way == "remove" or size == 0:
        path.unlink()
    elif way == "cut":
        os.truncate(path, place)
    else:
        with path.open("r+b") as file:
            file.seek(place)
            old = file.read(1 if way == "flip" else 512)
            file.seek(place)
            file.write(bytes([old[0] ^ (1 << rng.randrange(8))]) if way == "flip" else bytes(len(old)))
    return f"{way} {path.name} at {place} of {size}"


async def use(original: Original, run_dir: Path) -> tuple[list[str], Any]:
    """Open, recover and read a journal in every way; returns what was told, and a picture of what came back."""
    picture: Any = None
    with capture_logs() as logs:
        told = []
        try:
            async with open_journal(run_dir, keep_batches=KEEP, fsync=False) as journal:
                recovered = journal.recover(world_size=2)
                told += recovered.damaged
                check(original, recovered)
                for step in original.batches:
                    batch = journal.load_batch(step)
                    assert batch is None or batch_facts(batch) == original.batches[step]
                await journal.flush()
            with JournalReader(run_dir) as reader:
                for group in reader.groups():
                    assert facts(group) == facts(original.groups[group.id])
                people = (reader.counters(), [row.step for row in reader.batches()], len(reader.evals()))
            picture = (paint(recovered), people)
        except JournalError as error:
            told.append(str(error))
    return told + [event["event"] for event in logs if event["log_level"] == "warning"], picture


def check(original: Original, recovered: Recovered) -> None:
    """Nothing is other than it was recorded, and no step that was served is forgotten."""
    assert recovered.last_step == len(original.batches)
    for batch in recovered.batches:
        assert batch_facts(batch) == original.batches[batch.step]
    assert {4, 5} <= {batch.step for batch in recovered.batches}, "a batch that somebody needs is missing"
    for group in recovered.groups:
        assert facts(group) == facts(original.groups[group.id])


def paint(recovered: Recovered) -> tuple[Any, ...]:
    return (
        [group.id for group in recovered.groups],
        [batch.step for batch in recovered.batches],
        recovered.acknowledged,
        recovered.acks,
        recovered.resolved,
        recovered.state,
        recovered.last_acknowledged,
    )


def fuzz(originals: list[Original], directory: Path, *, rounds: int, seed: int) -> None:
    told_of = 0
    for number in range(rounds):
        rng = random.Random(f"{seed}:{number}")
        original = rng.choice(originals)
        run_dir = directory / "run"
        shutil.copytree(original.run_dir, run_dir)
        files = original.files + [path for path in original.files if path.suffix.startswith(".sqlite3")] * 2
        what = damage(run_dir / rng.choice(files).relative_to(original.run_dir), rng)
        try:
            told, picture = asyncio.run(use(original, run_dir))
        except Exception as error:
            error.add_note(f"round {number}: {original.run_dir.name}: {what}")
            raise
        assert told or picture == original.picture, (
            f"round {number}: {original.run_dir.name}: {what}: not told"
        )
        told_of += bool(told)
        shutil.rmtree(run_dir)
    assert told_of > rounds / 2


def test_a_damaged_journal_is_told_and_never_changes_a_batch(
    originals: list[Original], tmp_path: Path
) -> None:
    """One damage at a time, a sample."""
    fuzz(originals, tmp_path, rounds=150, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_journals_damaged_a_thousand_times_over(originals: list[Original], tmp_path: Path) -> None:
    """The same with many more."""
    fuzz(originals, tmp_path, rounds=1000, seed=2)
