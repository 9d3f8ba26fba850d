"""Bridges between a real service and stand-ins for foreign trainers: whole runs, from the command line."""

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.local.policy import Policy
from orchestrator.local.server import run_policy_server
from tests.bridges.test_prime_rl_zmq import Ranks
from tests.integration.env_servers import until
from tests.integration.service_fixture import env, make_config, running_service
from tests.support.ports import free_port, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as address:
        yield address


@asynccontextmanager
async def bridge(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrator", "bridge", *arguments, cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_whole_run_with_the_files_of_prime_rl(tmp_path: Path, url: str) -> None:
    """Version 0 and every later one come from its broadcasts and are loaded; batches come as files; both ends end well."""
    out = tmp_path / "out"
    config = make_config(
        tmp_path / "run",
        url,
        [env("Dice")],
        max_steps=STEPS,
        inference={
            "base_urls": [url],
            "weight_update": "vllm",
            "check_weights": False,
            "initial_weights": "trainer",
        },
        trainer={"bind": f"ipc://{tmp_path}/s"},
    )

    def broadcast(step: int) -> None:
        folder = Policy().save(out / "broadcasts" / f"step_{step}")
        (folder / "STABLE").touch()

    broadcast(0)
    async with running_service(config) as running:
        options = ["--connect", running.address, "--out", str(out), "--seq-len", "64", "--ranks", "2"]
        async with bridge("prime-rl", *options) as process:
            for step in range(1, STEPS + 1):
                files = [out / "rollouts" / f"step_{step}" / f"rank_{rank}.bin" for rank in (0, 1)]
                await until(lambda files=files: all(file.exists() for file in files))  # type: ignore[misc]
                shares: list[list[Any]] = [msgspec.msgpack.decode(file.read_bytes()) for file in files]
                assert len(shares[0]) == len(shares[1]) > 0
                broadcast(step)
            assert await running.wait_end() == "max_steps reached"
            assert await process.wait() == 0
        assert running.service.pool.loaded.version == STEPS


async def test_a_whole_run_over_zmq_as_prime_rl_does_it_with_a_bridge_that_is_killed(
    tmp_path: Path, url: str
) -> None:
    """Killed after every step that it has sent: each rank gets every batch once, in order, and both ends end well.

    With max_versions = 0 there is never a second batch that could be half sent when it is killed: a bridge can only say then
    that a batch may be lost, and waits.
    """
    out = tmp_path / "out"
    config = make_config(
        tmp_path / "run",
        url,
        [env("Dice")],
        max_steps=STEPS,
        staleness={"max_versions": 0},
        inference={
            "base_urls": [url],
            "weight_update": "vllm",
            "check_weights": False,
            "initial_weights": "trainer",
        },
        trainer={"bind": f"ipc://{tmp_path}/s"},
    )

    def broadcast(step: int) -> None:
        folder = Policy().save(out / "broadcasts" / f"step_{step}")
        (folder / "STABLE").touch()

    broadcast(0)
    port = free_ports(2)
    async with running_service(config) as running:
        options = ["--connect", running.address, "--out", str(out), "--seq-len", "64", "--ranks", "2"]
        options += ["--transport", "zmq", "--port", str(port)]
        with Ranks(port) as ranks:
            for step in range(1, STEPS + 1):
                async with bridge("prime-rl", *options):
                    await until(lambda step=step: all(len(got) >= step for got in ranks.counted()))  # type: ignore[misc]
                broadcast(step)
            async with bridge("prime-rl", *options) as process:
                assert await running.wait_end() == "max_steps reached"
                assert await process.wait() == 0
            assert [len(got) for got in ranks.counted()] == [STEPS, STEPS]
            for got in ranks.counted():
                assert len(set(got)) == STEPS
        assert running.service.pool.loaded.version == STEPS


async def test_a_whole_run_over_http_as_atropos_does_it(tmp_path: Path, url: str) -> None:
    """Every batch comes once; the run ends when the last one is taken, and the bridge with it."""
    config = make_config(
        tmp_path / "run",
        url,
        [env("Dice")],
        max_steps=STEPS,
        inference={"base_urls": [url], "weight_update": "none"},
        trainer={"bind": f"ipc://{tmp_path}/s"},
    )
    port = free_port()

    def call(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=120) as answer:
            return json.loads(answer.read())

    def train() -> list[int]:
        taken: list[int] = []
        while len(taken) < STEPS:
            batch = call("/batch")["batch"]
            if batch is not None:
                taken.append(sum(len(item["tokens"]) for item in batch))
        assert call("/batch")["batch"] is None
        return taken

    async with running_service(config) as running:
        options = ["--connect", running.address, "--port", str(port), "--note", str(tmp_path / "note.json")]
        async with bridge("atropos", *options) as process:

            async def register() -> None:
                while True:
                    try:
                        size = config.batch.size
                        await asyncio.to_thread(
                            call, "/register", {"batch_size": size, "max_token_len": 4096}
                        )
                        return
                    except OSError:
                        await asyncio.sleep(0.1)

            await register()
            taken = await asyncio.to_thread(train)
            assert taken == [config.batch.size] * STEPS
            assert await running.wait_end() == "max_steps reached"
            assert await process.wait() == 0
        assert running.service.run.version == STEPS
