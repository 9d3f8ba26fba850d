"""The environment of the example: answer in digits. A model that knows nothing learns it within a few dozen steps."""

from envs import Environment, Model, Rollout, Task, Tasks

LENGTH = 6


class Digits(Environment):
    """A task is a letter that is of no help; the reward is the share of the answer's places that hold a digit."""

    def tasks(self, split: str) -> Tasks:
        return [{"letter": letter} for letter in "abcdefgh"]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": task["letter"]}], max_tokens=LENGTH)
        return model.rollout(reward=sum(said.isdigit() for said in reply.text) / LENGTH)
