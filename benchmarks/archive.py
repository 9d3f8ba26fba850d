"""What keeping rollouts for people costs: on the event loop, and by the thread that writes, for groups of 8 as a run tells them."""

import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.frame import Effort, Figure
from envs.wire import Result, RolloutHeader
from orchestrator.archive.archive import RolloutArchive
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch, Group, plain_facts
from orchestrator.tasks.task import TrainTask

SIZE = 8
GROUPS_PER_STEP = 32
TURN_CHARS = 6000


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """Tell many groups and look at the clocks of both threads."""
    steps = effort.pick(200, 20, 2)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        archive = RolloutArchive(
            Path(directory),
            run_id="bench",
            last_step=0,
            groups_per_step=3,
            groups_per_evaluation=16,
            max_bytes=2**30,
            max_days=90,
            clock=0.0,
        )
        told_s, process = 0.0, time.process_time()
        made_s = 0.0
        for step in range(1, steps + 1):
            before = time.thread_time()
            groups = [_pending(step * GROUPS_PER_STEP + n) for n in range(GROUPS_PER_STEP)]
            batch = Batch(step, step - 1, tuple(map(_group, groups)))
            made_s += time.thread_time() - before
            before = time.thread_time()
            for group in groups:
                archive.scored(group, "queued", 1.0)
            archive.batch_formed(batch)
            told_s += time.thread_time() - before
            while archive.waiting > 4 * GROUPS_PER_STEP:
                time.sleep(0.01)
        archive.close()
        written_s = time.process_time() - process - told_s - made_s
        assert archive.lost == 0
    rollouts = steps * GROUPS_PER_STEP * SIZE
    told, written = 1e6 * told_s / rollouts, 1e6 * written_s / rollouts
    return [
        Figure("event loop CPU per rollout told to the archive", told, "µs", goal="< 1 µs", met=told < 1),
        Figure("CPU of the archive's thread per rollout", written, "µs", goal="< 20 µs", met=written < 20),
    ]


def _pending(position: int) -> PendingGroup:
    group = PendingGroup(
        task=TrainTask("math", "train", position, 0, position),
        lane=Lane.TRAIN,
        size=SIZE,
        needed=SIZE,
        group_scored=False,
        version=0,
        opened=0.0,
    )
    group.results = [_result(position, number) for number in range(SIZE)]
    return group


def _result(position: int, number: int) -> Result:
    text = "".join(f"step {n} of {position}: the result is {n * number}. " for n in range(TURN_CHARS // 40))
    turn = {"role": "assistant", "content": text}
    entry = {"messages": [{"role": "user", "content": f"task {position}"}, turn], "reward": number / SIZE}
    return Result(
        id=1,
        rollouts=[RolloutHeader(number / SIZE, [1500])],
        tokens=np.zeros(1, np.int32),
        mask=np.ones(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        transcript=msgspec.msgpack.encode([entry]),
    )


def _group(pending: PendingGroup) -> Group:
    arrays = np.zeros(1, np.int32), np.ones(1, np.uint8), np.zeros(1, np.float32)
    facts = plain_facts(1, version=0, version_end=0)
    return Group(pending.task, 0, 0, SIZE, (1,), *arrays, arrays[2], arrays[2], facts, b"", 0)
