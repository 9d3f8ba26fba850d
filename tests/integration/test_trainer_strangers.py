"""Whoever reaches the trainer's port may send anything: the process goes on and the ranks are served."""

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import zmq

from orchestrator.trainer import AsyncTrainerClient
from orchestrator.trainer.protocol import MAX_REQUEST_BYTES, Ack, Join, Next, Publish, encode
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import make_server
from tests.support.waiting import until
from tests.support.zmtp_attacker import connection, message, pose_as_service, strike

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def victim() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A trainer link in a process of its own, and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.trainer_server_victim",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def wait_closed(peer: socket.socket) -> None:
    """Wait until the other side has closed; TimeoutError when it does not."""
    with suppress(ConnectionError):
        while peer.recv(4096):
            pass


async def test_floods_of_pings_and_resets_do_not_end_the_process(tmp_path: Path) -> None:
    """Also while its event loop is busy, so that libzmq has to hold what comes; a rank trains on throughout."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    steps: list[int] = []
    async with (
        victim() as (process, port),
        AsyncTrainerClient(f"tcp://127.0.0.1:{port}", timeout_s=20) as trainer,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(5):
            steps.append((await anext(trainer)).step)
            process.stdin.write(f"{fifo}\n".encode())
            assert await process.stdout.readline() == b"held\n"
            for _ in range(4):
                await asyncio.to_thread(strike, port)
            await asyncio.to_thread(fifo.write_bytes, b"")
            assert await process.stdout.readline() == b"released\n"
            for _ in range(4):
                await asyncio.to_thread(strike, port)
        steps.append((await anext(trainer)).step)
        assert process.returncode is None
    assert steps == [1, 2, 3, 4, 5, 6]


TRAINING = """
import sys
from orchestrator.trainer.channel import open_channel
channel = open_channel(sys.argv[1])
for line in sys.stdin:
    print("busy", flush=True)
    sys.stdin.readline()
    while channel.receive() is not None:
        pass
    print("alive", flush=True)
"""


async def test_a_service_that_floods_and_resets_does_not_end_the_trainers_process() -> None:
    """Also while the trainer is busy and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            TRAINING,
            f"tcp://127.0.0.1:{listener.getsockname()[1]}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for _ in range(5):
                process.stdin.write(b"train\n")
                assert await process.stdout.readline() == b"busy\n"
                await asyncio.to_thread(pose_as_service, listener)
                process.stdin.write(b"look\n")
                assert await process.stdout.readline() == b"alive\n"
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def test_messages_that_are_too_large_unfinished_or_never_come_disturb_nobody() -> None:
    """The first ends its connection, the others are not even noticed."""
    async with make_server(bind="tcp://127.0.0.1:*", world_size=1, probe_s=0.02) as server:
        port = int(server.address.rpartition(":")[2])
        server.offer(make_batch(1))
        with ExitStack() as stack:
            huge = stack.enter_context(connection(port))
            huge.settimeout(10)
            await asyncio.to_thread(
                huge.sendall, message(bytes(MAX_REQUEST_BYTES + 1))[: MAX_REQUEST_BYTES // 2]
            )
            await asyncio.to_thread(wait_closed, huge)
            for _ in range(20):
                stack.enter_context(connection(port, handshake=False))
                stack.enter_context(connection(port))
                stack.enter_context(connection(port)).sendall(message(b"half", more=True))
            async with AsyncTrainerClient(server.address) as trainer:
                assert (await anext(trainer)).step == 1
                assert [rank.rank for rank in server.ranks] == [0]


async def test_random_frames_on_a_real_socket_change_nothing_for_a_running_rank() -> None:
    """Bytes, spoiled messages, many frames: all are refused while a client trains."""
    rng = random.Random(7)
    good = [encode(m) for m in (Join(1, 0, 1, "c"), Next(1, 0), Ack(2, 1), Publish(3, 9, "x"))]
    acked: list[int] = []
    published: list[int] = []
    async with make_server(
        bind="tcp://127.0.0.1:*",
        world_size=1,
        token="let me in",
        on_ack=acked.append,
        on_publish=lambda version, path: published.append(version),
    ) as server:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(server.address)
        answers = 0
        async with AsyncTrainerClient(server.address, token="let me in") as trainer:
            for step in range(1, 11):
                server.offer(make_batch(step))
                for _ in range(100):
                    frame = (
                        bytearray(rng.choice(good)) if rng.random() < 0.8 else bytearray(rng.randbytes(40))
                    )
                    frame[rng.randrange(len(frame))] = rng.randrange(256)
                    stranger.send_multipart([bytes(frame)] * rng.choice([1, 1, 2, 9]))
                assert (await anext(trainer)).step == step
                await asyncio.to_thread(stranger.poll)
                while stranger.poll(0):
                    assert stranger.recv().find(b"welcome") == -1
                    answers += 1
            await trainer.ack(10)
        stranger.close(0)
        context.term()
        await until(lambda: server.ranks == [])
    assert answers > 0
    assert acked == list(range(1, 11))
    assert published == []
