"""Random frames at every port of a run, while it goes on: it ends as if nobody had been there."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from envs import wire
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient
from orchestrator.trainer.protocol import Ack, Join, Next, Publish
from orchestrator.trainer.protocol import encode as encode_for_trainer
from tests.integration.env_servers import MODULE, start_server, stop_started, until
from tests.integration.recording_trainer import TrainerRecord, describe
from tests.integration.service_fixture import env, make_config, running_service
from tests.support.ports import free_port

TOKEN = "let me in"
FOR_TRAINERS = [
    encode_for_trainer(m) for m in (Join(1, 0, 1, "c"), Next(1, 0), Ack(2, 1), Publish(3, 9, "x"))
]
FOR_SERVERS = [
    wire.encode(message)
    for message in (
        wire.Hello(wire.PROTOCOL, "c", f"{MODULE}:Quick", "m", {}, splits=["train"]),
        wire.Request(1, "rollout", "train", 3, "http://127.0.0.1:9/v1"),
        wire.Request(2, "group", "train", 3, "http://127.0.0.1:9/v1", count=4096),
        wire.Cancel(1),
        wire.Ping(1.0),
        wire.Drain(),
        wire.Bye(),
    )
]


def frames(rng: random.Random, good: list[bytes], count: int) -> Iterator[list[bytes]]:
    """Messages of which most are good ones with a byte or two spoiled, the rest noise."""
    for _ in range(count):
        frame = bytearray(rng.choice(good) if rng.random() < 0.8 else rng.randbytes(rng.randrange(1, 200)))
        for _ in range(rng.choice([1, 1, 2, 8])):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        yield [bytes(frame)] * rng.choice([1, 1, 1, 2, 9])


def throw(address: str, good: list[bytes], count: int, seed: int) -> None:
    """Send so many messages over connections that come and go, reading hardly any answer."""
    rng = random.Random(seed)
    with zmq.Context() as context:
        peer = context.socket(zmq.DEALER)
        try:
            for number, message in enumerate(frames(rng, good, count)):
                if number % 1000 == 0:
                    peer.close(100)
                    peer = context.socket(zmq.DEALER)
                    peer.setsockopt(zmq.LINGER, 1000)
                    peer.setsockopt(zmq.SNDTIMEO, 20_000)
                    peer.connect(address)
                peer.send_multipart(message)
                while peer.poll(0) and rng.random() < 0.5:
                    peer.recv_multipart()
        finally:
            peer.close(1000)


async def train(address: str, record: TrainerRecord) -> None:
    """The trainer that is let in; a stranger who says the right words without a token would take its place."""
    async with AsyncTrainerClient(address, token=TOKEN) as trainer:
        async for batch in trainer:
            record.note(describe(batch))
            await trainer.publish(batch.step)
            await asyncio.sleep(0.01)


async def run_under_fire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A run over two ports that strangers reach, with so many messages at each."""
    monkeypatch.setenv("TRAINER_TOKEN", TOKEN)
    address = f"tcp://127.0.0.1:{free_port()}"
    record = TrainerRecord()
    server = start_server(tmp_path, address)
    try:
        async with run_policy_server() as base_url:
            await asyncio.sleep(0)  # its task begins, and looks from now on as it will in the end
            elsewhere = {"id": f"{MODULE}:Quick", "name": "elsewhere", "addresses": [address]}
            config = make_config(
                tmp_path / "run",
                base_url,
                [env("Dice", args={"latency_s": 0.02}), elsewhere],
                trainer={"bind": "tcp://127.0.0.1:0", "token_env": "TRAINER_TOKEN"},
            )
            async with running_service(config) as running, asyncio.TaskGroup() as group:
                training = group.create_task(train(running.address, record))
                async with asyncio.TaskGroup() as attack:
                    for number, (at, good) in enumerate(
                        [(running.address, FOR_TRAINERS), (address, FOR_SERVERS)]
                    ):
                        attack.create_task(asyncio.to_thread(throw, at, good, count, number))
                steps = record.last_step
                await until(lambda: record.last_step >= steps + 5)
                assert server.running
                assert running.service.train["elsewhere"].available
                await running.service.finish("enough")
                await training
    finally:
        await stop_started()
    record.check(world_size=1, batch_size=8)
    assert os.path.getsize(tmp_path / "elsewhere.log") < 5_000_000  # noqa: PTH202, ASYNC240  a local file


@pytest.mark.timeout(600)
async def test_a_run_goes_on_under_random_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the trainer's port and at an env server's: no rank is disturbed, no process ends, the logs stay small."""
    await run_under_fire(tmp_path, monkeypatch, 5_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_goes_on_under_very_many_random_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with 100,000 at each port."""
    await run_under_fire(tmp_path, monkeypatch, 100_000)
