"""The environment of the example: say the letter that you are shown, four times. A tiny model learns it within minutes."""

from envs import Environment, Model, Rollout, Task

LETTERS = "abcdefgh"
LENGTH = 4


class Letters(Environment):
    """A task is a letter; the reward is the share of places in the answer that have it."""

    def tasks(self, split: str) -> list[Task]:
        return [{"letter": letter} for letter in LETTERS]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": task["letter"]}], max_tokens=LENGTH)
        right = sum(said == task["letter"] for said in reply.text[:LENGTH])
        return model.rollout(reward=right / LENGTH)
