"""The whole service under kill -9: what a trainer has seen holds, and nothing that was finished is lost.

The proof does not take the orchestrator's word: trainers in processes of their own write down every batch before they
acknowledge it, and environments note every task that they are asked for. What the journal says at the end is held
against both.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envs.server_spec import ServerSpec
from orchestrator.archive import RolloutReader
from orchestrator.env_servers.processes import ChildProcess
from orchestrator.journal import JournalReader, Recovered
from orchestrator.local.server import run_policy_server
from orchestrator.mix import build_mix
from orchestrator.tasks.source import SourceEnv, TrainSource
from tests.integration.env_servers import ROOT, until
from tests.integration.recording_trainer import TrainerRecord, TrainerSpec, arm, read_records
from tests.integration.service_fixture import Command, TrainerProcess, env, settings, write_config

SEED = 11
BATCH = 12
RANKS = 2
MOMENTS = [(0, "received"), (1, "received"), (0, "published"), (0, "acknowledged"), (1, "acknowledged")]
"""When a trainer kills the orchestrator; rank 0 publishes."""
TASKS = 97
"""Tasks of each env: few enough that the runs below go through them several times."""


class World:
    """A run directory, its orchestrator life after life, and the trainers and two env servers beside it."""

    def __init__(
        self,
        directory: Path,
        sockets: Path,
        base_url: str,
        group_sizes: tuple[int, int, int],
        curriculum: str = "uniform",
    ) -> None:
        self.directory = directory
        self.curriculum = curriculum
        self.choices: dict[str, dict[int, int]] = {}
        """Every task that was seen to be chosen for a position; the journal gives up those that are done with."""
        # Unlike ports, nobody else can take these between two lives of the orchestrator.
        self.address = f"ipc://{sockets}/trainer"
        self.elsewhere = {name: f"ipc://{sockets}/{name}" for name in ("chat", "ranked")}
        self.run_dir = directory / "run"
        self.asked = {name: directory / f"{name}.asked" for name in ("chat", "ranked", "flaky")}
        self.mixed_sizes = len(set(group_sizes)) > 1
        envs = self._envs(*group_sizes)
        self.config = write_config(
            directory / "config.toml",
            settings(
                self.run_dir,
                base_url,
                envs,
                seed=SEED,
                curriculum={"strategy": curriculum},
                batch={"size": BATCH},
                # Random rewards of a small group are alike once in a while, and what is filtered out is not in the proof.
                dispatch={
                    "max_inflight": 48,
                    "ramp_s": 0.0,
                    "backoff_s": 0.01,
                    "keep_equal_rewards": True,
                },
                trainer={"bind": self.address, "world_size": RANKS, "keep_batches": 2},
                http={"enabled": False},
                journal={"commit_interval_s": 0.02},
            ),
        )

    def _envs(self, chat: int, ranked: int, flaky: int) -> list[dict[str, Any]]:
        return [
            env("Chat", group_size=chat, addresses=[self.elsewhere["chat"]]),
            env("Ranked", group_size=ranked, addresses=[self.elsewhere["ranked"]]),
            env("Flaky", group_size=flaky, args=self._args("flaky", 0.0)),
        ]

    def _args(self, name: str, latency_s: float) -> dict[str, Any]:
        return {"asked": str(self.asked[name]), "tasks": TASKS, "latency_s": latency_s}

    async def start(self) -> Command:
        return await Command.start("run", self.config, logs=self.directory / "logs")

    def trainer(self, rank: int, **fields: Any) -> TrainerSpec:
        return TrainerSpec(
            self.address,
            str(self.directory / f"rank-{rank}.jsonl"),
            str(self.directory / f"rank-{rank}.trigger"),
            rank=rank,
            world_size=RANKS,
            think_s=0.005,
            **fields,
        )

    def start_server(self, kind: str, latency_s: float) -> ChildProcess:
        """An env server that lives through all lives of the orchestrator."""
        name = kind.lower()
        spec = ServerSpec(
            name=name,
            id=env(kind)["id"],
            bind=self.elsewhere[name],
            args=self._args(name, latency_s),
        )
        return ChildProcess(
            [sys.executable, "-m", "envs.server"],
            first_line=msgspec.json.encode(spec) + b"\n",
            log_path=self.directory / "logs" / f"{name}.log",
            environ={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    @asynccontextmanager
    async def trainers(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for rank in range(RANKS):
                await stack.enter_async_context(await TrainerProcess.start(self.trainer(rank)))
            yield

    def record(self) -> TrainerRecord:
        """What the trainers have written down so far."""
        return read_records(self.directory / f"rank-{rank}.jsonl" for rank in range(RANKS))

    async def trained(self, command: Command, steps: int) -> None:
        """Wait until the trainers have been given so many steps."""
        while self.record().last_step < steps:
            assert command.process.returncode is None, f"the orchestrator ended:\n{command.errors()[-3000:]}"
            self.note_choices()
            await asyncio.sleep(0.01)

    def resolved(self) -> dict[str, tuple[int, list[int]]]:
        """Per env, the position below which every task is done with, and those above it that are."""
        with JournalReader(self.run_dir) as reader:
            return reader.recover().resolved

    async def caught_up(self, command: Command, before: dict[str, tuple[int, list[int]]]) -> None:
        """Wait until no task is open any more below those that were done with before; that takes a few steps."""
        patience = self.record().last_step + 60
        highest = {name: max(above, default=low - 1) for name, (low, above) in before.items()}
        while any(self.resolved()[name][0] <= position for name, position in highest.items()):
            assert self.record().last_step < patience, (
                "a task that was under way at a kill is never asked again"
            )
            assert command.process.returncode is None, command.errors()[-3000:]
            self.note_choices()
            await asyncio.sleep(0.02)

    async def end(self, command: Command) -> None:
        """Let it drain and save."""
        command.send(signal.SIGTERM)
        assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
        assert not command.processes()

    def note_choices(self) -> None:
        """What is recorded as the task of a position stays it, whatever dies in between."""
        if self.curriculum == "uniform" or not (self.run_dir / "journal" / "journal.sqlite3").exists():
            return  # an order that anybody can work out is not recorded; or it was killed before it had a journal
        with JournalReader(self.run_dir) as reader:
            found = reader.recover().chosen
        for name, chosen in found.items():
            for position, index in chosen.items():
                self._note_choice(name, position, index)

    def note_archived(self) -> None:
        """The archive says the same, and has most of what came and went between two looks at the journal."""
        if self.curriculum != "uniform":
            with RolloutReader(self.run_dir) as reader:
                for group in reader.groups(texts=False):
                    self._note_choice(group.env, group.position, group.task)

    def _note_choice(self, name: str, position: int, index: int) -> None:
        known = self.choices.setdefault(name, {}).setdefault(position, index)
        assert known == index, f"{name}/{position} is another task now"

    def check_versions(self, record: TrainerRecord) -> None:
        """Every version is served."""
        assert all(line["version"] == step - 1 for (step, _), line in record.batches.items()), (
            "the trainer publishes a version for every step, so step s is trained on version s - 1"
        )

    def prove(self) -> TrainerRecord:
        """Everything that a crash may not change, from the trainers' and the environments' own records."""
        record = self.record()
        record.check(world_size=RANKS, batch_size=BATCH)
        with JournalReader(self.run_dir) as reader:
            recovered = reader.recover(world_size=RANKS)
            counters = reader.counters()
        self.note_choices()
        self.note_archived()
        assert not recovered.damaged
        assert self.curriculum != "uniform" or not recovered.chosen, "an order that anybody can work out"
        for name, learned in recovered.learned.items():
            # One that came too late (its server was lost on the way) says something, and its task is asked again.
            late = counters[name].get("late", 0)
            assert len(learned) == counters[name]["finished"] + late, (
                "a group is counted in its task's statistics once"
            )
        self.check_versions(record)
        places = self._places(record, recovered)
        for name in self.asked:
            groups = [place for place in places if place.startswith(f"{name}/")]
            self._check_tasks(name, recovered, groups, counters[name])
        evicted = sum(_evicted(counters[name]) for name in self.asked)
        assert self.mixed_sizes or evicted <= self.too_many(), "paced work of one size is never too old"
        self._check_indices(record)
        return record

    def too_many(self) -> int:
        """How many groups of one size may have been let in beyond what could be trained in time."""
        return 0

    def _places(self, record: TrainerRecord, recovered: Recovered) -> Counter[str]:
        """Every group that was trained on, is in a formed batch, or waits for one: each in exactly one place."""
        batched = {group.id: batch.step for batch in recovered.batches for group in batch.groups}
        places = record.groups()
        # The end may come when one rank has the last batch and another has not: then its groups are in the journal alone.
        whole = {
            step for step, _ in record.batches if all((step, rank) in record.batches for rank in range(RANKS))
        }
        places.update(name for name, step in batched.items() if step not in whole and name not in places)
        places.update(group.id for group in recovered.groups)
        assert {name for name, times in places.items() if times > 1} == set()
        for (step, _), line in record.batches.items():
            for name in line["groups"]:
                assert batched.get(name, step) == step, (
                    "the journal has a group in another batch than the trainer"
                )
        assert all(step <= recovered.last_step for step, _ in record.batches)
        return places

    def _check_tasks(
        self, name: str, recovered: Recovered, groups: list[str], counts: dict[str, int]
    ) -> None:
        """No task of an env was skipped, done twice, or called done without anything to show for it."""
        low, above = recovered.resolved[name]
        resolved = [*range(low), *above]
        parts = Counter(map(position_of, groups))
        grouped = set(parts)
        waiting = {group.task.position for group in recovered.groups if group.env == name}
        # The rest of a group that was split may wait while its task is done: the other part is in a batch.
        rests = {group.task.position for group in recovered.groups if group.env == name and group.part}
        queued = waiting - rests
        assert not queued & {*range(low), *above}, "a task is resolved whose group waits for a batch"
        assert all(parts[position] > 1 for position in rests), "the other part of a split group is nowhere"
        assert grouped - queued <= set(resolved)
        evicted = _evicted(counts)
        ended_without = sum(n for what, n in counts.items() if what.startswith("given_up"))
        assert set(counts) <= {
            "finished",
            "batched",
            "split",
            "late",
            "evicted: stale",
            "evicted: surplus",
            "evicted: split_rest",
            *(w for w in counts if "given_up" in w),
        }
        assert counts["finished"] == len(grouped) + evicted, "a finished and recorded group is lost"
        assert len(grouped - queued) + ended_without == len(resolved), (
            "a position was resolved twice, or never"
        )
        if name != "flaky":
            assert ended_without == 0
        expected = self._expected(name, max(resolved) + 1)
        missing = set(resolved) - grouped
        # Choices that came and went between two looks at the journal are not known; most are.
        unknown = {position for position in missing if position not in expected}
        undone = {position for position in missing - unknown if expected[position] % 5}
        busy = sum(n for what, n in counts.items() if what == "given_up:sandbox_busy")
        assert len(undone) <= busy <= len(undone) + len(unknown), (
            "a task was given up that could have been done"
        )
        asked = Counter(map(int, self.asked[name].read_text().split()))
        owed = Counter(expected[position] for position in resolved if position in expected)
        assert owed.total() > len(resolved) / 2, "too little is known to prove anything"
        assert all(asked[index] >= times for index, times in owed.items()), "a task was never asked for"

    def _expected(self, name: str, count: int) -> dict[int, int]:
        """The tasks of an env's first positions: all of them, or those that were seen to be chosen."""
        if self.curriculum != "uniform":
            return self.choices.get(name, {})
        return dict(enumerate(task_indices(name, count)))

    def _check_indices(self, record: TrainerRecord) -> None:
        """The tokens that were trained on are of the task that the group's name stands for."""
        expected = {name: self._expected(name, 50 * TASKS) for name in ("ranked", "flaky")}
        compared = 0
        for line in record.batches.values():
            for group, index in line["indices"].items():
                name, _, position = group.split("/")
                known = expected.get(name, {}).get(int(position.partition("+")[0]))
                if known is not None:
                    compared += 1
                    assert index == known, group
        assert compared > 10


def _evicted(counts: dict[str, int]) -> int:
    return counts.get("evicted: stale", 0) + counts.get("evicted: surplus", 0)


def position_of(group: str) -> int:
    """The position of a group's task; the parts of a group that was split have the same."""
    return int(group.rpartition("/")[2].partition("+")[0])


def task_indices(name: str, count: int) -> list[int]:
    """The tasks that an env's first positions stand for."""
    mix = build_mix("weighted_round_robin", [name], [1.0], rng=random.Random(0))
    source = TrainSource([SourceEnv(name, "train", TASKS)], mix=mix, seed=SEED)
    return [source.next_task().index for _ in range(count)]


@asynccontextmanager
async def world(
    directory: Path, group_sizes: tuple[int, int, int] = (4, 4, 4), *, curriculum: str = "uniform"
) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="crash-") as sockets:
        async with run_policy_server() as base_url:
            made = World(directory, Path(sockets), base_url, group_sizes, curriculum)
            servers = [made.start_server("Chat", 0.01), made.start_server("Ranked", 0.03)]
            try:
                yield made
            finally:
                for server in servers:
                    await server.stop(grace_s=5.0)


async def kill_at_random(world: World, *, kills: int, seed: int) -> TrainerRecord:
    """SIGKILL the orchestrator so many times while batches are made, and sometimes while it starts; then prove.

    Most kills come from a trainer, in the moment in which it has been given, told or answered something.
    """
    rng = random.Random(seed)
    killed = 0
    async with world.trainers():
        while killed < kills:
            step = world.record().last_step
            async with await world.start() as command:
                way = rng.random()
                if way < 0.15:
                    await asyncio.sleep(rng.uniform(0.0, 1.5))
                    command.send(signal.SIGKILL)
                else:
                    killed += 1
                    await command.wait_event("run.started")
                    await world.trained(command, step + rng.randrange(0, 6))
                    if way < 0.4:
                        await asyncio.sleep(rng.uniform(0.0, 0.1))
                        command.send(signal.SIGKILL)
                    else:
                        rank, moment = rng.choice(MOMENTS)
                        arm(world.trainer(rank).trigger, moment, command.process.pid)
                assert await command.wait() == -signal.SIGKILL, command.errors()[-3000:]
                await until(lambda command=command: not command.processes())  # type: ignore[misc]  # binds the loop's value
                world.note_choices()
        before = world.resolved()
        async with await world.start() as command:
            await world.trained(command, world.record().last_step + 5)
            await world.caught_up(command, before)
            await world.end(command)
    return world.prove()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("curriculum", ["uniform", "frontier"])
async def test_an_orchestrator_killed_at_random_moments_loses_and_repeats_nothing(
    tmp_path: Path, curriculum: str
) -> None:
    """SIGKILL under load: no step missing or different, no group twice, no task skipped, none lost, none exchanged."""
    async with world(tmp_path, curriculum=curriculum) as one:
        record = await kill_at_random(one, kills=8, seed=1)
    assert record.last_step > 8


TURNS = [
    ((4, 3, 2), "difficulty"),
    ((4, 3, 2), "uniform"),
    ((4, 4, 4), "frontier"),
    ((4, 4, 4), "difficulty"),
    ((4, 4, 4), "uniform"),
    ((4, 3, 2), "frontier"),
]
"""Sizes of groups and curricula; the first has both, for whoever runs a single seed."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(int(os.environ.get("CRASH_SEEDS", "2"))))
async def test_an_orchestrator_killed_at_random_moments_many_times_over(tmp_path: Path, seed: int) -> None:
    """The same with thirty kills a seed, by turns with groups of different sizes and with curricula; `make crash` has more seeds."""
    sizes, curriculum = TURNS[seed % len(TURNS)]
    async with world(tmp_path, sizes, curriculum=curriculum) as one:
        await kill_at_random(one, kills=30, seed=seed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("die", ["before_ack", "after_ack"])
async def test_a_trainer_killed_beside_its_acknowledgement_gets_what_it_needs(
    tmp_path: Path, die: str
) -> None:
    """Killed before, with its version published: the same bytes again. Killed after: the next step. Every version counts once, and the other
    rank notices nothing."""
    async with (
        world(tmp_path) as one,
        await one.start() as command,
        await TrainerProcess.start(one.trainer(1)),
    ):
        async with await TrainerProcess.start(one.trainer(0, die_at=4, die=die)) as mortal:
            processes = (mortal.process, command.process)
            await until(lambda: any(process.returncode is not None for process in processes))
            assert mortal.process.returncode == -signal.SIGKILL, command.errors()[-3000:]
        async with await TrainerProcess.start(one.trainer(0)):
            await one.trained(command, 8)
            await one.end(command)
        published = [event["version"] for event in command.events("trainer.version_published")]
        again = [event["version"] for event in command.events("trainer.version_ignored")]
    record = one.prove()
    assert published == list(range(1, len(published) + 1))
    assert again == ([4] if die == "before_ack" else [])
    assert record.served[4, 0] == (2 if die == "before_ack" else 1)
    assert all(times == 1 for key, times in record.served.items() if key != (4, 0))


@pytest.mark.timeout(600)
async def test_a_trainer_may_die_together_with_the_orchestrator(tmp_path: Path) -> None:
    """Both sides killed at the same moment, several times: each begins again where the records meet."""
    rng = random.Random(5)
    async with world(tmp_path) as one:
        for _ in range(2):
            before = one.record().last_step
            async with one.trainers(), await one.start() as command:
                await one.trained(command, before + rng.randrange(2, 6))
                command.send(signal.SIGKILL)
        resolved = one.resolved()
        async with one.trainers(), await one.start() as command:
            await one.trained(command, one.record().last_step + 3)
            await one.caught_up(command, resolved)
            await one.end(command)
    record = one.prove()
    assert max(record.served.values()) <= 4
