"""The journal: what recording costs the event loop's process, how late the loop gets, and how fast a run is back.

A process like the service receives rollouts over ZMQ from another one, puts groups together and forms batches, at 500
groups a second of 8 × 2,048 tokens with log-probabilities and transcripts; with the journal and without it, in
turns. The process does little else, so the relative cost is an upper bound for the service.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.frame import Figure, median_and_spread
from envs import wire
from orchestrator.config.sections import JournalConfig, TrainerConfig
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.journal import Journal
from orchestrator.tasks.task import TrainTask

GROUPS_PER_S = 500
ROLLOUTS = 8
TOKENS = 2048
GROUPS_PER_BATCH = 128
LAG_EVERY_S = 0.002
WARM_UP_GROUPS = 1500
"""By then batches are given back as fast as they come, and the payload files no longer grow."""


def feed(address: str, seconds: float) -> None:
    """Send rollouts at the rate, evenly."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, TOKENS, dtype=np.int32)
    logprobs = -rng.random(TOKENS, dtype=np.float32)
    mask = np.ones(TOKENS, np.uint8)
    arrays = (tokens.data, mask.data, logprobs.data)
    header = wire.RolloutHeader(1.0, [TOKENS], "stop", False, {"correct": 1.0}, {"total": 1.0})
    start = time.monotonic()
    for number in range(int(GROUPS_PER_S * seconds)):
        time.sleep(max(0.0, start + number / GROUPS_PER_S - time.monotonic()))
        for rollout in range(ROLLOUTS):
            result = wire.ResultHeader(number * ROLLOUTS + rollout, [header])
            socket.send_multipart([wire.encode(result), *arrays, bytes(4096)], copy=False)
    socket.send_multipart([b"end"])
    socket.close()
    context.term()


def open_journal(run_dir: Path) -> Journal:
    """As the service opens it."""
    config = JournalConfig()
    return Journal.open(
        run_dir,
        commit_interval_s=config.commit_interval_s,
        commit_bytes=config.commit_bytes,
        max_backlog_bytes=config.max_backlog_bytes,
        keep_batches=int(TrainerConfig().keep_batches),
        compress=config.compress_level,
        fsync=config.fsync,
    )


class Receiver:
    """What the service does with a result, and nothing more: decode, group, batch, record."""

    def __init__(self, journal: Journal | None, address: str) -> None:
        self.journal = journal
        self.loop = asyncio.get_running_loop()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self.ended = asyncio.Event()
        self.parts: list[tuple[NDArray[Any], ...]] = []
        self.transcripts: list[bytes] = []
        self.queue: list[Group] = []
        # The service holds the batches that a trainer may ask for, with the journal and without.
        self.held: deque[Batch] = deque(maxlen=5)
        self.groups = self.step = 0
        self.decode = msgspec.msgpack.Decoder(wire.ResultHeader).decode
        self.loop.add_reader(self.socket.fileno(), self.drain)

    def drain(self) -> None:
        for _ in range(64):
            try:
                _, header, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if header.bytes == b"end":
                self.ended.set()
                return
            self.decode(header.buffer)
            dtypes = (np.int32, np.uint8, np.float32)
            self.parts.append(tuple(np.frombuffer(f.buffer, d) for f, d in zip(frames, dtypes, strict=False)))
            self.transcripts.append(frames[3].bytes)
            if len(self.parts) == ROLLOUTS:
                self.add_group()
        self.loop.call_soon(self.drain)

    def add_group(self) -> None:
        tokens, mask, logprobs = (np.concatenate([part[n] for part in self.parts]) for n in range(3))
        rewards = np.arange(ROLLOUTS, dtype=np.float32)
        task = TrainTask("env", "train", self.groups, 0, self.groups)
        lengths = (TOKENS,) * ROLLOUTS
        transcript = b"".join(self.transcripts)
        group = Group(
            task,
            0,
            0,
            ROLLOUTS,
            lengths,
            tokens,
            mask,
            logprobs,
            rewards,
            rewards - rewards.mean(),
            plain_facts(ROLLOUTS, version=0, version_end=0),
            b"",
            0,
            transcript,
        )
        self.parts, self.transcripts = [], []
        self.groups += 1
        self.queue.append(group)
        if self.journal is not None:
            self.journal.record_group(group)
        if len(self.queue) == GROUPS_PER_BATCH:
            self.step += 1
            step, batch = self.step, Batch(self.step, 0, tuple(self.queue))
            self.queue = []
            self.held.append(batch)
            if self.journal is not None:
                self.journal.record_batch(batch, lambda: self.trained(step))

    def trained(self, step: int) -> None:
        assert self.journal is not None
        self.journal.record_ack(step, 0, world_size=1)
        self.journal.record_acknowledged(step)
        self.journal.prune("env", step * GROUPS_PER_BATCH)

    def close(self) -> None:
        self.loop.remove_reader(self.socket.fileno())
        self.socket.close(0)
        self.context.term()


def writer_clock(journal: Journal) -> int:
    """The clock that counts the CPU time of the journal's thread."""
    ident = journal._writer._thread.ident
    assert ident is not None
    return time.pthread_getcpuclockid(ident)


async def receive(run_dir: Path, *, record: bool, seconds: float) -> dict[str, float]:
    """Run the receiver for a while; CPU seconds per second, and the lag of the loop."""
    journal = open_journal(run_dir) if record else None
    address = f"ipc://{run_dir}.sock"
    receiver = Receiver(journal, address)
    command = (sys.executable, "-m", "benchmarks.journal", "feed", address, str(seconds))
    feeder = await asyncio.create_subprocess_exec(*command)
    lags: list[float] = []
    due = 0.0

    def tick() -> None:
        nonlocal due
        now = time.monotonic()
        lags.append(now - due)
        due = now + LAG_EVERY_S
        if not receiver.ended.is_set():
            asyncio.get_running_loop().call_later(LAG_EVERY_S, tick)

    while receiver.groups < WARM_UP_GROUPS:  # noqa: ASYNC110 # only the steady state is measured
        await asyncio.sleep(0.01)
    started, cpu, before = time.monotonic(), time.process_time(), receiver.groups
    writer = 0.0 if journal is None else time.clock_gettime(writer_clock(journal))
    due = started
    tick()
    await receiver.ended.wait()
    if journal is not None:
        await journal.flush()
    cpu, wall = time.process_time() - cpu, time.monotonic() - started
    writer = 0.0 if journal is None else time.clock_gettime(writer_clock(journal)) - writer
    groups = receiver.groups - before
    receiver.close()
    await feeder.wait()
    if journal is not None:
        await journal.aclose()
    return {
        "cpu_per_group_s": cpu / groups,
        "writer_per_group_s": writer / groups,
        "groups_per_s": groups / wall,
        "lag_p99_s": float(np.percentile(lags, 99)),
        "lag_max_s": max(lags),
    }


def run_child(*, record: bool, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bj") as directory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.journal",
            "on" if record else "off",
            f"{directory}/r",
            str(seconds),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        result: dict[str, float] = json.loads(done.stdout)
        return result


def recovery_s(groups: int) -> float:
    """CPU seconds to read back a queue of groups of 8 × 2,048 tokens."""

    async def measure(run_dir: Path) -> float:
        rng = np.random.default_rng(0)
        total = ROLLOUTS * TOKENS
        arrays = (
            rng.integers(0, 150_000, total, dtype=np.int32),
            np.ones(total, np.uint8),
            -rng.random(total, dtype=np.float32),
            rng.random(ROLLOUTS, dtype=np.float32),
            rng.random(ROLLOUTS, dtype=np.float32),
        )
        async with open_journal(run_dir) as journal:
            for position in range(groups):
                task = TrainTask("env", "train", position, 0, position)
                facts = plain_facts(ROLLOUTS, version=0, version_end=0)
                lengths = (TOKENS,) * ROLLOUTS
                journal.record_group(Group(task, 0, 0, ROLLOUTS, lengths, *arrays, facts, b"", 0))
            await journal.flush()
        started = time.process_time()
        async with open_journal(run_dir) as journal:
            assert len(journal.recover().groups) == groups
            return time.process_time() - started

    with tempfile.TemporaryDirectory(prefix="bj") as directory:
        return asyncio.run(measure(Path(directory)))


def figures(quick: bool = False) -> list[Figure]:
    seconds, rounds = (6.0, 1) if quick else (10.0, 3)
    results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for record in (False, True):
            results[record].append(run_child(record=record, seconds=seconds))
    pairs = list(zip(results[True], results[False], strict=True))
    more, more_spread = median_and_spread(
        [100 * (on["cpu_per_group_s"] / off["cpu_per_group_s"] - 1) for on, off in pairs]
    )
    writer, writer_spread = median_and_spread([1e6 * on["writer_per_group_s"] for on, _ in pairs])
    base, _ = median_and_spread([1e6 * off["cpu_per_group_s"] for _, off in pairs])
    lag, lag_spread = median_and_spread([1000 * on["lag_p99_s"] for on, _ in pairs])
    lag_off, _ = median_and_spread([1000 * off["lag_p99_s"] for _, off in pairs])
    rate, rate_spread = median_and_spread([on["groups_per_s"] for on, _ in pairs])
    load = "500 groups/s of 8 × 2,048 tokens"
    recovered = 200 if quick else 1000
    back = [recovery_s(recovered) for _ in range(rounds)]
    back_s, back_spread = median_and_spread(back)
    return [
        Figure(f"CPU more with the journal than without, {load}", more, "%", goal="< 20 %", met=more < 20, spread=more_spread),
        Figure(
            "CPU of the journal's thread per group (147 KB and 32 KB of transcripts)", writer, "µs",
            peer=base, peer_name="µs all else", spread=writer_spread,
        ),
        Figure(
            f"loop lag p99 with the journal, {load}", lag, "ms", peer=lag_off, peer_name="ms without",
            goal="< 20 ms", met=lag < 20, spread=lag_spread,
        ),
        Figure("groups recorded", rate, "per s", peer=GROUPS_PER_S, peer_name="per s asked", spread=rate_spread),
        Figure(f"CPU to recover {recovered} queued groups", back_s, "s", spread=back_spread),
    ]  # fmt: skip


def main() -> None:
    mode, target, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if mode == "feed":
        feed(target, seconds)
    else:
        print(json.dumps(asyncio.run(receive(Path(target), record=mode == "on", seconds=seconds))))


if __name__ == "__main__":
    main()
