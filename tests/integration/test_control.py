"""A person changes a run that goes on: over HTTP, with the command line, and with what must last over a crash."""

import asyncio
import json
import signal
import stat
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.journal import JournalReader
from orchestrator.local.server import run_policy_server
from tests.integration.env_servers import until
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import (
    Command,
    Running,
    env,
    make_config,
    run_command,
    running_service,
    settings,
    write_config,
)


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as base_url:
        yield base_url


@pytest.fixture
async def other() -> AsyncIterator[str]:
    """The address of another one."""
    async with run_policy_server() as base_url:
        yield base_url


async def post(address: str | None, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """What a POST to the control address is answered with."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): v for name, v in headers.items()}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{address}/api/control", data=data, headers=sent) as reply,
    ):
        text = await reply.text()
        return reply.status, json.loads(text) if text.startswith("{") else {"error": text}


async def tell(running: Running, **command: Any) -> dict[str, Any]:
    """A command with the run's own token, which is followed."""
    run_dir = running.service.config.run_dir
    token = (run_dir / "control.token").read_text().strip()
    code, answer = await post(running.service.http_address, command, Authorization=f"Bearer {token}")
    assert (code, answer["ok"]) == (200, True), answer
    return answer


async def test_a_paused_run_starts_nothing_and_goes_on_when_it_is_resumed(
    tmp_path: Path, policy: str
) -> None:
    """The whole service: paused over HTTP, resumed with the command line, and it ends by itself."""
    record = TrainerRecord()
    envs = [env("Dice", args={"latency_s": 0.01})]
    config = make_config(
        tmp_path / "run",
        policy,
        envs,
        max_steps=200,
        # Longer than a busy machine lets a run stand still that goes on.
        dispatch={"stall_timeout_s": 3.0, "exit_on_stall": True},
    )
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record))
        await until(lambda: record.last_step >= 3)
        answer = await tell(running, command="pause", by="me")
        assert answer["state"] == "running"
        assert answer["paused"].endswith("by me)")
        run = running.service.run
        await until(lambda: run.idle and run.parts.versions.trained == run.parts.versions.formed)
        started = sum(run.parts.ledger.dispatched.values())
        # Longer than the watchdog lets a run stand still that nobody has paused.
        assert not (await asyncio.wait([running.serving], timeout=4.0))[0]
        assert sum(run.parts.ledger.dispatched.values()) == started
        status = running.service.status()
        assert status.waits[0].kind == "paused"
        resumed = await run_command("ctl", config.run_dir, "resume", logs=tmp_path / "logs")
        assert resumed.process.returncode == 0, resumed.errors()
        assert resumed.stdout.read_text().startswith("resumed; it was paused since 20")
        assert await running.wait_end() == "max_steps reached"
    record.check(world_size=1, batch_size=8)
    with JournalReader(tmp_path / "run") as reader:
        rows = reader.controls()
    assert [row["command"] for row in rows] == [{"command": "pause"}, {"command": "resume"}]
    assert rows[0]["origin"] == "me"
    assert rows[1]["origin"].startswith("cli uid ")
    assert not (tmp_path / "run" / "control.token").exists()


async def test_only_who_has_the_token_changes_anything(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's file or the token for reading; no other, no foreign page, no form, and nothing that is no command."""
    monkeypatch.setenv("READ_TOKEN", "sesame")
    config = make_config(tmp_path / "run", policy, [env("Dice")], http={"token_env": "READ_TOKEN"})
    async with running_service(config) as running:
        address, path = running.service.http_address, config.run_dir / "control.token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        own = {"Authorization": f"Bearer {path.read_text().strip()}"}
        pause = {"command": "pause"}
        assert (await post(address, pause))[0] == 401
        assert (await post(address, pause, Authorization="Bearer wrong"))[1]["error"] == (
            "the token is not the right one"
        )
        assert (await post(address, pause, **own, Origin="http://evil.example"))[0] == 403
        assert (await post(address, pause, **own, Content_Type="text/plain"))[0] == 415
        assert (await post(address, b"{", **own))[0] == 400
        assert (await post(address, {"command": "explode"}, **own))[0] == 400
        assert (await post(address, {"command": "quarantine", "env": "dice"}, **own))[0] == 409
        assert (await post(address, b"[" * 70_000, **own))[0] == 413
        assert not running.service.run.paused
        assert (await post(address, pause, **own, Origin=str(address)))[0] == 200
        assert (await post(address, {"command": "resume"}, Authorization="Bearer sesame"))[0] == 200
        codes = set()
        while 429 not in codes:  # the slower the machine, the more are taken meanwhile
            codes.add((await post(address, pause, **own))[0])
        assert codes == {200, 429}
        assert running.service.run.paused


async def test_a_ratio_changes_the_delivered_mix_and_outlives_kill_9(tmp_path: Path, policy: str) -> None:
    """The next process of the run follows it from its first batch on, and says in what it differs."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    values = settings(run_dir, policy, [env("Dice", "a"), env("Dice", "b")], batch={"size": 32})
    config = write_config(run_dir / "config.toml", values)
    logs = tmp_path / "logs"
    async with await Command.start("run", config, logs=logs) as first:
        await first.wait_event("run.started")
        told = await run_command("ctl", run_dir, "ratio", "a=3", "--json", logs=logs)
        assert json.loads(told.stdout.read_text())["changed"] is True, told.errors()
        refused = await run_command("ctl", run_dir, "ratio", "c=3", logs=logs)
        assert refused.process.returncode == 1
        assert 'refused: there is no env "c"; there are: a, b' in refused.errors()
        first.send(signal.SIGKILL)
        await first.wait()
    gone = await run_command("ctl", run_dir, "pause", logs=logs)
    assert gone.process.returncode == 1
    assert "the run is not running" in gone.errors()
    record = TrainerRecord()
    async with await Command.start("run", config, logs=logs) as second, asyncio.TaskGroup() as group:
        started = await second.wait_event("run.started")
        training = group.create_task(train_here(started["trainer"], record))
        await until(lambda: record.last_step >= 25)
        shown = await run_command("status", run_dir, "--json", logs=logs)
        status = json.loads(shown.stdout.read_text())
        assert status["changes"][0].startswith("ratio of env a: 1 -> 3 (since 20")
        drained = await run_command("ctl", run_dir, "drain", logs=logs)
        assert drained.process.returncode == 0, drained.errors()
        assert await second.wait() == 0
        training.cancel()
    counts = Counter(name.split("/")[0] for name in record.groups())
    assert counts["a"] / counts.total() == pytest.approx(0.75, abs=0.08)
    assert json.loads((run_dir / "summary.json").read_text())["end"].startswith("drained by cli uid")
    over = await run_command("ctl", run_dir, "pause", logs=logs)
    assert "the run is not running: it ended after step" in over.errors()


async def test_inference_servers_are_exchanged_under_load_with_nothing_lost(
    tmp_path: Path, policy: str, other: str
) -> None:
    """One joins with the newest version, the other leaves when its rollouts have ended; no rollout fails."""
    record = TrainerRecord()
    envs = [env("Chat", args={"latency_s": 0.02})]
    # Far more than are trained on until both servers have been exchanged.
    config = make_config(tmp_path / "run", policy, envs, max_steps=100)
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        pool = running.service.pool
        training = group.create_task(train_here(running.address, record))
        await until(lambda: record.last_step >= 3)
        await tell(running, command="endpoint", action="add", url=other)
        await until(lambda: len(pool.ready) == 2)
        answer = await tell(running, command="endpoint", action="remove", url=policy)
        assert [line.partition(":")[0] for line in answer["changes"]] == [
            "inference server added",
            "inference server removed",
        ]
        await until(lambda: [endpoint.url for endpoint in pool.endpoints] == [other])
        step = record.last_step
        await until(lambda: record.last_step >= step + 5)
        assert running.service.run.parts.facts.failures() == {}
        training.cancel()
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        assert [endpoint.url for endpoint in running.service.pool.endpoints] == [other]
        assert running.service.status().changes == answer["changes"]
        group.create_task(train_here(running.address, record))
        assert await running.wait_end() == "max_steps reached"
    record.check(world_size=1, batch_size=8)


async def test_a_command_during_the_start_is_answered(tmp_path: Path) -> None:
    """With what the start waits for; nothing is harmed."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    values = settings(run_dir, "http://127.0.0.1:9/v1", [env("Dice")])
    config = write_config(run_dir / "config.toml", values)
    async with await Command.start("run", config, logs=tmp_path / "logs") as starting:
        await until(lambda: (run_dir / "addresses.json").exists())
        told = await run_command("ctl", run_dir, "pause", logs=tmp_path / "logs")
        assert told.process.returncode == 1
        assert "the run is starting (it waits for " in told.errors()
        starting.send(signal.SIGTERM)
        assert await starting.wait() == 128 + signal.SIGTERM
