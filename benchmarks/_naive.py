"""What one would write first: sockets of zmq.asyncio, and workers that take tasks from an asyncio.Queue.

The queue's workers ask an env server for one rollout each, eight finished ones make a group with advantages, groups make a
batch, and batches are dropped. There is no mix, limit, retry, deadline, staleness, journal or trainer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import zmq.asyncio

from envs import wire

GROUP = 8
BATCH_GROUPS = 32
URL = "http://127.0.0.1:8000/v1"

Ask = Callable[[int], Awaitable[wire.Result]]


@dataclass(frozen=True, slots=True)
class Pace:
    """CPU seconds of this process per rollout, and rollouts per second."""

    cpu_s: float
    per_s: float


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[Ask]:
    """A future for every request, resolved by one task that receives."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    waiting: dict[int, asyncio.Future[wire.Result]] = {}

    async def receive() -> None:
        while True:
            message = wire.decode_to_client(await socket.recv_multipart())
            if isinstance(message, wire.Result):
                waiting.pop(message.id).set_result(message)

    async def ask(number: int) -> wire.Result:
        future: asyncio.Future[wire.Result] = asyncio.get_running_loop().create_future()
        waiting[number] = future
        await socket.send_multipart(
            [wire.encode(wire.Request(number, "rollout", "train", number, URL, session="group"))]
        )
        return await future

    async with asyncio.TaskGroup() as tasks:
        receiver = tasks.create_task(receive())
        yield ask
        receiver.cancel()
    socket.close(linger=0)
    context.term()


async def through_zmq_asyncio(address: str, inflight: int, count: int) -> Pace:
    """So many rollouts, asked for by as many tasks as are in flight."""
    async with asking(address) as ask:
        wall, cpu = time.perf_counter(), time.process_time()
        numbers = iter(range(1, count + 1))

        async def work() -> None:
            for number in numbers:
                await ask(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(inflight):
                tasks.create_task(work())
        return Pace((time.process_time() - cpu) / count, count / (time.perf_counter() - wall))


async def through_a_queue(address: str, inflight: int, count: int) -> Pace:
    """So many rollouts by workers that take their tasks from a queue."""
    queue: asyncio.Queue[int | None] = asyncio.Queue(maxsize=inflight)
    groups: dict[int, list[wire.Result]] = {}
    batch: list[tuple[list[wire.Result], np.ndarray]] = []

    async def work(ask: Ask) -> None:
        while (number := await queue.get()) is not None:
            result = await ask(number)
            group = groups.setdefault(number // GROUP, [])
            group.append(result)
            if len(group) == GROUP:
                rewards = np.array([one.rollouts[0].reward for one in group], np.float32)
                batch.append((groups.pop(number // GROUP), rewards - rewards.mean()))
            if len(batch) == BATCH_GROUPS:
                batch.clear()

    async with asking(address) as ask:
        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(inflight):
                tasks.create_task(work(ask))
            for number in range(1, count + 1):
                await queue.put(number)
            for _ in range(inflight):
                await queue.put(None)
        return Pace((time.process_time() - cpu) / count, count / (time.perf_counter() - wall))
