"""Pick one of the offered letters, and the same one as the rest of the group: a reward that needs the whole group.

No answer is right in itself. A policy that picks at random earns little; one that has found a rule, whichever
it is, earns everything.
"""

import itertools
from collections import Counter

from envs import Environment, Model, Rollout, Task
from envs.builtin._latency import Latency


class Agree(Environment):
    """`choices` letters out of `letters` are offered; `latency_s` is the median time until an answer is taken down."""

    def __init__(
        self,
        letters: str = "abcdefgh",
        choices: int = 3,
        latency_s: float = 0.05,
        latency_spread: float = 0.5,
    ) -> None:
        offers = ["".join(offer) for offer in itertools.permutations(letters, choices)]
        self._splits = {
            "eval": offers[::8],
            "train": [offer for number, offer in enumerate(offers) if number % 8],
        }
        self._latency = Latency(latency_s, latency_spread)

    def tasks(self, split: str) -> list[Task]:
        return [{"offer": offer} for offer in self._splits[split]]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": f"agree {task['offer']}"}])
        await self._latency.wait(task["offer"])
        valid = len(reply.text) == 1 and reply.text in task["offer"]
        return model.rollout(reward=0.0, metrics={"valid": float(valid)})

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        answers = [
            rollout.messages[-1]["content"] if rollout.metrics["valid"] else None for rollout in rollouts
        ]
        votes = Counter(answers)
        return [votes[answer] / len(rollouts) if answer else 0.0 for answer in answers]
