"""Groups for tests of the archive, told as a run tells them, and archives that are opened, filled and closed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from envs.wire import Failure, Result, RolloutHeader
from orchestrator.archive.archive import RolloutArchive
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch, Group, encode_details, plain_facts
from orchestrator.tasks.evaluations import EvalPlan, Evaluation
from orchestrator.tasks.task import TrainTask

SETTINGS: dict[str, Any] = {
    "run_id": "one",
    "last_step": 0,
    "groups_per_step": 3,
    "groups_per_evaluation": 2,
    "max_bytes": 2**30,
    "max_days": 90,
    "clock": 0.0,
}
"""What an archive of a test is opened with."""


@contextmanager
def opened(run_dir: Path, **settings: Any) -> Iterator[RolloutArchive]:
    """An archive; when the block is left, everything that it was told is on disk."""
    archive = RolloutArchive(run_dir, **{**SETTINGS, **settings})
    try:
        yield archive
    finally:
        archive.close()


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for the archive's thread; the test's time limit is the bound."""
    while not condition():
        time.sleep(0.005)


def task_of(position: int, env: str = "math") -> TrainTask:
    return TrainTask(env, "train", index=position % 7, epoch=position // 7, position=position)


def conversation(text: str, reward: float, **more: Any) -> dict[str, Any]:
    """An entry of a transcript."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"says {reward}"}]
    entry = {"messages": messages, "reward": reward, "metrics": {"right": reward}, "stop_reason": "stop"}
    return {**entry, "truncated": False, "timings": {"total": 1.5}, **more}


def pending(
    position: int,
    rewards: Sequence[float] = (0.0, 1.0),
    *,
    env: str = "math",
    version: int = 0,
    text: str = "",
    opened_at: float = 10.0,
) -> PendingGroup:
    """A training group with a result for each reward."""
    group = PendingGroup(
        task=task_of(position, env),
        lane=Lane.TRAIN,
        size=len(rewards),
        needed=len(rewards),
        group_scored=False,
        version=version,
        opened=opened_at,
        version_end=version + 1,
    )
    group.results = [_result(reward, text or f"question {position}") for reward in rewards]
    group.valid = len(rewards)
    return group


def evaluated(index: int, rewards: Sequence[float], *, step: int, env: str = "eval-math") -> PendingGroup:
    """A task of an evaluation."""
    group = pending(index, rewards, env=env, version=step)
    group.lane = Lane.EVAL
    plan = EvalPlan(env=env, split="test", num_examples=9, rollouts_per_example=len(rewards), interval=1)
    group.context = Evaluation(plan=plan, step=step, version=step, started=0.0)
    return group


def _result(reward: float, text: str) -> Result:
    tokens = np.arange(5, dtype=np.int32)
    return Result(
        id=1,
        rollouts=[RolloutHeader(reward, [5], truncated=reward < 0)],
        tokens=tokens,
        mask=np.ones(5, np.uint8),
        logprobs=np.zeros(5, np.float32),
        transcript=msgspec.msgpack.encode([conversation(text, reward)]),
    )


def scored_group(group: PendingGroup) -> Group:
    """The same group as it is recorded and queued."""
    rewards = np.array([one.reward for result in group.results for one in result.rollouts], np.float32)
    size = len(rewards)
    return Group(
        task=group.task,
        version=group.version,
        version_end=group.version_end,
        rollouts=size,
        lengths=(5,) * size,
        tokens=np.arange(5 * size, dtype=np.int32),
        mask=np.ones(5 * size, np.uint8),
        logprobs=np.zeros(5 * size, np.float32),
        rewards=rewards,
        advantages=rewards,
        facts=plain_facts(size, version=group.version, version_end=group.version_end),
        details=encode_details([""], []),
        digest=0,
        transcript=msgspec.msgpack.encode(
            [msgspec.msgpack.decode(result.transcript)[0] for result in group.results]
        ),
    )


def batch_of(step: int, *groups: PendingGroup) -> Batch:
    return Batch(step, step - 1, tuple(scored_group(group) for group in groups))


def failure(kind: str, message: str, detail: str = "") -> Failure:
    return Failure(id=1, kind=kind, message=message, retryable=False, detail=detail)
