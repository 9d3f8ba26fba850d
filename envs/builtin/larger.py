"""Name the larger of two digits: one turn, a short wait for a grader, a rule that no single letter gives away."""

import itertools

from envs import Environment, Model, Rollout, Task
from envs.builtin._latency import Latency
from envs.builtin._scoring import overlap


class Larger(Environment):
    """`latency_s` is the median time of the grader."""

    def __init__(
        self, digits: str = "0123456789", latency_s: float = 0.02, latency_spread: float = 0.5
    ) -> None:
        pairs = list(itertools.permutations(digits, 2))
        # Both orders of a pair are in the same split, so that the eval split holds pairs never trained on.
        self._splits = {
            "train": [pair for pair in pairs if sum(map(int, pair)) % 5],
            "eval": [pair for pair in pairs if sum(map(int, pair)) % 5 == 0],
        }
        self._latency = Latency(latency_s, latency_spread)

    def tasks(self, split: str) -> list[Task]:
        return [{"pair": "".join(pair)} for pair in self._splits[split]]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": f"larger {task['pair']}"}])
        await self._latency.wait(task["pair"])
        return model.rollout(reward=overlap(reply.text, max(task["pair"])))
