"""Learning: the local policy learns the built-in environments from rewards alone."""

import numpy as np

from envs import Environment
from envs.builtin.agree import Agree
from envs.builtin.larger import Larger
from envs.builtin.lookup import Lookup
from envs.builtin.reverse import Reverse
from tests.support.local_loop import LocalLoop

LEARNING_RATE = 2.5
STEPS = 50


def quickstart_environments() -> dict[str, Environment]:
    return {"reverse": Reverse(), "agree": Agree(latency_s=0), "lookup": Lookup(latency_s=0)}


async def test_rewards_climb_from_chance_and_carry_over_to_tasks_never_trained_on() -> None:
    """Three environments mixed in one stream of batches are all learned, and their eval splits with them."""
    environments = quickstart_environments()
    async with LocalLoop() as loop:
        history = await loop.train(environments, steps=STEPS, learning_rate=LEARNING_RATE)
        unseen = {
            name: await loop.measure(environment, [environment.tasks("eval")[index] for index in range(20)])
            for name, environment in environments.items()
        }
    for name in environments:
        assert np.mean(history[name][:3]) < 0.15, name
        assert np.mean(history[name][-5:]) > 0.85, name
        assert unseen[name] > 0.8, name


async def test_without_a_learning_rate_rewards_stay_at_chance() -> None:
    """Nothing but learning makes the reward climb: with a learning rate of 0 it does not."""
    async with LocalLoop() as loop:
        history = await loop.train(quickstart_environments(), steps=20, learning_rate=0.0)
    for rewards in history.values():
        assert np.mean(rewards[-10:]) < 0.1
        assert abs(np.mean(rewards[-10:]) - np.mean(rewards[:10])) < 0.05


async def test_what_cannot_be_copied_is_learned_too() -> None:
    """Comparing two digits, which no single rule of copying solves, is learned alone."""
    environment = Larger(latency_s=0)
    async with LocalLoop() as loop:
        history = await loop.train({"larger": environment}, steps=40, learning_rate=LEARNING_RATE)
        unseen = await loop.measure(environment, environment.tasks("eval"))
    assert np.mean(history["larger"][:2]) < 0.15
    assert np.mean(history["larger"][-5:]) > 0.85
    assert unseen > 0.7
