"""Forming a batch: CPU time of `take()` and `add()` by queue length, against a greedy buffer that rescans.

The queue is kept at its length: after every batch, as many new groups are added as were taken. Four
environments, two of them with a minimum (10 % and 25 % of every batch). The peer walks its queue once for the
minimums and once for the rest, takes whatever fits, and emits if that comes out exact; how many batches it
misses is counted on the short queues, where they are hard to find.
"""

import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.frame import Effort, Figure, median_and_spread
from orchestrator.buffer import BatchBuffer

ENVS = ("math", "code", "logic", "search")
MINIMUMS = {"math": 0.1, "code": 0.25}
SIZES = {"1,2,4,8,16": (1, 2, 4, 8, 16), "7,8": (7, 8), "1..16": tuple(range(1, 17))}
PEER = "greedy, rescanning"

Draw = tuple[str, int]


class GreedyBuffer:
    """Keeps one list; each attempt goes over all of it, and what was taken is removed by a new list."""

    def __init__(self, batch_size: int, minimums: dict[str, int]) -> None:
        self.batch_size = batch_size
        self.minimums = minimums
        self.queue: list[Draw] = []

    def add(self, env: str, size: int) -> None:
        self.queue.append((env, size))

    def take(self) -> list[Draw] | None:
        room = self.batch_size
        taken: set[int] = set()
        for env, minimum in self.minimums.items():
            lacking = minimum
            for at, (name, size) in enumerate(self.queue):
                if name == env and lacking > 0 and size <= room:
                    taken.add(at)
                    lacking -= size
                    room -= size
            if lacking > 0:
                return None
        for at, (_, size) in enumerate(self.queue):
            if at not in taken and size <= room:
                taken.add(at)
                room -= size
        if room:
            return None
        batch = [self.queue[at] for at in sorted(taken)]
        self.queue = [draw for at, draw in enumerate(self.queue) if at not in taken]
        return batch


def draws(rng: random.Random, sizes: Sequence[int], count: int) -> list[Draw]:
    return [(rng.choice(ENVS), rng.choice(sizes)) for _ in range(count)]


def time_takes(batch_size: int, sizes: Sequence[int], queued: int, batches: int) -> tuple[float, float]:
    """Mean CPU milliseconds of a `take()` and microseconds of an `add()`, the queue kept at its length."""
    rng = random.Random(7)
    buffer: BatchBuffer[int] = BatchBuffer(batch_size, minimums=MINIMUMS)
    for env, size in draws(rng, sizes, queued):
        buffer.add(0, env=env, size=size)
    in_take = in_add = 0.0
    adds = 0
    for _ in range(batches):
        before = time.process_time()
        batch = buffer.take()
        in_take += time.process_time() - before
        fresh = draws(rng, sizes, len(batch) if batch else 1)
        before = time.process_time()
        for env, size in fresh:
            buffer.add(0, env=env, size=size)
        in_add += time.process_time() - before
        adds += len(fresh)
    return in_take / batches * 1e3, in_add / adds * 1e6


def time_greedy(batch_size: int, sizes: Sequence[int], queued: int, batches: int) -> float:
    """The peer's mean CPU milliseconds of a `take()` on the same stream."""
    rng = random.Random(7)
    minimums = BatchBuffer[int](batch_size, minimums=MINIMUMS).minimums
    buffer = GreedyBuffer(batch_size, minimums)
    for env, size in draws(rng, sizes, queued):
        buffer.add(env, size)
    spent = 0.0
    for _ in range(batches):
        before = time.process_time()
        batch = buffer.take()
        spent += time.process_time() - before
        for env, size in draws(rng, sizes, len(batch) if batch else 1):
            buffer.add(env, size)
    return spent / batches * 1e3


def take_figures(effort: Effort) -> list[Figure]:
    figures = []
    batches, runs = effort.pick((100, 5), (20, 2), (2, 1))
    lengths = effort.pick((1_000, 10_000, 100_000), (1_000, 10_000, 100_000), (1_000, 10_000))
    for batch_size in (256, 1024):
        for label, sizes in SIZES.items():
            means = {}
            for queued in lengths:
                times = [time_takes(batch_size, sizes, queued, batches)[0] for _ in range(runs)]
                means[queued], spread = median_and_spread(times)
                peer = time_greedy(batch_size, sizes, queued, 2 if queued == 100_000 or effort else 10)
                figures.append(
                    Figure(
                        f"take(), batch {batch_size}, sizes {label}, {queued:,} groups queued",
                        means[queued],
                        "ms",
                        peer=peer,
                        peer_name=PEER,
                        goal="≤ 1.5 ms",
                        met=means[queued] <= 1.5,
                        spread=spread,
                    )
                )
            growth = means[lengths[-1]] / means[lengths[0]]
            figures.append(
                Figure(
                    f"take(), batch {batch_size}, sizes {label}: {lengths[-1]:,} queued over {lengths[0]:,}",
                    growth,
                    "×",
                    goal="≤ 1.5 ×",
                    met=growth <= 1.5,
                )
            )
    return figures


def equal_size_figure(effort: Effort) -> Figure:
    """A batch of 128 groups of one size, four environments."""
    runs = []
    for _ in range(effort.pick(200, 20, 2)):
        buffer: BatchBuffer[int] = BatchBuffer(1024)
        for at in range(1_000):
            buffer.add(at, env=ENVS[at % 4], size=8)
        before = time.process_time()
        buffer.take()
        runs.append((time.process_time() - before) * 1e3)
    median, spread = median_and_spread(runs)
    return Figure(
        "take(), 128 groups of equal size", median, "ms", goal="< 0.2 ms", met=median < 0.2, spread=spread
    )


def add_figure(effort: Effort) -> Figure:
    runs = [time_takes(256, SIZES["1..16"], 10_000, 20)[1] for _ in range(effort.pick(9, 3, 1))]
    median, spread = median_and_spread(runs)
    return Figure("add(), 10,000 groups queued", median, "µs", goal="≤ 5 µs", met=median <= 5, spread=spread)


def holds_a_batch(groups: Sequence[Draw], batch_size: int, minimums: dict[str, int]) -> bool:
    """Whether an exact batch exists, by keeping every reachable (total, share of each minimum) there is."""
    names = tuple(minimums)
    reached = {(0, *(0 for _ in names))}
    for env, size in groups:
        more = set()
        for total, *have in reached:
            if total + size <= batch_size:
                if env in minimums:
                    at = names.index(env)
                    have[at] = min(minimums[env], have[at] + size)
                more.add((total + size, *have))
        reached |= more
    return (batch_size, *minimums.values()) in reached


def missed_figures(effort: Effort) -> list[Figure]:
    """Of short queues that hold an exact batch, in how many none is found."""
    figures = []
    minimums = BatchBuffer[int](64, minimums=MINIMUMS).minimums
    for label, sizes in SIZES.items():
        rng = random.Random(3)
        feasible = ours = peers = 0
        for _ in range(effort.pick(500, 60, 5)):
            buffer: BatchBuffer[int] = BatchBuffer(64, minimums=MINIMUMS)
            greedy = GreedyBuffer(64, minimums)
            for env, size in draws(rng, sizes, round(1.5 * 64 / statistics.mean(sizes))):
                buffer.add(0, env=env, size=size)
                greedy.add(env, size)
            if holds_a_batch(greedy.queue, 64, minimums):
                feasible += 1
                ours += buffer.take() is None
                peers += greedy.take() is None
        figures.append(
            Figure(
                f"feasible batches missed, batch 64, sizes {label} ({feasible} queues)",
                100 * ours / max(1, feasible),
                "%",
                peer=100 * peers / max(1, feasible),
                peer_name=PEER,
                goal="0 %",
                met=ours == 0,
            )
        )
    return figures


def option_figures(effort: Effort) -> list[Figure]:
    """`take()` with quotas, and with a token budget of a million, 10,000 groups queued."""
    rng = random.Random(5)
    by_quota: BatchBuffer[int] = BatchBuffer(1024, quotas={"math": 4, "code": 3, "logic": 2, "search": 1})
    by_token: BatchBuffer[int] = BatchBuffer(1_000_000, unit="tokens", minimums=MINIMUMS)
    for env, size in draws(rng, SIZES["1..16"], 10_000):
        by_quota.add(0, env=env, size=size)
        by_token.add(0, env=env, size=size, tokens=size * rng.randint(200, 4_000))
    figures = []
    for what, buffer in (("quotas, batch 1024", by_quota), ("budget of 1,000,000 tokens", by_token)):
        runs = []
        for _ in range(effort.pick(15, 5, 1)):
            before = time.process_time()
            buffer.take()
            runs.append((time.process_time() - before) * 1e3)
        median, spread = median_and_spread(runs)
        goal, met = "≤ 1.5 ms", median <= 1.5
        figures.append(
            Figure(f"take(), {what}, 10,000 queued", median, "ms", goal=goal, met=met, spread=spread)
        )
    return figures


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    return [
        *take_figures(effort),
        equal_size_figure(effort),
        *option_figures(effort),
        add_figure(effort),
        *missed_figures(effort),
    ]
