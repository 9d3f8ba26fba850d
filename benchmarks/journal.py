"""The journal: what recording costs the event loop's process, how late the loop gets, and how fast a run is back.

A process receives rollouts over ZMQ from another one, as the service does and with its code (loop, socket, decoding with all
checks, scoring, groups), and forms batches, at 500 groups a second of 8 × 2,048 tokens with log-probabilities and
transcripts; with the journal and without it, in turns. It decides nothing, shows nothing and serves no trainer, so the
relative cost is an upper bound for the service. The limit beside it is what its bytes take alone: summed up where they lie,
written into a file that is there already, past the page cache where the filesystem can do that, and brought to disk as often,
with no rows beside them.
"""

import asyncio
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks.frame import Effort, Figure, median_and_spread
from envs import wire
from envs.drained import DrainedSocket
from envs.memory import keep_freed_memory
from orchestrator.config.sections import JournalConfig, TrainerConfig
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.groups.scoring import build_advantage, build_group, seats_of
from orchestrator.journal import Journal
from orchestrator.tasks.task import TrainTask

GROUPS_PER_S = 500
ROLLOUTS = 8
TOKENS = 2048
TRANSCRIPT_BYTES = 4096
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
    arrays = tokens.tobytes() + logprobs.tobytes() + mask.tobytes()
    said = {"messages": [{"role": "assistant", "content": "x" * TRANSCRIPT_BYTES}]}
    transcript = msgspec.msgpack.encode([said])
    headers = [
        wire.RolloutHeader(float(rollout), [TOKENS], "stop", False, {"correct": 1.0}, {"total": 1.0}, 1.0)
        for rollout in range(ROLLOUTS)
    ]
    start = time.monotonic()
    for number in range(int(GROUPS_PER_S * seconds)):
        time.sleep(max(0.0, start + number / GROUPS_PER_S - time.monotonic()))
        for rollout in range(ROLLOUTS):
            result = wire.ResultHeader(number * ROLLOUTS + rollout, [headers[rollout]])
            socket.send_multipart([wire.encode(result), arrays, transcript], copy=False)
    socket.send(wire.encode(wire.Drained()))
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
    """What the service does with results, and nothing more: receive, decode, check, score, group, batch, record."""

    def __init__(self, journal: Journal | None, address: str) -> None:
        self.journal = journal
        self.context = zmq.Context()
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        self.socket = DrainedSocket(socket, self.on_frames, loop=asyncio.get_running_loop())
        self.advantage = build_advantage("grpo")
        self.ended = asyncio.Event()
        self.results: list[wire.Result] = []
        self.queue: list[Group] = []
        # The service holds the batches that a trainer may ask for, with the journal and without.
        self.held: deque[Batch] = deque(maxlen=5)
        self.groups = self.step = 0

    def on_frames(self, frames: list[bytes]) -> None:
        message = wire.decode_to_client(frames)
        if not isinstance(message, wire.Result):
            self.ended.set()
            return
        self.results.append(message)
        if len(self.results) == ROLLOUTS:
            self.add_group()

    def add_group(self) -> None:
        task = TrainTask("env", "train", self.groups, 0, self.groups)
        pending = PendingGroup(task, Lane.TRAIN, ROLLOUTS, ROLLOUTS, False, 0, 0.0, results=self.results)
        group = build_group(pending, seats_of(pending), self.advantage, version_end=0)
        self.results = []
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
        self.socket.close()
        self.context.term()


def writer_clock(journal: Journal) -> int:
    """The clock that counts the CPU time of the journal's thread."""
    ident = journal._writer._thread.ident
    assert ident is not None
    return time.pthread_getcpuclockid(ident)


async def receive(run_dir: Path, *, record: bool, seconds: float, warm_up: int) -> dict[str, float]:
    """Run the receiver for a while; CPU seconds per second, and the lag of the loop."""
    keep_freed_memory()  # as the trainer link does in the service
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

    while receiver.groups < warm_up:  # noqa: ASYNC110 # only the steady state is measured
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


def run_child(*, record: bool, seconds: float, warm_up: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bj") as directory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.journal",
            "on" if record else "off",
            f"{directory}/r",
            str(seconds),
            str(warm_up),
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


def bare_write_us(batches: int) -> list[float]:
    """CPU microseconds per group to sum up, write and sync as many bytes as a group's payload has, and nothing else.

    They lie where a device can take them from, so that they need not be copied either.
    """
    size = ROLLOUTS * (9 * TOKENS + TRANSCRIPT_BYTES)
    samples = []
    with mmap.mmap(-1, GROUPS_PER_BATCH * size) as memory, tempfile.NamedTemporaryFile() as named:
        memory.write(np.random.default_rng(0).bytes(len(memory)))
        fd = _open_past_the_cache(Path(named.name))
        for _ in range(batches + 1):
            started = time.thread_time()
            for number in range(GROUPS_PER_BATCH):
                np.add.reduce(np.frombuffer(memory, "<u8", size // 8, number * size))
            os.pwrite(fd, memory, 0)
            os.fdatasync(fd)
            samples.append(1e6 * (time.thread_time() - started) / GROUPS_PER_BATCH)
        os.close(fd)
    return samples[1:]  # the first finds the blocks that the others overwrite


def _open_past_the_cache(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_WRONLY)


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    seconds, rounds, warm_up = effort.pick((8.0, 8, WARM_UP_GROUPS), (6.0, 2, WARM_UP_GROUPS), (1.0, 1, 150))
    results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(rounds):
        # The other way round the next time: what the machine does besides changes slowly.
        for record in (False, True) if number % 2 == 0 else (True, False):
            results[record].append(run_child(record=record, seconds=seconds, warm_up=warm_up))
    pairs = list(zip(results[True], results[False], strict=True))
    # Not of pairs: two runs of the same process are a fifth apart.
    with_it, without = (
        statistics.median(one["cpu_per_group_s"] for one in results[on]) for on in (True, False)
    )
    more = 100 * (with_it / without - 1)
    more_spread = tuple(100 * (one["cpu_per_group_s"] / without - 1) for one in results[True])
    writer, writer_spread = median_and_spread([1e6 * on["writer_per_group_s"] for on, _ in pairs])
    bare, _ = median_and_spread(bare_write_us(effort.pick(20, 10, 2)))
    lag, lag_spread = median_and_spread([1000 * on["lag_p99_s"] for on, _ in pairs])
    lag_off, _ = median_and_spread([1000 * off["lag_p99_s"] for _, off in pairs])
    rate, rate_spread = median_and_spread([on["groups_per_s"] for on, _ in pairs])
    load = "500 groups/s of 8 × 2,048 tokens"
    recovered = effort.pick(1000, 200, 20)
    back = [recovery_s(recovered) for _ in range(effort.pick(3, 1, 1))]
    back_s, back_spread = median_and_spread(back)
    return [
        Figure(
            f"CPU more with the journal than without, {load}", more, "%", peer=1e-4 * bare / without,
            peer_name="% to sum up and write its bytes alone", goal="≤ 10 %", met=more <= 10, spread=more_spread,
        ),
        Figure(
            "CPU of the journal's thread per group (147 KB and 32 KB of transcripts)", writer, "µs",
            peer=bare, peer_name="µs bare write", spread=writer_spread,
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
        received = receive(Path(target), record=mode == "on", seconds=seconds, warm_up=int(sys.argv[4]))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(received)))


if __name__ == "__main__":
    main()
