"""A step's record, made up, with everything in it, for what shows and passes on such records."""

from typing import Any

from orchestrator.facts import EnvStep, Spread, StepRecord

SPREAD = Spread(mean=2.0, p50=2.0, p90=3.0, p99=4.0, max=5.0)


def sample_env_step(**changes: Any) -> EnvStep:
    """One env in it."""
    fields: dict[str, Any] = {
        "sequences": 8,
        "share": 1.0,
        "target": 1.0,
        "reward": 0.5,
        "tokens": 16,
        "length": SPREAD,
        "truncated": 0.25,
        "sampled_reward": 0.4,
        "latency_s": SPREAD,
        "metrics": {"turns": 2.0},
        "outcomes": {"completed": 8},
        "dropped": {"equal_rewards": 4},
        "inflight": 3,
        "quarantined": False,
    }
    return EnvStep(**(fields | changes))


def sample_step(**changes: Any) -> StepRecord:
    """A step with one env, trained on."""
    fields: dict[str, Any] = {
        "step": 1,
        "version": 1,
        "seconds": 10.0,
        "groups": 2,
        "sequences": 8,
        "tokens": 16,
        "reward": 0.5,
        "sampled_reward": 0.4,
        "length": SPREAD,
        "lengths": [0, 8],
        "staleness": [4, 0, 4],
        "truncated": 0.25,
        "filtered": 0.5,
        "rollouts": 8,
        "rollouts_per_s": 4.0,
        "tokens_per_s": 8.0,
        "time": {"rollouts": 1.0, "trainer": 2.0, "weights": 0.5, "paused": 0.0},
        "envs": {"math": sample_env_step()},
        "at": 1e9,
        "acknowledged_at": 1e9,
        "trainer": {"loss": 0.25},
    }
    return StepRecord(**(fields | changes))
