"""The learning loop without processes or sockets: environments, the local policy and its GRPO step."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from envs import Environment, Model, ModelSettings, Rollout, Task
from orchestrator.local.engine import Engine
from orchestrator.local.policy import Experience, Policy
from orchestrator.local.server import PolicyServer, PolicyServerSpec
from tests.support.chat_only import ChatOnly

GROUP_SIZE = 8
SAMPLING = {"temperature": 1.0, "max_tokens": 4}


@dataclass
class DirectClient(ChatOnly):
    """A `ChatClient` that calls the server's code instead of its port, and keeps the bodies it sent."""

    server: PolicyServer
    bodies: list[bytes] = field(default_factory=list)

    async def chat(self, base_url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        self.bodies.append(body)
        return await self.server.complete(body)


class LocalLoop:
    """Groups of rollouts, and steps of learning, in this event loop; an async context manager."""

    def __init__(self, *, seed: int = 0) -> None:
        self.policy = Policy()
        self.engine = Engine(self.policy, seed=seed)
        self.client = DirectClient(PolicyServer(PolicyServerSpec(), self.engine))
        self.settings = ModelSettings(model="local", sampling=SAMPLING)
        self.rng = np.random.default_rng(seed)

    async def __aenter__(self) -> "LocalLoop":
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._decoding = self._tasks.create_task(self.engine.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._decoding.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def run_group(
        self, environment: Environment, task: Task, size: int = GROUP_SIZE
    ) -> tuple[list[Rollout], list[float]]:
        """Rollouts of one task and their rewards, scored the way an env server does it."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    environment.rollout(task, Model(self.settings, client=self.client, base_url="local"))
                )
                for _ in range(size)
            ]
        rollouts = [attempt.result() for attempt in running]
        rewards = await environment.score_group(task, rollouts)
        for rollout in rollouts:
            rollout.check()
        return rollouts, rewards

    async def measure(self, environment: Environment, tasks: Sequence[Task]) -> float:
        """Mean reward over some tasks."""
        rewards = [reward for task in tasks for reward in (await self.run_group(environment, task))[1]]
        return float(np.mean(rewards))

    async def train(
        self, environments: Mapping[str, Environment], *, steps: int, learning_rate: float, groups: int = 16
    ) -> dict[str, list[float]]:
        """Learn for some steps, the environments taking turns; returns the mean reward per step and environment."""
        history: dict[str, list[float]] = {name: [] for name in environments}
        train_tasks = {name: environment.tasks("train") for name, environment in environments.items()}
        names = list(environments)
        for step in range(steps):
            picks = [names[(step + number) % len(names)] for number in range(groups)]
            async with asyncio.TaskGroup() as tasks:
                running = [
                    (
                        name,
                        tasks.create_task(
                            self.run_group(
                                environments[name], train_tasks[name][self._index(train_tasks[name])]
                            )
                        ),
                    )
                    for name in picks
                ]
            experience = Experience()
            rewards: dict[str, list[float]] = {name: [] for name in names}
            for name, group in running:
                rollouts, scores = group.result()
                rewards[name] += scores
                _add_group(experience, rollouts, scores)
            self.policy.learn(experience, learning_rate=learning_rate)
            for name, earned in rewards.items():
                history[name].append(float(np.mean(earned)))
        return history

    def _index(self, tasks: object) -> int:
        size = len(tasks) if hasattr(tasks, "__len__") else 2**31
        return int(self.rng.integers(size))


def _add_group(experience: Experience, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
    """Advantages as GRPO has them: how far from the group's mean, in its standard deviations."""
    deviations = np.array(rewards) - np.mean(rewards)
    advantages = deviations / (np.std(rewards) + 1e-6)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        for sequence in rollout.sequences:
            experience.add(
                sequence.tokens, sequence.mask, sequence.logprobs, sequence.mask * np.float32(advantage)
            )
