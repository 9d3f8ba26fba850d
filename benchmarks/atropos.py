"""Beside Atropos: forming a batch, and the way of groups through the process in the middle to the trainer.

Its rule for batches is called as its server calls it, on the same stream of groups. Its API server is fed over HTTP and
asked for the batch; ours is the whole service for what a rollout costs, and the trainer link for the way of a batch. CPU time
is that of the process in the middle; the wall time is what a trainer waits for its arrays.
"""

import asyncio
import random

import structlog

from benchmarks import _peers, dispatch, trainer_ranks
from benchmarks.buffer import ENVS, MINIMUMS, SIZES, draws, holds_a_batch, time_takes
from benchmarks.frame import Effort, Figure, median_and_spread
from benchmarks.trainer_link import GROUP
from orchestrator.buffer import BatchBuffer
from tests.adapters.venvs import ATROPOS

BATCH = 256
POWERS = "1,2,4,8,16"
"""The sizes of groups that Atropos' rule is made for."""
PEER = "atroposlib"


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """Ours, with the peer's beside it if it was asked for."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    return [
        *(_forming(queued, effort) for queued in effort.pick((1_000, 10_000), (1_000, 10_000), (10_000,))),
        _missed(effort),
        *_delivered(effort),
    ]


def _ask(what: str, **request: object) -> tuple[dict[str, float] | None, str]:
    return _peers.ask(ATROPOS, "_atropos_peer.py", {"what": what, **request})


def _forming(queued: int, effort: Effort) -> Figure:
    sizes, batches = SIZES[POWERS], effort.pick(100, 20, 2)
    runs = [time_takes(BATCH, sizes, queued, batches)[0] for _ in range(effort.pick(5, 2, 1))]
    mine, spread = median_and_spread(runs)
    theirs = effort.pick(10, 4, 2)
    peer, absent = _ask(
        "form",
        envs=ENVS,
        minimums=MINIMUMS,
        batch_size=BATCH,
        queued=queued,
        batches=theirs,
        draws=draws(random.Random(7), sizes, queued + theirs * BATCH),
    )
    other = None if peer is None else peer["ms"]
    what = f"CPU of forming a batch of {BATCH}, sizes {POWERS}, two minimums, {queued:,} groups queued"
    return Figure(what, mine, "ms", other, PEER, *_goal("below the peer's", mine, other), spread, absent)


def _missed(effort: Effort) -> Figure:
    """As in the figures of the buffer, with the sizes that the peer's rule is made for."""
    rng = random.Random(3)
    minimums = BatchBuffer[int](64, minimums=MINIMUMS).minimums
    drawn = (draws(rng, SIZES[POWERS], 16) for _ in range(effort.pick(500, 60, 10)))
    queues = [queue for queue in drawn if holds_a_batch(queue, 64, minimums)]
    ours = 0
    for queue in queues:
        buffer: BatchBuffer[int] = BatchBuffer(64, minimums=MINIMUMS)
        for env, size in queue:
            buffer.add(0, env=env, size=size)
        ours += buffer.take() is None
    peer, absent = _ask("missed", envs=ENVS, minimums=MINIMUMS, batch_size=64, queues=queues)
    many = max(1, len(queues))
    other = None if peer is None else 100 * peer["missed"] / many
    what = f"feasible batches of 64 missed, sizes {POWERS}, 16 groups queued"
    return Figure(what, 100 * ours / many, "%", other, PEER, "0 %", ours == 0, note=absent)


def _delivered(effort: Effort) -> list[Figure]:
    sequences, tokens = effort.pick((1_024, 2_048), (256, 2_048), (64, 256))
    warm_s, for_s = effort.pick((5, 15), (3, 5), (1, 1))
    wall, cpu = asyncio.run(trainer_ranks.deliver(1, sequences, tokens))
    peer, absent = _ask("deliver", sequences=sequences, tokens=tokens, group_size=GROUP)
    # Last, because it sets the garbage collector up for the rest of the process.
    service = dispatch.measure(
        inflight=256,
        latency_s=0.25,
        workers=1,
        batch_size=BATCH,
        warm_s=warm_s,
        for_s=for_s,
        tokens=tokens * 3 // 4,
    )
    waited, waited_spread = median_and_spread(wall)
    spent, spent_spread = median_and_spread([1e3 * one for one in cpu])
    rollout = 1e6 * service.cpu_per_rollout_s
    theirs = peer or {}
    out = 1e3 * theirs["out_s"] if peer else None
    each = 1e6 * (theirs["in_s"] + theirs["out_s"]) / sequences if peer else None
    size = f"{sequences:,} × {tokens // 2:,} to {tokens:,} tokens"
    way = f"CPU of the process between env server and trainer per rollout, about {tokens * 3 // 4:,} tokens"
    below = "below the peer's"
    return [
        Figure(
            f"from a batch that is ready to arrays in the trainer, {size}", waited, "s", theirs.get("wall_s"),
            f"{PEER}'s API", *_goal(below, waited, theirs.get("wall_s")), waited_spread, absent,
        ),
        Figure(
            "CPU of the server to hand that batch out", spent, "ms", out, f"{PEER}'s API",
            *_goal(below, spent, out), spent_spread, absent,
        ),
        Figure(way, rollout, "µs", each, f"{PEER}'s API", *_goal(below, rollout, each), note=absent),
    ]  # fmt: skip


def _goal(words: str, mine: float, other: float | None) -> tuple[str, bool | None]:
    """A goal that can be met or missed only beside a peer."""
    return words, None if other is None else mine < other
