"""Ask a tool for a value and pass on what it says: two turns, a slow tool, tasks without end.

The conversation only grows, so that both turns are one training sequence. The reward is half for asking the tool
for the right key and half for the right value at the end.
"""

import random

from envs import Environment, Model, Rollout, Task
from envs.builtin._latency import Latency
from envs.builtin._scoring import overlap

KEYS = "abcdefgh"
VALUES = "0123456789"


class Records:
    """Tasks made from their index: a table of records, and the key that is asked for."""

    def __init__(self, split: str) -> None:
        self._split = split

    def __getitem__(self, index: int) -> Task:
        rng = random.Random(f"{self._split}/{index}")
        key = rng.choice(KEYS)
        # The splits differ in the values that a key can have, so no question and answer is in both.
        values = [value for value in VALUES if ((ord(key) + int(value)) % 5 == 0) == (self._split == "eval")]
        table = {other: rng.choice(VALUES) for other in KEYS} | {key: rng.choice(values)}
        return {"key": key, "table": table, "seed": f"{self._split}/{index}"}


class Lookup(Environment):
    """`latency_s` is the median time of the tool."""

    def __init__(self, latency_s: float = 0.2, latency_spread: float = 0.5) -> None:
        self._latency = Latency(latency_s, latency_spread)

    def tasks(self, split: str) -> Records:
        return Records(split)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        messages = [{"role": "user", "content": f"lookup {task['key']}"}]
        call = await model.chat(messages)
        await self._latency.wait(task["seed"])
        messages += [call.message, {"role": "tool", "content": task["table"].get(call.text, "unknown")}]
        answer = await model.chat(messages)
        right_call = overlap(call.text, task["key"])
        right_answer = overlap(answer.text, task["table"][task["key"]])
        return model.rollout(reward=(right_call + right_answer) / 2, metrics={"right_call": right_call})
