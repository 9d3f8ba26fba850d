"""Learning: the local policy learns the built-in environments from rewards alone."""

import asyncio

import numpy as np
import pytest

from envs import Environment, wire
from envs.answering import Responder
from envs.builtin.agree import Agree
from envs.builtin.duel import Duel
from envs.builtin.larger import Larger
from envs.builtin.lookup import Lookup
from envs.builtin.reverse import Reverse
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch
from orchestrator.groups.scoring import build_advantage, build_group, seats_of
from orchestrator.local.policy import Experience
from orchestrator.tasks.task import TrainTask
from orchestrator.trainer.batch import TrainingBatch, decode_batch
from orchestrator.trainer_link.encoding import encode_batch
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


async def play_groups(loop: LocalLoop, environment: Environment, step: int, groups: int) -> TrainingBatch:
    """A batch as a trainer gets it: by way of the server's answers, scoring and the trainer link."""
    responder = Responder(environment, client=loop.client, env="duel")
    made = []
    async with asyncio.TaskGroup() as tasks:
        for place in range(groups):
            index = int(loop.rng.integers(len(environment.tasks("train"))))  # type: ignore[arg-type]
            running = [
                tasks.create_task(
                    responder.answer(wire.Request(member, "rollout", "train", index, "local"), loop.settings)
                )
                for member in range(8)
            ]
            made.append((TrainTask("duel", "train", index, 0, step * groups + place), running))
    built = []
    for task, running in made:
        pending = PendingGroup(
            task=task, lane=Lane.TRAIN, size=8, needed=8, group_scored=False, version=0, opened=0.0
        )
        for attempt in running:
            answer = wire.decode_to_client(attempt.result())
            assert isinstance(answer, wire.Result), answer
            pending.results.append(answer)
        built.append(build_group(pending, seats_of(pending), build_advantage("grpo"), version_end=0))
    frames = encode_batch(Batch(step, 0, tuple(built)), 0, 1)
    return decode_batch([bytearray(frame) for frame in frames])


async def test_both_seats_of_a_game_learn_though_its_rewards_always_have_the_mean_zero() -> None:
    """Each seat is compared with itself: what one wins the other loses, and both come to do what they should."""
    shares: dict[str, list[float]] = {"white": [], "black": []}
    async with LocalLoop() as loop:
        for step in range(1, 41):
            batch = await play_groups(loop, Duel(), step, groups=8)
            experience = Experience()
            for sequence in batch.sequences:
                experience.add(sequence.tokens, sequence.mask, sequence.logprobs, sequence.advantages)
            loop.policy.learn(experience, learning_rate=LEARNING_RATE)
            for seat, history in shares.items():
                own = [one for one in batch.sequences if one.seat == seat]
                assert len(own) == len(batch) // 2
                history.append(float(np.mean([one.metrics[seat] for one in own])))
            assert batch.rewards.sum() == pytest.approx(0.0, abs=1e-4)
    for seat, history in shares.items():
        assert np.mean(history[:3]) < 0.25, seat
        assert np.mean(history[-5:]) > 0.8, seat
