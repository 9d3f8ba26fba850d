"""Trackers beside a whole service: they follow a run over its restarts, and cannot keep it from ending."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.local.server import run_policy_server
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import (
    env,
    make_config,
    run_command,
    running_service,
    settings,
    write_config,
)
from tests.track.trackers import calls

RECORDING = "tests.track.trackers:Recording"
RAISING = "tests.track.trackers:Raising"


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with run_policy_server() as url:
        yield url


async def test_a_resumed_run_goes_on_in_its_trackers(tmp_path: Path, base_url: str) -> None:
    """Every step is logged once, under the same id; one tracker that takes nothing is in the status, and that is all."""
    record, path = TrainerRecord(), tmp_path / "calls"
    for max_steps in (2, 4):
        config = make_config(
            tmp_path / "run",
            base_url,
            [env("Dice")],
            max_steps=max_steps,
            track={"use": [RECORDING, RAISING], "options": {RECORDING: {"path": str(path)}}},
            eval={"env": [env("Dice", num_examples=2, interval=2)]},
        )
        async with running_service(config) as running, asyncio.TaskGroup() as group:
            group.create_task(train_here(running.address, record))
            assert await running.wait_end() == "max_steps reached"
            running_status = running.service.front.trackers
        recording, raising = running_status()
        assert (recording.lost, recording.error) == (0, "")
        assert (raising.logged, raising.error) == (0, "ConnectionError: the tracking server is away")
        assert raising.lost == recording.logged
    told = calls(path)
    starts = [call for call in told if call[0] == "start"]
    assert [resumed for _, _, _, resumed in starts] == [False, True]
    assert len({run_id for _, _, run_id, _ in starts}) == 1
    assert starts[0][1]["max_steps"] == 2
    assert [call[1] for call in told if call[0] == "log"] == [1, 2, 3, 4]
    assert {call[2] for call in told if call[0] == "log_eval"} == {"dice"}
    assert [call[0] for call in told].count("close") == 2
    rewards = [call[2]["reward"] for call in told if call[0] == "log"]
    assert all(isinstance(reward, float) for reward in rewards)


STUCK = """
import atexit
import threading

from orchestrator.track import Tracker


class Stuck(Tracker):
    def __init__(self):
        atexit.register(threading.Event().wait)

    def log(self, step, metrics):
        threading.Event().wait()
"""


@pytest.mark.slow
async def test_a_tracker_that_hangs_for_good_does_not_keep_the_process(tmp_path: Path, base_url: str) -> None:
    """Neither its thread nor what its library does at the end of the process; the exit code is the run's."""
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    values = settings(
        tmp_path / "run",
        base_url,
        [{"id": "builtin::reverse"}],
        max_steps=2,
        track={"use": ["stuck:Stuck"]},
        local={},
        inference={"base_urls": []},
        dispatch={"keep_equal_rewards": True},
    )
    config = write_config(tmp_path / "config.toml", values)
    command = await run_command("run", config, logs=tmp_path / "logs")
    assert command.process.returncode == 0, command.errors()
    assert command.events("track.left_behind")[0]["tracker"] == "stuck:Stuck"
    assert "max_steps reached" in command.stdout.read_text(encoding="utf-8")
    assert (tmp_path / "run" / "summary.json").exists()
