"""The record of a step."""

import numpy as np
import pytest

from orchestrator.facts.steps import length_histogram, spread
from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import make_world


def test_quantiles_are_values_that_occurred() -> None:
    """Of one value, of a hundred, and of none."""
    one = spread([3.0])
    assert one is not None
    assert (one.mean, one.p50, one.p99, one.max) == (3.0, 3.0, 3.0, 3.0)
    hundred = spread(np.arange(1.0, 101.0))
    assert hundred is not None
    assert (hundred.p50, hundred.p90, hundred.p99, hundred.max) == (50.0, 90.0, 99.0, 100.0)
    assert spread([]) is None


def test_lengths_are_counted_by_powers_of_two() -> None:
    """The last place is that of the longest; what is longer than anything sensible shares one."""
    assert length_histogram(np.array([0.0, 1.0, 2.0, 3.0, 4.0, 7.0])) == [2, 2, 2]
    assert len(length_histogram(np.array([2.0**40]))) == 24
    assert length_histogram(np.array([])) == []


def test_a_step_says_what_its_batch_holds_and_what_happened_since_the_one_before() -> None:
    """Shares, ages and lengths add up to the batch; outcomes add up to the ledger; the time is all accounted for."""
    world = make_world(
        {
            "a": Behaviour(
                latency=lambda rng: 1.0 + rng.random(), reward=lambda rng: float(rng.random() < 0.5)
            ),
            "b": Behaviour(latency=lambda rng: 2.0, loss=0.2),
        },
        batch_size=16,
        keep_equal_rewards=False,
        train_s=3.0,
        max_steps=10,
    )
    assert world.play(until=lambda: bool(world.ended))
    steps = world.journal.steps
    assert [record.step for record in steps] == list(range(1, 11))
    for record, batch in zip(steps, world.journal.batches, strict=True):
        assert record.sequences == batch.size == sum(record.staleness) == sum(record.lengths) == 16
        assert record.sequences == sum(env.sequences for env in record.envs.values())
        assert sum(env.share for env in record.envs.values()) == pytest.approx(1.0)
        assert record.tokens == sum(len(group.tokens) for group in batch.groups)
        assert record.reward == pytest.approx(
            np.concatenate([group.rewards for group in batch.groups]).mean()
        )
        for name, env in record.envs.items():
            assert env.sequences == sum(group.size for group in batch.groups if group.env == name)
    last = steps[-1]
    assert sum(sum(record.time.values()) for record in steps) == pytest.approx(last.seconds, abs=0.1)
    assert sum(record.time["trainer"] for record in steps) > 0
    for name in ("a", "b"):
        completed = sum(record.envs[name].outcomes.get("completed", 0) for record in steps)
        assert (
            0
            < completed
            <= sum(
                n
                for _, env, outcome, _, n in world.parts.ledger.rows()
                if (env, outcome) == (name, "completed")
            )
        )
    latency = steps[4].envs["b"].latency_s
    assert latency is not None
    assert latency.p50 == pytest.approx(2.0)
    assert any(record.envs["a"].dropped.get("equal_rewards") for record in steps)
    assert any(record.filtered > 0 for record in steps)
    assert any(record.envs["b"].outcomes.get("failed") for record in steps)


def test_a_later_process_counts_from_where_the_earlier_one_ended() -> None:
    """What was completed before the kill is not counted again in the first step after it."""
    world = make_world({"a": Behaviour(latency=lambda rng: 1.0)}, batch_size=8, max_steps=12, train_s=1.0)
    world.at(5.5, world.kill)
    assert world.play(until=lambda: bool(world.ended))
    assert sum(record.rollouts for record in world.journal.steps) <= sum(
        n for *_, outcome, _, n in world.parts.ledger.rows() if outcome == "completed"
    )
    assert len(world.parts.facts.history) == 12
    assert world.parts.facts.seconds_left(0) == 0
    assert (world.parts.facts.seconds_left(2) or 0) > 0
