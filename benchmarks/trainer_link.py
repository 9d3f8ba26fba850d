"""The trainer link: how long a large batch takes from `offer` to the arrays in the trainer's process, and its CPU.

1,024 sequences of 2,048 tokens with masks and log-probabilities (19 MB) over TCP on loopback, to one rank and to
eight. Beside it the bare limit: the same bytes in one ZMQ message, and the same batch as msgpack lists of numbers.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from benchmarks.frame import Figure, median_and_spread
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer import TrainerClient
from orchestrator.trainer_link.server import PROBE_S, BatchServer, open_link

SEQUENCES = 1024
TOKENS = 2048
GROUP = 8


def make_batch(step: int) -> Batch:
    rng = np.random.default_rng(step)
    groups = []
    for number in range(SEQUENCES // GROUP):
        total = GROUP * TOKENS
        task = TrainTask("env", "train", number, 0, (step - 1) * SEQUENCES + number)
        tokens = rng.integers(0, 150_000, total, dtype=np.int32)
        logprobs = -rng.random(total, dtype=np.float32)
        rewards = rng.random(GROUP, dtype=np.float32)
        mask = np.ones(total, np.uint8)
        facts = plain_facts(GROUP, version=0, version_end=0)
        arrays = (tokens, mask, logprobs, rewards, rewards, facts)
        groups.append(Group(task, 0, 0, GROUP, (TOKENS,) * GROUP, *arrays, b"", 0))
    return Batch(step, step - 1, tuple(groups))


def make_server(world_size: int, on_ack: Callable[[int], None]) -> BatchServer:
    """The trainer link alone: nothing is recorded, so an answer waits for nothing."""

    def ignore(*_: object) -> None:
        return

    return BatchServer(
        link=open_link("tcp://127.0.0.1:*", keys=None, probe_s=PROBE_S),
        world_size=world_size,
        run="",
        keep=1,
        last_step=0,
        newest_version=lambda: 0,
        load=None,
        check_version=lambda version, path, decided: decided(""),
        wait_loaded=lambda version, wait_s, then: then("", {}),
        on_ack=on_ack,
        on_rank_ack=ignore,
        on_publish=ignore,
        on_trained=ignore,
        on_report=lambda step, metrics: "",
        on_checkpoint=ignore,
        on_done=ignore,
        when_durable=lambda callback: callback(),
        token=None,
    )


def train(address: str, rank: int, world_size: int) -> None:
    """A trainer's process: print when each batch had arrived, whole, and the CPU that it took."""
    with TrainerClient(address, rank=rank, world_size=world_size) as trainer:
        cpu = time.process_time()
        for batch in trainer:
            assert sum(len(sequence.tokens) for sequence in batch.sequences) == len(batch.tokens)
            now = time.process_time()
            print(batch.step, time.monotonic(), now - cpu, flush=True)
            cpu = now


async def deliver(rounds: int, world_size: int) -> tuple[list[float], list[float]]:
    """Seconds from offer to the last rank's arrays, and CPU seconds of all processes, per batch."""
    acknowledged = asyncio.Queue[int]()
    offered, cpu = list[float](), list[float]()
    async with make_server(world_size, acknowledged.put_nowait) as server:
        command = (sys.executable, "-m", "benchmarks.trainer_link", server.address)
        trainers = [
            await asyncio.create_subprocess_exec(*command, str(rank), str(world_size), stdout=subprocess.PIPE)
            for rank in range(world_size)
        ]
        while sum(rank.waiting for rank in server.ranks) < world_size:  # noqa: ASYNC110 # start-up is not measured
            await asyncio.sleep(0.01)
        for step in range(1, rounds + 1):
            batch = make_batch(step)
            started = time.process_time()
            offered.append(time.monotonic())
            server.offer(batch)
            if step == rounds:
                server.finish("done")
            await acknowledged.get()
            cpu.append(time.process_time() - started)
        outputs = [(await trainer.communicate())[0].decode() for trainer in trainers]
    arrived = [0.0] * rounds
    for output in outputs:
        for line in output.splitlines():
            number, at, spent = line.split()
            arrived[int(number) - 1] = max(arrived[int(number) - 1], float(at))
            cpu[int(number) - 1] += float(spent)
    return [at - start for at, start in zip(arrived, offered, strict=True)], cpu


def bare_limit(rounds: int) -> list[float]:
    """CPU seconds to send and receive as many bytes over loopback with ZMQ, both sides."""
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    receiver.connect(f"tcp://127.0.0.1:{port}")
    data = np.random.default_rng(0).integers(0, 255, SEQUENCES * TOKENS * 9, dtype=np.uint8)
    samples = []
    for _ in range(rounds):
        started = time.process_time()
        sender.send(data.data, copy=False)
        receiver.recv(copy=False)
        samples.append(time.process_time() - started)
    sender.close()
    receiver.close()
    context.term()
    return samples


def as_lists() -> float:
    """CPU seconds to turn the batch into msgpack lists of numbers and back."""
    batch = make_batch(1)
    started = time.process_time()
    lists = [
        {"tokens": g.tokens.tolist(), "mask": g.mask.tolist(), "logprobs": g.logprobs.tolist()}
        for g in batch.groups
    ]
    msgspec.msgpack.decode(msgspec.msgpack.encode(lists))
    return time.process_time() - started


def figures(quick: bool = False) -> list[Figure]:
    rounds = 4 if quick else 12
    what = "1,024 × 2,048 tokens with log-probabilities"
    one_s, one_cpu = asyncio.run(deliver(rounds, 1))
    many_s, _ = asyncio.run(deliver(rounds, 8))
    wall, wall_spread = median_and_spread([1000 * sample for sample in one_s])
    cpu, cpu_spread = median_and_spread([1000 * sample for sample in one_cpu])
    limit, _ = median_and_spread([1000 * sample for sample in bare_limit(rounds)])
    eight, eight_spread = median_and_spread([1000 * sample for sample in many_s])
    lists = 1000 * as_lists()
    return [
        Figure(
            f"{what}: offer to arrays, one rank",
            wall,
            "ms",
            goal="< 250 ms",
            met=wall < 250,
            spread=wall_spread,
        ),
        Figure(
            f"{what}: CPU of both sides", cpu, "ms", peer=limit, peer_name="ms bare ZMQ", spread=cpu_spread
        ),
        Figure(
            f"{what}: CPU of both sides",
            cpu,
            "ms",
            peer=lists,
            peer_name="ms as msgpack lists, encoding alone",
        ),
        Figure(f"{what}: offer to the last of eight ranks", eight, "ms", spread=eight_spread),
    ]


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
