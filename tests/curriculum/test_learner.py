"""Curricula on a learner: fewer groups are wasted on equal rewards, and fewer rollouts teach as much."""

import pytest

from benchmarks.curriculum import Learned, learn
from orchestrator.curriculum import STRATEGIES


@pytest.fixture(scope="module")
def uniform() -> Learned:
    return learn("uniform", 1, num_tasks=600, goal=0.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_curriculum_wastes_half_and_learns_from_fewer_rollouts(strategy: str, uniform: Learned) -> None:
    """`make bench ONLY=curriculum` has more seeds, more tasks and the figures."""
    learned = learn(strategy, 1, num_tasks=600, goal=0.5)
    assert learned.reward >= 0.5
    assert learned.waste <= uniform.waste / 2
    assert learned.groups < uniform.groups
