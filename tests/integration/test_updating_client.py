"""The client's block around weights that a trainer sends itself, over both transports, against the link alone."""

import asyncio
from pathlib import Path

import pytest

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer import AsyncTrainerClient, TrainerClient
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import UpdatesAtOnce, make_server
from tests.support.waiting import until

ENGINES = ["http://one/v1", "http://two/v1"]


@pytest.fixture(params=["zmq", "filesystem"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address to serve at, of each transport."""
    return "tcp://127.0.0.1:*" if request.param == "zmq" else f"file://{tmp_path}/link"


async def test_a_block_begins_and_ends_an_update(bind: str) -> None:
    """With the version of both, the exception of one that failed, and a refusal where there is one."""
    updates = UpdatesAtOnce()
    published: list[tuple[int, str | None]] = []

    def train(address: str) -> None:
        with TrainerClient(address) as trainer:
            with trainer.updating(1) as engines:
                assert engines == ENGINES
            with pytest.raises(ZeroDivisionError), trainer.updating(2):
                raise ZeroDivisionError("x" * 5000)
            with trainer.updating(2, wait_s=5):
                pass
            updates.refuse = "not now"
            with pytest.raises(TrainerLinkError, match="not now"), trainer.updating(3):
                pytest.fail("nothing may be sent")

    async with make_server(
        bind=bind, world_size=1, updates=updates, on_publish=lambda v, p: published.append((v, p))
    ) as server:
        await asyncio.to_thread(train, server.address)
        begun = [told[1] for told in updates.told if told[0] == "begin"]
        ended = [(told[1], told[2][:17]) for told in updates.told if told[0] == "end"]
    assert begun == [1, 2, 2, 3]
    assert ended == [(1, ""), (2, "ZeroDivisionError"), (2, "")]
    assert published == [(1, "(sent)"), (2, "(sent)")]


async def test_a_trainer_that_waits_for_a_batch_is_asked_for_weights(bind: str) -> None:
    """Both clients; else a run whose engines all wait would wait for a trainer that waits for it."""
    updates = UpdatesAtOnce()
    updates.waiting = 2
    asked: list[int] = []

    def train(address: str) -> None:
        def send() -> None:
            asked.append(len(asked))
            with trainer.updating(0):
                updates.waiting = 0

        trainer = TrainerClient(address, ping_s=0.05, on_engines_waiting=send)
        with trainer:
            assert trainer.next_batch() is not None

    async with make_server(bind=bind, world_size=1, updates=updates) as server:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(train, server.address))
            await until(lambda: ("end", 0, "") in updates.told)
            server.offer(make_batch(1))
        updates.waiting = 1

        async def send() -> None:
            asked.append(len(asked))
            async with client.updating(0):
                updates.waiting = 0

        client = AsyncTrainerClient(server.address, ping_s=0.05, on_engines_waiting=send)
        async with client, asyncio.TaskGroup() as group:
            batch = group.create_task(client.next_batch())
            await until(lambda: len(asked) == 2)
            server.offer(make_batch(2))
        got = batch.result()
        assert got is not None
        assert got.step == 2
    assert asked == [0, 1]


async def test_a_client_knows_how_many_engines_wait(bind: str) -> None:
    """From the last answer to its question whether anybody is there; without a callback nothing else happens."""
    updates = UpdatesAtOnce()
    updates.waiting = 3
    async with (
        make_server(bind=bind, world_size=1, updates=updates) as server,
        AsyncTrainerClient(server.address, ping_s=0.05) as trainer,
        asyncio.TaskGroup() as group,
    ):
        batch = group.create_task(trainer.next_batch())
        await until(lambda: trainer.engines_waiting == 3)
        server.offer(make_batch(1))
        await batch
