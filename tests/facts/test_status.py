"""The status of a run by domain."""

import pytest

from orchestrator.facts import by_domain
from tests.support.sample_status import env_status


def test_the_envs_of_a_domain_are_summed_up() -> None:
    """Shares and counts are added, rewards weighted by the envs' targets; an env without a reward does not count."""
    envs = {
        "gsm": env_status(target=0.3, actual=0.25, recent=0.2, emitted=25, inflight=3, reward=1.0),
        "code": env_status(domain="code", target=0.6, reward=None),
        "aime": env_status(target=0.1, actual=0.05, recent=0.1, emitted=5, inflight=1, reward=0.0),
        "new": env_status(target=0.0, actual=0.0, recent=0.0, emitted=0, inflight=0, reward=None),
    }
    found = by_domain(envs)
    assert list(found) == ["math", "code"]
    math = found["math"]
    assert math.envs == ["gsm", "aime", "new"]
    assert (math.target, math.emitted, math.inflight) == (0.4, 30, 4)
    assert math.reward == pytest.approx(0.75)
    assert found["code"].reward is None
