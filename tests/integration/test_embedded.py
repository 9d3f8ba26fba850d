"""A run inside a program of the user's: its batches, its errors, its end, and that nothing of it stays."""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

import orchestrator
from orchestrator.errors import ConfigError, OrchestratorError, StalledError, TrainerLinkError
from orchestrator.local.server import run_policy_server
from orchestrator.service.embedded import EmbeddedRun
from tests.integration.env_servers import ROOT, until
from tests.integration.service_fixture import _possessions, env, make_config, settings, write_config

SCRIPT = """
import asyncio, json, os, signal, sys
import uvloop
import orchestrator

async def main(config):
    async with orchestrator.running(config) as run:
        async for batch in run.batches():
            print(json.dumps([batch.step, batch.tokens.tolist()]), flush=True)
            if batch.step == 2:
                os.kill(os.getpid(), signal.SIGKILL)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1]))
"""


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as base_url:
        yield base_url


@pytest.fixture(autouse=True)
async def _nothing_stays(policy: str) -> AsyncIterator[None]:
    """No task, thread, process or socket, and nothing of the process itself is changed."""
    before, handlers = _possessions(), logging.getLogger().handlers[:]
    yield
    await until(lambda: _possessions() <= before)
    assert logging.getLogger().handlers == handlers


def of_the_process() -> list[object]:
    """What a service as a process of its own would set."""
    return [
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        asyncio.get_event_loop_policy(),
        gc.get_threshold(),
        gc.get_freeze_count(),
    ]


def values(tmp_path: Path, policy: str, *envs: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A configuration as a dict."""
    return settings(tmp_path / "run", policy, list(envs) or [env("Dice")], **sections)


async def steps_of(run: EmbeddedRun) -> list[int]:
    return [batch.step async for batch in run.batches()]


async def test_runs_follow_each_other_in_one_loop(tmp_path: Path, policy: str) -> None:
    """The same directory again goes on with the run; files, dicts and configurations do alike."""
    config, before = values(tmp_path, policy, max_steps=2), of_the_process()
    async with orchestrator.running(config) as run:
        assert await steps_of(run) == [1, 2]
        assert of_the_process() == before
        assert run.status().trained == 2
    assert run.summary is not None
    assert (run.summary["end"], run.summary["steps"]) == ("max_steps reached", 2)
    with pytest.raises(OrchestratorError, match="the run was left"):
        await run.next_batch()
    path = write_config(tmp_path / "config.toml", config)
    async with orchestrator.running(path, overrides=["--max-steps", "3"]) as run:
        assert await steps_of(run) == [3]
    loaded = orchestrator.load_config(path)
    async with orchestrator.running(loaded, max_steps=4, batch__size=4) as run:
        [batch] = [batch async for batch in run.batches()]
        assert (batch.step, len(batch)) == (4, 4)
    records = (tmp_path / "run" / "logs" / "orchestrator.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in records].count("run.finished") == 3


@pytest.mark.parametrize("how", ["raised", "cancelled"])
async def test_a_batch_that_the_body_did_not_finish_comes_again(
    tmp_path: Path, policy: str, how: str
) -> None:
    """What the body raises passes as it is; the next run begins with the batch that it had in hand."""
    config, seen = values(tmp_path, policy), []

    async def body() -> None:
        async with orchestrator.running(config) as run:
            async for batch in run.batches():
                seen.append(batch)
                if batch.step == 2:
                    if how == "raised":
                        raise ZeroDivisionError("a bug of the trainer's")
                    await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await until(lambda: len(seen) == 2 or task.done())
    if how == "cancelled":
        task.cancel()
    with pytest.raises(ZeroDivisionError if how == "raised" else asyncio.CancelledError):
        await task
    async with orchestrator.running(config) as run:
        again = await run.next_batch()
        assert again is not None
        assert (again.step, again.tokens.tolist()) == (2, seen[1].tokens.tolist())


async def test_a_batch_that_came_as_its_wait_was_given_up_comes_again(tmp_path: Path, policy: str) -> None:
    """Nobody has seen it, so it is not done with: neither when the next one is asked for nor when the block is left."""
    config = values(tmp_path, policy)
    async with orchestrator.running(config) as run:
        waiting = asyncio.create_task(run.next_batch())
        while run._client.after == 0:  # noqa: ASYNC110  the very turn of the loop matters
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first = await run.next_batch()
        assert first is not None
        assert first.step == 1
        waiting = asyncio.create_task(run.next_batch())
        while run._client.after == 1:  # noqa: ASYNC110  the very turn of the loop matters
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with orchestrator.running(config) as run:
        second = await run.next_batch()
        assert second is not None
        assert second.step == 2


async def test_a_batch_is_acknowledged_in_words_or_by_leaving_in_peace(tmp_path: Path, policy: str) -> None:
    """As over the link: an exception later does not bring it back, and leaving the block is as good as asking on."""
    config = values(tmp_path, policy)

    async def acknowledges_and_fails() -> None:
        async with orchestrator.running(config) as run:
            batch = await run.next_batch()
            assert batch is not None
            await run.acknowledge(batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await acknowledges_and_fails()
    async with orchestrator.running(config) as run:
        async for batch in run.batches():
            assert batch.step == 2
            break
    assert run.summary is not None
    assert run.summary["end"] == "the program left the run"
    async with orchestrator.running(config) as run:
        third = await run.next_batch()
        assert third is not None
        assert third.step == 3


async def test_versions_are_published_while_a_batch_is_waited_for(tmp_path: Path, policy: str) -> None:
    """One coroutine may publish while another waits; a version that cannot be loaded is refused with the reason."""
    gate = tmp_path / "gate"
    gated = env("Gated", args={"gate": str(gate)})
    config = values(tmp_path, policy, gated, max_steps=1, inference={"weight_update": "vllm"})
    async with orchestrator.running(config) as run:
        waiting = asyncio.create_task(run.next_batch())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="waited for already"):
            await run.next_batch()
        with pytest.raises(TrainerLinkError, match="version 1"):
            await run.publish(1, tmp_path / "nowhere")
        assert not waiting.done()
        gate.touch()
        batch = await waiting
        assert batch is not None
        assert await run.next_batch() is None
        with pytest.raises(OrchestratorError, match="the run is over: max_steps reached"):
            await run.publish(2)


async def test_an_error_of_the_run_is_raised_in_the_body(tmp_path: Path, policy: str) -> None:
    """Where the body waits for the run; and at the end of the block where it does not."""
    config = values(tmp_path, policy, env("Failing"), dispatch={"max_barren_batches": 1})
    with pytest.raises(StalledError, match="the judge is out of order"):
        async with orchestrator.running(config) as run:
            await run.next_batch()
    with pytest.raises(StalledError, match="the judge is out of order"):
        async with orchestrator.running(config) as run:
            await until(lambda: run._serving.done())
    last = json.loads((tmp_path / "run" / "logs" / "orchestrator.log").read_text().splitlines()[-1])
    assert last["event"] == "run.failed"
    assert "the judge is out of order" in last["error"]


async def test_a_configuration_that_cannot_be_used_leaves_nothing(tmp_path: Path, policy: str) -> None:
    """Every mistake is a ConfigError before anything is written or started."""
    good = values(tmp_path, policy)
    with pytest.raises(ConfigError, match=r"batch\.sise: unknown key; did you mean \"size\""):
        async with orchestrator.running(good, batch__sise=8):
            raise AssertionError("not reached")
    with pytest.raises(ConfigError, match=r"trainer\.world_size is 2"):
        async with orchestrator.running(good, trainer__world_size=2):
            raise AssertionError("not reached")
    with pytest.raises(ConfigError, match="no such file"):
        async with orchestrator.running(tmp_path / "nowhere.toml"):
            raise AssertionError("not reached")
    with pytest.raises(ConfigError, match="the configuration: 1 problem"):
        async with orchestrator.running({**good, "seed": "seven"}):
            raise AssertionError("not reached")
    assert not (tmp_path / "run").exists()


async def test_a_killed_program_goes_on_with_the_batch_that_it_had(tmp_path: Path, policy: str) -> None:
    """Killed with a batch in hand, on uvloop; the next run has the same batch first."""
    config = write_config(tmp_path / "config.toml", values(tmp_path, policy))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(config),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    out, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    first, second = [json.loads(line) for line in out.splitlines()]
    assert first[0] == 1
    async with orchestrator.running(config) as run:
        batch = await run.next_batch()
        assert batch is not None
        assert [batch.step, batch.tokens.tolist()] == second


async def test_the_programs_own_logging_is_left_as_it_is(tmp_path: Path, policy: str) -> None:
    """Events also go the way that the program has set up, and only while a run goes on."""
    entries: list[str] = []

    def keep(logger: object, method: str, event: structlog.typing.EventDict) -> str:
        entries.append(str(event["event"]))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    try:
        async with orchestrator.running(make_config(tmp_path / "run", policy, [env("Dice")])):
            await until(lambda: "run.started" in entries)
        assert structlog.get_config()["processors"] == [keep]
    finally:
        structlog.reset_defaults()
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    assert "run.started" in log
    assert "run.finished" in log
