"""An environment that only waits: it shows what the orchestrator itself costs."""

import asyncio
import random
from typing import Any

import numpy as np

from envs import Environment, Model, Rollout, Sequence, Task


class _Endless:
    def __getitem__(self, index: int, /) -> Task:
        return {"index": index}


class Sleepy(Environment):
    """Every rollout takes `latency_s`, give or take half of it, and yields `tokens` tokens, without asking the model."""

    def __init__(self, latency_s: float = 0.05, tokens: int = 64) -> None:
        self._latency_s = latency_s
        self._tokens = np.arange(tokens, dtype=np.int32)
        self._mask = np.ones(tokens, dtype=np.uint8)
        self._logprobs = np.full(tokens, -0.5, dtype=np.float32)

    def tasks(self, split: str) -> Any:
        return _Endless()

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await asyncio.sleep(self._latency_s * random.uniform(0.5, 1.5))
        reward = float(task["index"] % 2)
        return Rollout(sequences=[Sequence(self._tokens, self._mask, self._logprobs)], reward=reward)
