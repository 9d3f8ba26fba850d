"""Records of steps, made up, for what shows them: a run that learns, with noise, envs of their own pace and failures."""

import math
import random

from orchestrator.facts.steps import EnvStep, Spread, StepRecord

NAMES = ("reverse", "agree", "lookup")


def spread_of(mean: float) -> Spread:
    return Spread(mean, mean * 0.9, mean * 1.5, mean * 2.0, mean * 2.5)


def step_record(
    step: int, *, envs: tuple[str, ...] = NAMES, batch: int = 128, learns: float = 30.0, seed: int = 0
) -> StepRecord:
    """The record of one step; the same arguments make the same record."""
    rng = random.Random(f"{seed} {step}")
    target = 1 / len(envs)
    told = {}
    for place, name in enumerate(envs):
        reward = 1 - math.exp(-step / (learns * (1 + place))) + rng.gauss(0, 0.03)
        sequences = round(batch * target + rng.gauss(0, 3))
        length = 40 * (1 + place) + step / learns * 10
        told[name] = EnvStep(
            sequences=sequences,
            share=sequences / batch,
            target=target,
            reward=reward,
            tokens=int(sequences * length),
            length=spread_of(length),
            truncated=0.02 * place,
            sampled_reward=reward * 0.9,
            latency_s=spread_of(0.2 * (1 + place) + 0.05 * rng.random()),
            metrics={"turns": 1.0 + place + rng.random() * 0.2, "format": min(1.0, 0.5 + step / 100)},
            outcomes={"completed": sequences, "failed": place} if place else {"completed": sequences},
            dropped={"equal_rewards": 8} if step % 3 == 0 else {},
            inflight=20 + 5 * place + rng.randrange(4),
            quarantined=False,
        )
    waited = {"rollouts": 0.6 + 0.3 * rng.random(), "trainer": 0.3, "weights": 0.05, "paused": 0.0}
    took = sum(waited.values())
    tokens = sum(env.tokens for env in told.values())
    return StepRecord(
        step=step,
        version=step - 1,
        seconds=step * 1.1,
        groups=batch // 8,
        sequences=batch,
        tokens=tokens,
        reward=sum(env.reward or 0.0 for env in told.values()) / len(envs),
        sampled_reward=0.4,
        length=spread_of(tokens / batch),
        lengths=[0, 0, 0, 2, 10, 60, 40, 16],
        staleness=[90, 30, 8],
        truncated=0.02,
        filtered=0.1 + 0.02 * rng.random(),
        rollouts=batch,
        rollouts_per_s=batch / took,
        tokens_per_s=tokens / took,
        time=waited,
        envs=told,
        at=1_700_000_000.0 + step * 1.1,
        trainer={"loss": 0.5 * math.exp(-step / learns) + 0.05 * rng.random(), "entropy": 2.0 - step / 1000},
    )
