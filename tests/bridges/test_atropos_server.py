"""The Atropos bridge with real sockets and real processes: time-outs and kills lose no batch and double none."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.bridges.atropos_server import run_bridge
from orchestrator.errors import ConfigError
from orchestrator.trainer import AsyncTrainerClient
from orchestrator.trainer_link.server import BatchServer
from tests.support.journal_groups import make_batch
from tests.support.ports import free_port
from tests.support.trainer_links import make_server
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 4096,
    "checkpoint_dir": "ckpt",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 10,
}


class Trainer:
    """What trainers of Atropos do over HTTP."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self._session = session
        self._url = f"http://127.0.0.1:{port}"

    async def get(self, path: str) -> Any:
        async with self._session.get(f"{self._url}{path}") as answer:
            return await answer.json()

    async def register(self, **changes: Any) -> tuple[int, Any]:
        body = {**REGISTRATION, **changes}
        async with self._session.post(f"{self._url}/register", json=body) as answer:
            return answer.status, await answer.json()

    async def wait_reachable(self) -> None:
        while True:
            with suppress(aiohttp.ClientConnectionError):
                await self.get("/info")
                return
            await asyncio.sleep(0.05)

    async def take(self) -> list[dict[str, Any]]:
        """Ask until there is a batch, as they do."""
        while True:
            batch: list[dict[str, Any]] | None = (await self.get("/batch"))["batch"]
            if batch is not None:
                return batch
            await asyncio.sleep(0.02)

    async def wait_queued(self, groups: int) -> None:
        while True:
            if (await self.get("/status"))["queue_size"] >= groups:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def trainer_at(port: int) -> AsyncIterator[Trainer]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        trainer = Trainer(session, port)
        await trainer.wait_reachable()
        yield trainer


@asynccontextmanager
async def bridge(server: BatchServer, directory: Path) -> AsyncIterator[tuple[int, "asyncio.Task[None]"]]:
    port = free_port()
    client = AsyncTrainerClient(server.address, auto_ack=False)
    running = run_bridge(client, host="127.0.0.1", port=port, note=directory / "note.json")
    task = asyncio.create_task(running)
    try:
        yield port, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def first_tokens(step: int) -> list[int]:
    """By which a batch is known."""
    group = make_batch(step).groups[0]
    tokens: list[int] = group.tokens[: group.lengths[0]].tolist()
    return tokens


async def test_a_trainer_goes_through_a_whole_run(tmp_path: Path) -> None:
    """Registration, status, every batch once and in order, versions counted, and an end after the last."""
    acked: list[int] = []
    published: list[int] = []
    async with make_server(
        bind=f"ipc://{tmp_path}/s",
        world_size=1,
        on_ack=acked.append,
        on_publish=lambda version, path: published.append(version),
    ) as server:
        async with bridge(server, tmp_path) as (port, task), trainer_at(port) as trainer:
            assert await trainer.get("/info") == {"batch_size": -1, "max_token_len": -1}
            assert (await trainer.get("/batch"))["status"] == "error"
            assert (await trainer.register())[0] == 200
            assert await trainer.get("/info") == {"batch_size": 8, "max_token_len": 4096}
            assert await trainer.get("/wandb_info") == {"group": "g", "project": "p"}
            assert await trainer.get("/status") == {"current_step": 0, "queue_size": 0}
            assert await trainer.get("/batch") == {"batch": None}
            for step in (1, 2, 3):
                server.offer(make_batch(step))
            server.finish("max_steps")
            for step in (1, 2, 3):
                batch = await trainer.take()
                assert first_tokens(step) in [tokens for item in batch for tokens in item["tokens"]]
                done = list(range(1, step))
                await until(lambda done=done: acked == done)  # type: ignore[misc]
                assert (await trainer.get("/status"))["current_step"] == step
            # The trainer takes what there is before it trains; behind the last batch that is all it will ever say.
            assert await trainer.get("/batch") == {"batch": None}
            await task
        assert acked == published == [1, 2, 3]


async def test_bad_registrations_are_refused_with_the_reason(tmp_path: Path) -> None:
    """What is none, and one of another batch size; the right one is let in afterwards."""
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1) as server:
        server.offer(make_batch(1))
        async with bridge(server, tmp_path) as (port, _), trainer_at(port) as trainer:
            status, said = await trainer.register(batch_size="many")
            assert (status, "batch_size" in said["detail"]) == (422, True)
            await trainer.register()
            await trainer.wait_queued(1)
            status, said = await trainer.register(batch_size=32)
            assert (status, "forms batches of 8" in said["detail"]) == (409, True)
            assert await trainer.take()


async def test_a_trainer_that_gives_up_while_it_is_answered_gets_the_same_batch_again(tmp_path: Path) -> None:
    """It hung up with bytes unread, as after a time limit of its own: the batch does not count as handed over."""
    acked: list[int] = []
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        server.offer(make_batch(1, groups=400))
        server.offer(make_batch(2, groups=400))
        async with bridge(server, tmp_path) as (port, _), trainer_at(port) as trainer:
            await trainer.register(batch_size=1600)
            await trainer.wait_queued(800)
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port)) as impatient:
                    impatient.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await asyncio.to_thread(impatient.recv, 100)).startswith(b"HTTP/1.1 200")
            batch = await trainer.take()
            assert first_tokens(1) in [tokens for item in batch for tokens in item["tokens"]]
            assert acked == []
            assert await trainer.get("/batch") == {"batch": None}
            batch = await trainer.take()
            assert sum(len(item["tokens"]) for item in batch) == 1600
            await until(lambda: acked == [1])


async def test_a_bridge_that_is_killed_at_any_point_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """SIGKILL as soon as the bridge has noted what the trainer has got, and once more after it was done with one."""
    acked: list[int] = []
    port, note = free_port(), tmp_path / "note.json"
    seen: list[list[list[int]]] = []

    @asynccontextmanager
    async def process(address: str) -> AsyncIterator[None]:
        command = [sys.executable, "-m", "orchestrator", "bridge", "atropos", "--connect", address]
        options = ["--port", str(port), "--note", str(note)]
        running = await asyncio.create_subprocess_exec(*command, *options, cwd=ROOT)
        try:
            yield
        finally:
            running.kill()
            await running.wait()

    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        for step in range(1, 5):
            server.offer(make_batch(step))
        for killed in range(4):
            async with process(server.address), trainer_at(port) as trainer:
                if not killed:
                    await trainer.register()
                batch = await trainer.take()
                seen.append([tokens for item in batch for tokens in item["tokens"]])
                # What it hands over is noted after its last byte, which the trainer may have a moment earlier.
                await until(lambda step=killed + 1: json.loads(note.read_text())["delivered"] == step)  # type: ignore[misc]  # binds the loop's value
        # Whatever the last kill has kept from being acknowledged is acknowledged by the next process.
        async with process(server.address):
            await until(lambda: acked == [1, 2, 3])
    for step, tokens in enumerate(seen, start=1):
        assert first_tokens(step) in tokens


async def test_after_a_rewind_the_steps_that_were_given_up_are_handed_over_anew(tmp_path: Path) -> None:
    """They have the numbers of steps that the note says are done with, and are other batches."""
    acked: list[int] = []

    def serve(**options: Any) -> BatchServer:
        return make_server(bind=f"ipc://{tmp_path}/s", world_size=1, run="r", on_ack=acked.append, **options)

    async with serve() as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        async with bridge(server, tmp_path) as (port, _), trainer_at(port) as trainer:
            await trainer.register()
            for _ in range(3):
                await trainer.take()
            await until(lambda: acked == [1, 2])
    async with serve(rewound=(1,), last_step=1) as server:
        server.offer(make_batch(2))
        async with bridge(server, tmp_path) as (port, _), trainer_at(port) as trainer:
            assert (await trainer.get("/batch"))["status"] == "error", (
                "whoever has what was given up starts anew"
            )
            await trainer.register(starting_step=1)
            assert (await trainer.take())[0]["tokens"][0] == first_tokens(2)
            assert acked == [1, 2]


async def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    """Instead of a bridge that nobody reaches."""
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1) as server:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            client = AsyncTrainerClient(server.address, auto_ack=False)
            with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
                await run_bridge(client, host="127.0.0.1", port=port, note=tmp_path / "note.json")
