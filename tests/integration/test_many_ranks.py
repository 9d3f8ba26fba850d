"""A trainer of many ranks: one port for all, a batch that is cut once, and connections that break without harm."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer import AsyncTrainerClient
from tests.support.trainer_links import make_server

RANKS = 48
STEPS = 6
PIECES = 20
"""Of what ranks and the service say, between two connections that break."""


def make_batch(step: int, sequences: int = 2 * RANKS) -> Batch:
    """Sequences whose tokens are all their own number, in groups of four."""
    groups = []
    for number in range(sequences // 4):
        lengths = tuple(3 + (4 * number + place) % 7 for place in range(4))
        numbers = [step * 10_000 + 4 * number + place for place in range(4)]
        arrays = (
            np.repeat(np.asarray(numbers, np.int32), lengths),
            np.ones(sum(lengths), np.uint8),
            -np.ones(sum(lengths), np.float32),
            np.zeros(4, np.float32),
            np.zeros(4, np.float32),
            plain_facts(4, version=0, version_end=0),
        )
        task = TrainTask("env", "train", number, 0, (step - 1) * sequences + number)
        groups.append(Group(task, 0, 0, 4, lengths, *arrays, b"", 0))
    return Batch(step, step - 1, tuple(groups))


class BadLine:
    """A relay in front of the service that breaks connections at random, and may leave messages cut in two.

    One breaks with every so many pieces that pass, not with time: what a slow machine does meanwhile would never be enough.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._rng = random.Random(3)
        self._open: list[asyncio.StreamWriter] = []
        self._passed = 0
        self.broken = 0

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[str]:
        """The address that stands for the service's, as long as the block lasts."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        try:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in self._open:
                writer.transport.abort()

    def _on_piece(self) -> None:
        self._passed += 1
        if self._passed % PIECES == 0:
            self._rng.choice(self._open).transport.abort()
            self.broken += 1

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        ends = [writer, back]
        self._open += ends
        try:
            with suppress(OSError):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._copy(reader, back))
                    tasks.create_task(self._copy(there, writer))
        except BaseExceptionGroup as errors:
            if errors.split((OSError, EOFError))[1] is not None:
                raise
        finally:
            for end in ends:
                self._open.remove(end)
                end.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1000):
            target.write(data)
            await target.drain()
            self._on_piece()
        raise EOFError


@pytest.mark.timeout(600)
async def test_ranks_whose_connections_break_again_and_again_miss_and_repeat_nothing() -> None:
    """Every rank gets every step once and in order, and together they get every sequence once."""
    given: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
    seen: dict[int, list[int]] = {step: [] for step in range(1, STEPS + 1)}
    acknowledged: asyncio.Queue[int] = asyncio.Queue()

    async def train(address: str, rank: int) -> None:
        async with AsyncTrainerClient(address, rank=rank, world_size=RANKS, ping_s=0.1) as trainer:
            async for batch in trainer:
                given[rank].append(batch.step)
                seen[batch.step] += [int(sequence.tokens[0]) for sequence in batch.sequences]

    async with make_server(
        bind="tcp://127.0.0.1:*", world_size=RANKS, on_ack=acknowledged.put_nowait
    ) as server:
        line = BadLine(server.address)
        async with line.relaying() as address, asyncio.TaskGroup() as tasks:
            for rank in range(RANKS):
                tasks.create_task(train(address, rank))
            for step in range(1, STEPS + 1):
                server.offer(make_batch(step))
                assert await acknowledged.get() == step
            server.finish("done")
    assert line.broken > 0
    assert set(map(tuple, given.values())) == {tuple(range(1, STEPS + 1))}
    for step, tokens in seen.items():
        assert sorted(tokens) == [step * 10_000 + number for number in range(2 * RANKS)]


async def test_a_batch_is_read_back_once_for_all_ranks() -> None:
    """However many fall back to it, they are given shares of one reading."""
    read: list[int] = []

    def load(step: int) -> Batch:
        read.append(step)
        return make_batch(step)

    async def fall_back(address: str, rank: int) -> list[int]:
        async with AsyncTrainerClient(address, rank=rank, world_size=RANKS, resume_after=1) as trainer:
            batch = await trainer.next_batch()
            assert batch is not None
            assert batch.step == 2
            return [int(sequence.tokens[0]) for sequence in batch.sequences]

    async with (
        make_server(bind="tcp://127.0.0.1:*", world_size=RANKS, last_step=5, load=load) as server,
        asyncio.TaskGroup() as tasks,
    ):
        shares = [tasks.create_task(fall_back(server.address, rank)) for rank in range(RANKS)]
        numbers = [number for share in [await share for share in shares] for number in share]
    assert sorted(numbers) == [20_000 + number for number in range(2 * RANKS)]
    assert read == [2]
