"""The journal under kill -9 and torn writes: nothing that was called durable is lost, nothing is there twice."""

import asyncio
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch
from orchestrator.journal import JournalReader, Recovered
from tests.support.journal_groups import all_facts, batch_facts, make_group
from tests.support.journal_opening import open_journal
from tests.support.journal_victim import ENVS, TASKS_PER_ENV

ROOT = Path(__file__).parents[2]


class Record:
    """What the killed processes had said, and whether a recovered journal agrees with it."""

    def __init__(self) -> None:
        self.batches: dict[int, list[str]] = {}
        self.acks: set[tuple[int, int]] = set()
        self.tasks: set[tuple[str, int]] = set()
        self.finished = False

    def note(self, line: str) -> None:
        match line.split():
            case ["batch", step, *groups]:
                assert int(step) not in self.batches, "a step was formed twice"
                self.batches[int(step)] = groups
            case ["ack", step, rank]:
                self.acks.add((int(step), int(rank)))
            case ["task", env, position]:
                self.tasks.add((env, int(position)))
            case ["evicting", env, position]:
                self.tasks.discard((env, int(position)))
            case ["finished", _]:
                self.finished = True

    def check(self, recovered: Recovered) -> None:
        assert not recovered.damaged
        for group in recovered.groups:
            assert all_facts(group) == all_facts(make_group(group.task.position, group.env))
        # A batch may be durable without its process having lived to say so; from now on it is known.
        for batch in recovered.batches:
            said = self.batches.setdefault(batch.step, [group.id for group in batch.groups])
            assert said == [group.id for group in batch.groups]
            assert batch_facts(batch) == batch_facts(
                Batch(
                    batch.step,
                    batch.step - 1,
                    tuple(make_group(g.task.position, g.env) for g in batch.groups),
                )
            )
        assert sorted(self.batches) == list(range(1, recovered.last_step + 1))
        places = Counter(name for names in self.batches.values() for name in names)
        places.update(group.id for group in recovered.groups)
        assert set(places.values()) <= {1}, "a group is in two batches, or in a batch and in the queue"
        unacknowledged = {batch.step for batch in recovered.batches} - recovered.acknowledged
        for step, rank in self.acks:
            assert step not in unacknowledged or rank in recovered.acks[step]
        self._check_tasks(recovered)

    def _check_tasks(self, recovered: Recovered) -> None:
        resolved = {env: recovered.resolved.get(env, (0, [])) for env in ENVS}

        def is_resolved(env: str, position: int) -> bool:
            low, above = resolved[env]
            return position < low or position in above

        queued = {(group.env, group.task.position) for group in recovered.groups}
        for env, position in self.tasks:
            assert is_resolved(env, position) or (env, position) in queued, (
                "a task that was called done is not"
            )
        for name in (name for names in self.batches.values() for name in names):
            env, _, number = name.split("/")
            assert is_resolved(env, int(number)), "the task of a group in a batch would be asked again"
        for env, position in queued:
            assert not is_resolved(env, position), (
                "a queued group's task is called done before it is trained on"
            )


def run_and_kill(run_dir: Path, seed: int, lines: int | None, record: Record) -> None:
    """Run the victim until it has said so many lines, then SIGKILL it; None lets it finish."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.journal_victim", str(run_dir), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        killed = False
        for number, line in enumerate(process.stdout):
            record.note(line)
            if lines is not None and number >= lines:
                process.kill()
                killed = True
                break
        for line in process.stdout:
            if line.endswith("\n"):
                record.note(line)
    # The kill may come between the last line and the end.
    assert process.returncode in ((-9, 0) if killed and record.finished else (-9,) if killed else (0,))


def kill_at_random(run_dir: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    record = Record()
    for number in range(rounds):
        run_and_kill(run_dir, seed * 1000 + number, rng.randrange(0, 25), record)
        with JournalReader(run_dir) as reader:
            record.check(reader.recover(world_size=2))
        if record.finished:
            return
    run_and_kill(run_dir, seed, None, record)
    with JournalReader(run_dir) as reader:
        recovered = reader.recover(world_size=2)
        filtered = sum(counts.get("filtered", 0) for counts in reader.counters().values())
    record.check(recovered)
    # None skipped: every task of the run ended as a group in one place, or filtered.
    done = {(env, p) for env, (low, above) in recovered.resolved.items() for p in (*range(low), *above)}
    done |= {(group.env, group.task.position) for group in recovered.groups}
    assert done == {(env, position) for env in ENVS for position in range(TASKS_PER_ENV)}
    grouped = sum(len(names) for names in record.batches.values()) + len(recovered.groups)
    assert grouped + filtered == len(ENVS) * TASKS_PER_ENV


def test_a_run_killed_at_random_moments_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    """SIGKILL after SIGKILL: durable batches, acks and tasks are there, every group in one place, no task skipped."""
    kill_at_random(tmp_path, rounds=8, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_run_killed_at_random_moments_many_times_over(tmp_path: Path, seed: int) -> None:
    """The same with many more kills."""
    kill_at_random(tmp_path, rounds=20, seed=seed)


async def record_run(run_dir: Path) -> tuple[list[int], dict[int, int]]:
    """Record 40 groups and 8 batches, killed in effect: the journal is copied while it is open.

    Returns the positions in order, and how long the WAL was when each batch was called durable.
    """
    live = run_dir.with_name("live")
    synced: dict[int, int] = {}
    wal = live / "journal" / "journal.sqlite3-wal"
    async with open_journal(live, commit_interval_s=0.001) as journal:
        queue = []
        for position in range(40):
            journal.record_group(make_group(position))
            queue.append(make_group(position))
            if position % 3 == 0:
                await journal.flush()
            if position % 5 == 4:
                step, durable = position // 5 + 1, asyncio.Event()
                journal.record_batch(Batch(step, step - 1, tuple(queue[:3])), durable.set)
                del queue[:3]
                await durable.wait()
                synced[step] = wal.stat().st_size
        shutil.copytree(live, run_dir)
    return list(range(40)), synced


async def test_a_torn_wal_leaves_a_consistent_prefix(tmp_path: Path) -> None:
    """Wherever the WAL is cut, what is left is the run as it was at some earlier moment."""
    positions, synced = await record_run(tmp_path / "whole")
    wal_bytes = (tmp_path / "whole" / "journal" / "journal.sqlite3-wal").stat().st_size
    rng = random.Random(3)
    seen = set()
    for cut in [0, 31, 32, *(rng.randrange(wal_bytes) for _ in range(30)), wal_bytes]:
        torn = tmp_path / "torn"
        shutil.copytree(tmp_path / "whole", torn)
        (torn / "journal" / "journal.sqlite3-shm").unlink(missing_ok=True)
        with (torn / "journal" / "journal.sqlite3-wal").open("r+b") as file:
            file.truncate(cut)
        ended = max((step for step, size in synced.items() if size <= cut), default=0)
        if ended < max(synced):
            refusal = rf"(ends at step {ended}|is empty), but step {max(synced)} .*was served"
            with pytest.raises(JournalError, match=refusal) as refused:
                open_journal(torn)
            if "is empty" in str(refused.value):
                (torn / "journal" / "mark.json").unlink()
                with pytest.raises(JournalError, match="is empty, but 1 payload files lie beside it"):
                    open_journal(torn)
                shutil.rmtree(torn)
                continue
        # Without the mark nothing tells that there was more; what is left is consistent all the same.
        (torn / "journal" / "mark.json").unlink()
        async with open_journal(torn) as journal:
            recovered = journal.recover()
        batched = [group.task.position for batch in recovered.batches for group in batch.groups]
        queued = [group.task.position for group in recovered.groups]
        count = len(batched) + len(queued)
        assert sorted(batched + queued) == positions[:count]
        assert sorted(recovered.resolved.get("math", (0, []))[1]) == sorted(batched)
        assert [batch.step for batch in recovered.batches] == list(range(1, len(recovered.batches) + 1))
        assert all(batch.step in range(1, recovered.last_step + 1) for batch in recovered.batches)
        for step, size in synced.items():
            assert cut < size or recovered.last_step >= step, "a batch that may have been served is gone"
        seen.add(count)
        shutil.rmtree(torn)
    assert len(seen) > 5
