"""An environment for runs on a real engine: one question, and a reward that differs within a group."""

from envs import Environment, Model, Rollout, Task, Tasks


class Questions(Environment):
    """Asks one question a task; the reward is by the length of the answer."""

    def tasks(self, split: str) -> Tasks:
        return [{"question": f"question {number}: what is {number} plus 7?"} for number in range(64)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": task["question"]}])
        return model.rollout(reward=float(len(reply.text)))
