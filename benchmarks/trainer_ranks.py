"""Many ranks at one port: how long a batch takes from `offer` to the last rank, and what the orchestrator spends on it.

1, 8, 64 and 256 ranks, many in each of a few processes, over TCP on loopback; batches of 512 × 2,048 tokens and, unless
it should be quick, of 4,096 × 8,192. The wall time is bound by this machine's memory and by its clients; the CPU time is
the orchestrator's alone. Memory is what the process grew by beyond the batch that it was given.
"""

import asyncio
import logging
import resource
import subprocess
import sys
import time

import numpy as np
import structlog

from benchmarks.frame import Effort, Figure, median_and_spread
from benchmarks.trainer_link import GROUP, make_server
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer import AsyncTrainerClient

WORLDS = (1, 8, 64, 256)
SIZES = ((512, 2048), (4096, 8192))
PROCESSES = 4
ROUNDS = 3


def make_batch(step: int, sequences: int, tokens: int) -> Batch:
    """Sequences of half to all of `tokens`; groups share their arrays, which nobody writes to."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 150_000, GROUP * tokens, dtype=np.int32)
    logprobs, mask = -rng.random(GROUP * tokens, dtype=np.float32), np.ones(GROUP * tokens, np.uint8)
    groups = []
    for number in range(sequences // GROUP):
        lengths = tuple(int(length) for length in rng.integers(tokens // 2, tokens + 1, GROUP))
        total = sum(lengths)
        rewards = rng.random(GROUP, dtype=np.float32)
        facts = plain_facts(GROUP, version=0, version_end=0)
        arrays = (ids[:total], mask[:total], logprobs[:total], rewards, rewards, facts)
        task = TrainTask("env", "train", number, 0, (step - 1) * sequences + number)
        groups.append(Group(task, 0, 0, GROUP, lengths, *arrays, b"", 0))
    return Batch(step, step - 1, tuple(groups))


async def train(address: str, ranks: range, world_size: int) -> None:
    """Some ranks in one process: print the step and the time at which the last of them had its share."""
    got: dict[int, int] = {}

    async def one(rank: int) -> None:
        async with AsyncTrainerClient(address, rank=rank, world_size=world_size) as trainer:
            async for batch in trainer:
                got[batch.step] = got.get(batch.step, 0) + 1
                if got[batch.step] == len(ranks):
                    print(batch.step, time.monotonic(), flush=True)

    async with asyncio.TaskGroup() as tasks:
        for rank in ranks:
            tasks.create_task(one(rank))


async def deliver(world_size: int, sequences: int, tokens: int) -> tuple[list[float], list[float]]:
    """Per batch: seconds from offer to the last rank, and CPU seconds of the orchestrator's process."""
    acknowledged = asyncio.Queue[int]()
    processes = min(PROCESSES, world_size)
    share = world_size // processes
    offered, cpu = list[float](), list[float]()
    async with make_server(world_size, acknowledged.put_nowait) as server:
        command = (sys.executable, "-m", "benchmarks.trainer_ranks", server.address, str(world_size))
        trainers = [
            await asyncio.create_subprocess_exec(
                *command, str(number * share), str(share), stdout=subprocess.PIPE
            )
            for number in range(processes)
        ]
        while sum(rank.waiting for rank in server.ranks) < world_size:  # noqa: ASYNC110 # start-up is not measured
            await asyncio.sleep(0.01)
        for step in range(1, ROUNDS + 1):
            batch = make_batch(step, sequences, tokens)
            started = time.process_time()
            offered.append(time.monotonic())
            server.offer(batch)
            if step == ROUNDS:
                server.finish("done")
            await acknowledged.get()
            cpu.append(time.process_time() - started)
        outputs = [(await trainer.communicate())[0].decode() for trainer in trainers]
    arrived = [0.0] * ROUNDS
    for output in outputs:
        for line in output.splitlines():
            which, at = line.split()
            arrived[int(which) - 1] = max(arrived[int(which) - 1], float(at))
    return [at - start for at, start in zip(arrived, offered, strict=True)], cpu


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    # Hundreds of ranks come and go, each with a line.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found = []
    sizes = effort.pick(SIZES, SIZES[:1], ((64, 256),))
    for sequences, tokens in sizes:
        for world_size in effort.pick(WORLDS, WORLDS, WORLDS[:2]):
            before = _peak_bytes()
            wall, cpu = asyncio.run(deliver(world_size, sequences, tokens))
            what = f"{sequences:,} × {tokens:,} tokens to {world_size} ranks"
            seconds, spread = median_and_spread(wall)
            spent, spent_spread = median_and_spread(cpu)
            found.append(Figure(f"{what}: offer to the last rank", seconds, "s", spread=spread))
            found.append(Figure(f"{what}: CPU of the orchestrator", spent, "s", spread=spent_spread))
            grown = (_peak_bytes() - before) / 2**20
            found.append(Figure(f"{what}: growth of its peak memory", grown, "MiB"))
    return found


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    world, first, count = map(int, sys.argv[2:])
    asyncio.run(train(sys.argv[1], range(first, first + count), world))
