"""An environment whose every trait is drawn: how long a rollout takes, whether it fails, how many sequences it yields.

Each sequence begins with a mark of its own in its prompt, so that a trainer can tell whether it was given one twice.
"""

import asyncio
import os
import random
import time
import uuid
from pathlib import Path

from envs import Environment, Model, Rollout, Task, Tasks
from envs.errors import RolloutFailure
from tests.integration.server_envs import fixed_rollout


class Endless:
    """Tasks made from their index."""

    def __getitem__(self, index: int, /) -> Task:
        return {"index": index}


class Drawn(Environment):
    """Waits, perhaps fails, and asks the model once per sequence, with prompts that do not extend each other."""

    def __init__(
        self,
        *,
        tasks: int | None = None,
        latency_s: tuple[float, float] = (0.0, 0.0),
        busy: float = 0.0,
        broken: float = 0.0,
        sequences: tuple[int, int] = (1, 1),
    ) -> None:
        """`busy` and `broken` are the shares of rollouts that fail, worth repeating or not."""
        self._size = tasks
        self._latency_s = latency_s
        self._busy = busy
        self._broken = broken
        self._sequences = sequences

    def tasks(self, split: str) -> Tasks:
        return Endless() if self._size is None else [{"index": index} for index in range(self._size)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await asyncio.sleep(random.uniform(*self._latency_s))
        draw = random.random()
        if draw < self._busy:
            raise RolloutFailure("sandbox_busy", "no sandbox is free", retryable=True)
        if draw < self._busy + self._broken:
            raise ValueError("this attempt came to nothing")
        for _ in range(random.randint(*self._sequences)):
            await model.chat([{"role": "user", "content": f"{uuid.uuid4().hex} {task['index']}"}])
        return model.rollout(random.random())


class DrawnGroup(Drawn):
    """The same, scored as a group."""

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        return [float(rank) for rank in range(len(rollouts))]


class Held(Drawn):
    """A rollout of task 0 holds the server's event loop until somebody has opened a FIFO for writing and closed it."""

    def __init__(self, *, fifo: str) -> None:
        super().__init__()
        self._fifo = Path(fifo)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        if task["index"] == 0:
            self._fifo.read_bytes()
        return fixed_rollout(task["index"])


class Leaking(Drawn):
    """Every rollout leaves something behind: a task that never ends, an open file, memory, a child process."""

    def __init__(self, *, child_every: int = 20) -> None:
        super().__init__()
        self._child_every = child_every
        self._kept: list[object] = []

    async def rollout(self, task: Task, model: Model) -> Rollout:
        self._kept.append(asyncio.create_task(asyncio.Event().wait()))
        self._kept.append(os.open("/dev/null", os.O_RDONLY))
        self._kept.append(bytearray(100_000))
        if task["index"] % self._child_every == 0:
            self._kept.append(await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True))
        return await super().rollout(task, model)


class Blocking(Drawn):
    """Every rollout holds the server's event loop for a while, as code that was not written for asyncio does."""

    def __init__(self, *, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def rollout(self, task: Task, model: Model) -> Rollout:
        time.sleep(self._seconds)  # noqa: ASYNC251  that is its point
        return await super().rollout(task, model)
