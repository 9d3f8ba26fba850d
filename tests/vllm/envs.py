"""An environment for runs on a real engine: one question, and a reward that differs within a group."""

from envs import Environment, Model, Rollout, Task, Tasks


class Questions(Environment):
    """Asks one question a task; the reward is by the length of the answer."""

    def tasks(self, split: str) -> Tasks:
        return [{"question": f"question {number}: what is {number} plus 7?"} for number in range(64)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": task["question"]}])
        return model.rollout(reward=float(len(reply.text)))


class Conversations(Questions):
    """Three turns a task, so that versions come while a rollout is under way."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        messages: list[dict[str, object]] = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            reply = await model.chat(messages)
            messages += [reply.message, {"role": "user", "content": "and then?"}]
        return model.rollout(reward=float(len(reply.text)))
