"""The trainer link: how long a large batch takes from `offer` to the arrays in the trainer's process, and its CPU.

1,024 sequences of 2,048 tokens with masks and log-probabilities (19 MB) over TCP on loopback, to one rank and to
eight. CPU counts what both processes do from the offer to the acknowledgement, but not the making of the batch: putting
the rank's arrays together, the way through the kernel, and cutting them into sequences. Beside it the bare limit, in turns
with ours: as many bytes in one ZMQ message of three frames to another process, whose content is there already and is not
looked at when it has come; and the same batch as msgpack lists of numbers. The first batches of either find memory that
the system has to hand out page by page, which a run of many does once; they are not counted.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from benchmarks.frame import Effort, Figure, median_and_spread
from envs.memory import keep_freed_memory
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer import TrainerClient
from orchestrator.trainer_link.publications import Began, Ended
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


class _NoUpdates:
    """No version is sent by the trainer."""

    waiting = 0

    def begin(self, client: str, version: int, then: Began) -> None:
        then("nothing is sent", [])

    def end(self, client: str, version: int, failed: str, untouched: bool, then: Ended) -> None:
        then("nothing is sent", "")

    def gone(self, client: str) -> None:
        return


def make_server(world_size: int, on_ack: Callable[[int], None]) -> BatchServer:
    """The trainer link alone: nothing is recorded, so an answer waits for nothing."""

    def ignore(*_: object) -> None:
        return

    return BatchServer(
        link=open_link("tcp://127.0.0.1:*", keys=None, probe_s=PROBE_S),
        world_size=world_size,
        run="",
        rewound=(),
        keep=1,
        last_step=0,
        newest_version=lambda: 0,
        load=None,
        check_version=lambda version, path, decided: decided(""),
        wait_loaded=lambda version, wait_s, then: then("", {}),
        updates=_NoUpdates(),
        on_ack=on_ack,
        on_rank_ack=ignore,
        on_publish=ignore,
        on_trained=ignore,
        on_report=lambda step, metrics: "",
        on_checkpoint=ignore,
        on_done=ignore,
        find_obstacle=None,
        on_rewind=ignore,
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


async def deliver(
    rounds: int, world_size: int, between: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Seconds from offer to the last rank's arrays, and CPU seconds of all processes, per batch.

    After each batch, when nothing is on its way, `between` is called.
    """
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
            between()
        outputs = [(await trainer.communicate())[0].decode() for trainer in trainers]
    arrived = [0.0] * rounds
    for output in outputs:
        for line in output.splitlines():
            number, at, spent = line.split()
            arrived[int(number) - 1] = max(arrived[int(number) - 1], float(at))
            cpu[int(number) - 1] += float(spent)
    return [at - start for at, start in zip(arrived, offered, strict=True)], cpu


class Bare:
    """As many bytes to another process over loopback with ZMQ and nothing else; CPU seconds of both, per message."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, "-m", "benchmarks.trainer_link", f"tcp://127.0.0.1:{port}"]
        self._receiver = subprocess.Popen(command)
        self._socket.recv()
        total, rng = SEQUENCES * TOKENS, np.random.default_rng(0)
        sizes = (4 * total, 4 * total, total)
        self._frames = [rng.integers(0, 255, size, dtype=np.uint8).data for size in sizes]
        self.cpu: list[float] = []

    def send(self) -> None:
        started = time.process_time()
        self._socket.send_multipart(self._frames, copy=False)
        there = float(self._socket.recv())
        self.cpu.append(time.process_time() - started + there)

    def close(self) -> None:
        self._socket.send(b"")
        self._receiver.wait()
        self._socket.close()
        self._context.term()


def receive_bare(address: str) -> None:
    """The other process: say for each message the CPU that it took, until one is empty."""
    keep_freed_memory()  # as a trainer does
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.connect(address)
    socket.send(b"")
    cpu = time.process_time()
    while len(socket.recv_multipart(copy=False)) > 1:
        now = time.process_time()
        socket.send(str(now - cpu).encode())
        cpu = now
    socket.close()
    context.term()


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


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    rounds, ranks, cold = effort.pick((14, 8, 2), (7, 8, 2), (1, 2, 0))
    what = "1,024 × 2,048 tokens with log-probabilities"
    bare = Bare()
    one_s, one_cpu = asyncio.run(deliver(rounds, 1, bare.send))
    bare.close()
    many_s, _ = asyncio.run(deliver(rounds, ranks))
    wall, wall_spread = median_and_spread([1000 * sample for sample in one_s[cold:]])
    cpu, cpu_spread = median_and_spread([1000 * sample for sample in one_cpu[cold:]])
    limit, _ = median_and_spread([1000 * sample for sample in bare.cpu[cold:]])
    eight, eight_spread = median_and_spread([1000 * sample for sample in many_s[cold:]])
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
            f"{what}: CPU of both sides",
            cpu,
            "ms",
            peer=limit,
            peer_name="ms bare ZMQ to another process",
            goal="≤ 2× bare ZMQ",
            met=cpu <= 2 * limit,
            spread=cpu_spread,
        ),
        Figure(
            f"{what}: CPU of both sides",
            cpu,
            "ms",
            peer=lists,
            peer_name="ms as msgpack lists, encoding alone",
        ),
        Figure(f"{what}: offer to the last of {ranks} ranks", eight, "ms", spread=eight_spread),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        receive_bare(sys.argv[1])
