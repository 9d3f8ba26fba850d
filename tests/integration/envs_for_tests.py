"""Environments for tests of the whole service: quick, and each with one way to behave.

The tokens of `Dice` and what is made from it tell which task they are of; with `asked`, a file, every environment
notes the index of each task that it is asked for, so that a test need not take the service's word for it.
"""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np

from envs import Environment, Model, Rollout, Sequence, Task, Tasks
from envs.errors import RolloutFailure

TOKENS = 8
"""Tokens of a rollout, the first of which is the task's index."""


class Dice(Environment):
    """A reward at random after `latency_s`; `tasks` of them, or without end."""

    def __init__(self, *, tasks: int | None = None, latency_s: float = 0.0, asked: str | None = None) -> None:
        self._size = tasks
        self._latency_s = latency_s
        self._asked = None if asked is None else Path(asked)

    def tasks(self, split: str) -> Tasks:
        if self._size is not None:
            return [{"index": index} for index in range(self._size)]
        return Endless()

    async def rollout(self, task: Task, model: Model) -> Rollout:
        if self._asked is not None:
            with self._asked.open("a", encoding="utf-8") as file:
                file.write(f"{task['index']}\n")
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        return await self.attempt(task, model)

    async def attempt(self, task: Task, model: Model) -> Rollout:
        """What follows when the task has been noted and the time is over."""
        return dice_rollout(task["index"])


class Endless:
    """Tasks made from their index."""

    def __getitem__(self, index: int, /) -> Task:
        return {"index": index}


def dice_rollout(index: int) -> Rollout:
    """A rollout of a task: random tokens behind its index, and a random reward."""
    tokens = np.asarray([index, *random.choices(range(1000), k=TOKENS - 1)], np.int32)
    logprobs = -np.asarray([random.random() for _ in range(TOKENS)], np.float32)
    return Rollout([Sequence(tokens, np.ones(TOKENS, np.uint8), logprobs)], random.random())


class Ranked(Dice):
    """Scores whole groups: the reward is the rank in the group."""

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        return [float(rank) for rank in range(len(rollouts))]


class Flaky(Dice):
    """Every fifth task can never be done; every seventh attempt at another fails and is worth repeating."""

    async def attempt(self, task: Task, model: Model) -> Rollout:
        if task["index"] % 5 == 0:
            raise ValueError("this task has no answer")
        if random.randrange(7) == 0:
            raise RolloutFailure("sandbox_busy", "no sandbox is free", retryable=True)
        return dice_rollout(task["index"])


class Chat(Dice):
    """One turn with the model; the reward is random."""

    async def attempt(self, task: Task, model: Model) -> Rollout:
        await model.chat([{"role": "user", "content": f"task {task['index']}"}])
        return model.rollout(random.random())


class Level(Dice):
    """Every rollout is worth the same, so no group can be trained on."""

    async def attempt(self, task: Task, model: Model) -> Rollout:
        rollout = dice_rollout(task["index"])
        rollout.reward = 0.5
        return rollout


class Failing(Dice):
    """No rollout succeeds."""

    async def attempt(self, task: Task, model: Model) -> Rollout:
        raise ValueError("the judge is out of order")


class Dying(Dice):
    """Every rollout kills its server."""

    async def attempt(self, task: Task, model: Model) -> Rollout:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


class Gated(Dice):
    """Rollouts wait until a file appears."""

    def __init__(self, *, gate: str, **options: Any) -> None:
        super().__init__(**options)
        self._gate = Path(gate)

    async def attempt(self, task: Task, model: Model) -> Rollout:
        while not self._gate.exists():  # noqa: ASYNC110  the file comes from another process
            await asyncio.sleep(0.02)
        return dice_rollout(task["index"])


class Unloadable(Dice):
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("the dataset is not where it should be")


class Waiting(Dice):
    """Loads until a file appears."""

    def __init__(self, *, gate: str, **options: Any) -> None:
        super().__init__(**options)
        self._gate = Path(gate)

    async def setup(self) -> None:
        while not self._gate.exists():  # noqa: ASYNC110  the file comes from another process
            await asyncio.sleep(0.02)
