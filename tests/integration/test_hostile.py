"""Env servers that do everything wrong, beside one that does not: the run goes on, and does not say much about it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from orchestrator.config import Config
from orchestrator.dispatch.ledger import KINDS, Ledger
from orchestrator.errors import EnvStartupError
from orchestrator.local.server import run_policy_server
from orchestrator.views.metrics import render_metrics
from tests.integration.env_servers import ROOT
from tests.integration.hostile_server import BEHAVIOURS, IDENTITY
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import env, make_config, running_service

STEPS = 4


@asynccontextmanager
async def hostile_server(behaviour: str, *capacity: str) -> AsyncIterator[str]:
    """The address of a hostile server."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.hostile_server",
        behaviour,
        *capacity,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.communicate()


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with run_policy_server() as url:
        yield url


def config_with(run_dir: Path, base_url: str, address: str, **settings: Any) -> Config:
    """A good env and a hostile one, with times as short as a test needs them."""
    hostile = {
        "id": IDENTITY,
        "name": "hostile",
        "addresses": [address],
        "silence_timeout_s": 2.0,
        "rollout_timeout_s": 0.3,
        **settings,
    }
    return make_config(
        run_dir,
        base_url,
        [env("Dice", args={"latency_s": 0.02}), hostile],
        max_steps=STEPS,
        dispatch={"max_inflight": 24, "ramp_s": 0.0, "backoff_s": 0.01},
        journal={"fsync": False},
    )


async def run_to_the_end(config: Config, record: TrainerRecord) -> tuple[Ledger, bytes]:
    """Train until the run is over; its books and its metrics."""
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record))
        assert await running.wait_end() == "max_steps reached"
        await running.service.finish("max_steps reached")
        ledger = running.service.run.parts.ledger
        return ledger, render_metrics(running.service.status, ledger)


@pytest.mark.parametrize("behaviour", [name for name in BEHAVIOURS if name != "never_ready"])
async def test_a_run_goes_on_beside_a_hostile_env_server(
    tmp_path: Path, base_url: str, behaviour: str
) -> None:
    """Every batch comes and is exact; neither the log nor the metrics nor the books grow with what a server makes up."""
    record = TrainerRecord()
    async with hostile_server(behaviour) as address:
        config = config_with(tmp_path / "run", base_url, address)
        with structlog.testing.capture_logs() as logs:
            ledger, exposition = await run_to_the_end(config, record)
    record.check(world_size=1, batch_size=8)
    assert record.last_step == STEPS
    assert ledger.balances()
    assert len(list(ledger.rows())) <= 2 * KINDS
    assert len(exposition) < 100_000
    assert len(logs) < 400
    assert sum(len(str(entry)) for entry in logs) < 1_000_000


@pytest.mark.parametrize(
    ("behaviour", "capacity"),
    [("never_ready", 64), ("well", 0), ("well", -1), ("well", 10**9), ("well", 2**64 - 1)],
)
async def test_a_server_that_is_never_ready_ends_the_start(
    tmp_path: Path, base_url: str, behaviour: str, capacity: int
) -> None:
    """It says no more than welcome, or declares a capacity that cannot be; the error has the address to blame."""
    async with hostile_server(behaviour, str(capacity)) as address:
        config = config_with(tmp_path / "run", base_url, address, ready_timeout_s=1.5)
        with pytest.raises(EnvStartupError, match=f"not ready in 1.5 s at {address}"):
            async with running_service(config):
                pass


async def test_a_server_that_does_not_stop_what_is_cancelled_keeps_no_minimum(
    tmp_path: Path, base_url: str
) -> None:
    """It pongs, but all its room is taken by rollouts that were given up: it counts as lost, and its minimum is waived."""
    record = TrainerRecord()
    async with hostile_server("never_answers", "4") as address:
        config = config_with(tmp_path / "run", base_url, address, min_batch_allocation=0.25)
        with structlog.testing.capture_logs() as logs:
            await run_to_the_end(config, record)
    assert record.last_step == STEPS
    lost = [entry for entry in logs if entry["event"] == "env.server_lost"]
    assert "has not stopped 4 cancelled rollouts" in lost[0]["reason"]
    assert any(entry["event"] == "minimum.waived" for entry in logs)


async def test_groups_of_a_server_that_left_do_not_hold_up_the_other_env(
    tmp_path: Path, base_url: str
) -> None:
    """All that may be under way was asked of it; without it, their places go to the env that can deliver."""
    record = TrainerRecord()
    async with hostile_server("leaves_for_good") as address:
        config = config_with(tmp_path / "run", base_url, address, ratio=99.0)
        with structlog.testing.capture_logs() as logs:
            await run_to_the_end(config, record)
    assert record.last_step == STEPS
    assert any(entry["event"] == "env.server_lost" for entry in logs)
