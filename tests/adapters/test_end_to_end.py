"""Environments of all families in one configuration, served, killed and trained on by the real service."""

import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.local.server import PolicyServerSpec, serve
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch
from tests.adapters.conftest import HERE, Driver
from tests.adapters.venvs import (
    ATROPOS,
    CLASSIC,
    INSPECT,
    OPENENV,
    REASONING_GYM,
    TEXTARENA,
    V1,
    Venv,
)
from tests.integration.service_fixture import Command, settings, write_config

BATCH = 200
SLOW_TO_GENERATE = {"futoshiki", "knight_swap"}
"""A second or more for each problem, which is the library's time and not what is tested here."""


@pytest.fixture(scope="module", autouse=True)
def _venvs() -> None:
    for venv in (ATROPOS, CLASSIC, INSPECT, OPENENV, REASONING_GYM, TEXTARENA, V1):
        if venv.missing():
            pytest.skip(venv.missing())


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory whose paths are short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def table(name: str, venv: Venv, env_id: str, ratio: float, **fields: Any) -> dict[str, Any]:
    """A [[train.env]] that is served by a virtualenv of its own."""
    return {"name": name, "id": env_id, "ratio": ratio, "python": str(venv.python), **fields}


def environments(datasets: list[str]) -> list[dict[str, Any]]:
    """Twenty datasets of reasoning-gym, a classic group rubric, classic tools over several turns, a v1 taskset."""
    classic = "verifiers::classic-tested"
    return [
        table("group", CLASSIC, classic, 0.2, args={"kind": "group"}),
        table("tools", CLASSIC, classic, 0.1, args={"kind": "text_tools"}),
        table("taskset", V1, "verifiers::v1-tested", 0.1),
        *(table(name, REASONING_GYM, f"reasoning_gym::{name}", 0.6 / len(datasets)) for name in datasets),
    ]


def delivered(batches: list[TrainingBatch]) -> Counter[str]:
    """Sequences of each env."""
    return Counter(sequence.env for batch in batches for sequence in batch.sequences)


def on_target(batches: list[TrainingBatch], envs: list[dict[str, Any]]) -> bool:
    """Whether every env has its share of all these batches, but for two percentage points."""
    total, shares = sum(map(len, batches)), delivered(batches)
    return all(abs(shares[env["name"]] / total - env["ratio"]) <= 0.02 for env in envs)


async def train(
    address: str, command: Command, killed: list[str], *, settled: Callable[[list[TrainingBatch]], bool]
) -> tuple[list[TrainingBatch], list[TrainingBatch]]:
    """Batches before and after the servers of some envs are killed; ends when all of these are back in batches.

    They are killed when the batches before have `settled`: a library that takes seconds for its first rollout is in none
    of the first batches, which do not wait for it, and has what it is owed in later ones.
    """
    before: list[TrainingBatch] = []
    after: list[TrainingBatch] = []
    running = True
    async with AsyncTrainerClient(address) as trainer:
        async for batch in trainer:
            if running:
                before.append(batch)
                if settled(before):
                    running = False
                    ready = len(command.events("env.ready"))
                    kill(command, killed)
                    # Holding the batch holds the run, so that the envs can come back.
                    await command.wait_event("env.ready", ready + len(killed))
                continue
            after.append(batch)
            if all(delivered(after)[name] for name in killed):
                break
    return before, after


def kill(command: Command, names: list[str]) -> None:
    """End the servers of these envs by SIGKILL."""
    started = {event["env"]: event["pid"] for event in command.events("env.server_started")}
    for name in names:
        os.kill(started[name], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_all_families_train_together_and_survive_the_loss_of_their_servers(
    tmp_path: Path, sockets: Path, reasoning_gym: Driver
) -> None:
    """Every batch has its exact size, the mix comes to the configured one, and killed servers come back."""
    names = sorted(set(reasoning_gym.names("reasoning_gym")) - SLOW_TO_GENERATE - {"composite"})
    datasets = random.Random(os.environ.get("DATASETS_SEED", "0")).sample(names, 20)
    envs = environments(datasets)
    address = f"ipc://{sockets}/trainer"
    async with serve(PolicyServerSpec(max_model_len=65536)) as base_url:
        config = write_config(
            tmp_path / "config.toml",
            settings(
                tmp_path / "run",
                base_url,
                envs,
                batch={"size": BATCH, "max_buffered": 1},
                train={"group_size": 2},
                dispatch={"max_inflight": 96, "keep_equal_rewards": True},
                trainer={"bind": address},
            ),
        )
        path = os.pathsep.join((str(HERE / "environments"), os.environ.get("PYTHONPATH", "")))
        async with await Command.start("run", config, logs=tmp_path / "logs", PYTHONPATH=path) as command:
            await command.wait_event("run.started")
            killed = ["group", "taskset", datasets[0]]
            async with asyncio.timeout(1000):
                before, after = await train(
                    address, command, killed, settled=lambda batches: on_target(batches, envs)
                )
            command.send(signal.SIGTERM)
            assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
            started = Counter(event["env"] for event in command.events("env.server_started"))
    assert {len(batch) for batch in before + after} == {BATCH}
    assert {env["name"]: started[env["name"]] for env in envs} == {
        env["name"]: 2 if env["name"] in killed else 1 for env in envs
    }
    assert on_target(before, envs), delivered(before)


@pytest.mark.adapters
@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_served_games_groups_and_evals_train_together_and_survive_the_loss_of_their_servers(
    tmp_path: Path, sockets: Path
) -> None:
    """OpenEnv, TextArena, Atropos and Inspect: batches have their size, with sequences of all of them before and after a kill."""
    families = {
        "walk": (OPENENV, "openenv::openenv_tested:walk", {"max_turns": 2}),
        "game": (TEXTARENA, "textarena::TicTacToe-v0", {}),
        "reversing": (ATROPOS, "atropos::atropos_tested:Reversing", {}),
        "sums": (INSPECT, "inspect::inspect_tested/sums", {"log_dir": str(tmp_path / "inspect")}),
    }
    envs = [
        table(name, venv, env_id, 0.25, args=args, ready_timeout_s=600)
        for name, (venv, env_id, args) in families.items()
    ]
    address = f"ipc://{sockets}/trainer"
    async with serve(PolicyServerSpec(max_model_len=65536)) as base_url:
        config = write_config(
            tmp_path / "config.toml",
            settings(
                tmp_path / "run",
                base_url,
                envs,
                batch={"size": 64, "max_buffered": 1},
                train={"group_size": 2, "sampling": {"temperature": 1.0, "max_tokens": 8}},
                dispatch={"max_inflight": 64, "keep_equal_rewards": True},
                trainer={"bind": address},
            ),
        )
        path = os.pathsep.join((str(HERE / "environments"), os.environ.get("PYTHONPATH", "")))
        async with await Command.start("run", config, logs=tmp_path / "logs", PYTHONPATH=path) as command:
            await command.wait_event("run.started")
            async with asyncio.timeout(1300):
                before, after = await train(
                    address,
                    command,
                    list(families),
                    settled=lambda batches: set(delivered(batches)) == set(families),
                )
            command.send(signal.SIGTERM)
            assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
    assert {len(batch) for batch in before + after} == {64}
    assert set(delivered(after)) == set(families)
