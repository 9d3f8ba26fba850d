"""Quotas in a whole run: every batch has its share of every env, however fast each of them is."""

import pytest

from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import TestedWorld, make_settings


@pytest.mark.parametrize("max_versions", range(5))
def test_every_batch_keeps_its_quotas_under_pace(max_versions: int) -> None:
    """What must be trained soon may be of any env, so that a fast one does not push the slow one out of a batch."""
    settings = make_settings(
        ["fast", "slow"],
        batch_size=32,
        group_size=4,
        max_versions=max_versions,
        quotas=True,
        on_starved="wait",
    )
    behaviours = {
        "fast": Behaviour(latency=lambda rng: rng.expovariate(1.0)),
        "slow": Behaviour(latency=lambda rng: rng.expovariate(1 / 20)),
    }
    world = TestedWorld(settings, behaviours, max_inflight=64, train_s=lambda rng: 0.1)
    assert world.play(until=lambda: world.steps() >= 30)
    slow = [sum(group.size for group in batch.groups if group.env == "slow") for _, _, batch in world.trained]
    assert slow == [16] * len(slow)
    assert not world.journal.evicted, "nothing that was finished is thrown away"
