"""Every decision is bounded work: the steps of one `advance`, and how often it is called at one moment, are counted."""

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from orchestrator.run.run import Run
from tests.support.scenarios import Env, Scenario, play, scenarios

CALLS = 100_000
"""Of functions in one `advance`, which may start 256 attempts; the most that was seen is half of it: 200 groups of one rollout each."""

TURNS = 500
"""Of `advance` at one moment of virtual time: up to 200 rollouts in flight may end then, and each end is followed by one."""

QUOTAS = Scenario(
    envs=(
        Env(group_size=8, ratio=0.5, latency=0.01, sequences=(2, 3)),
        Env(group_size=8, ratio=0.5, latency=0.05, loss=0.05, sequences=(2, 3), group_scored=True),
        Env(group_size=5, ratio=0.5, latency=0.3, loss=0.05, sequences=(2, 3), max_inflight=2),
    ),
    batch_size=24,
    quotas=True,
    on_starved="wait",
    max_buffered=3.0,
    mode="drop",
    max_versions=4,
    max_inflight=32,
    train_s=0.1,
    min_valid=2,
    strategy="adaptive",
    server_deaths=(0.5, 1.0, 2.0),
)


class Work:
    """Counts what a run does to decide."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.most_calls = 0
        self.turns = 0
        self.most_turns = 0
        self._moment: tuple[Run, float] | None = None
        advance = Run.advance

        def counted(run: Run, now: float, **options: Any) -> bool:
            self.calls = 0
            sys.setprofile(self._count)
            try:
                return advance(run, now, **options)
            finally:
                sys.setprofile(None)
                self.most_calls = max(self.most_calls, self.calls)
                self._turn(run, now)

        monkeypatch.setattr(Run, "advance", counted)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"
        if self.calls > CALLS:
            sys.setprofile(None)
            raise AssertionError(f"one advance takes more than {CALLS} calls")

    def _turn(self, run: Run, now: float) -> None:
        self.turns = self.turns + 1 if self._moment == (run, now) else 1
        self._moment = run, now
        self.most_turns = max(self.most_turns, self.turns)
        assert self.turns <= TURNS, f"advance is called more than {TURNS} times at once"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def test_quotas_of_groups_of_many_sizes_are_bounded_work(work: Work) -> None:
    """Groups as large as a batch, partial ones among them, an env at its cap, servers that die."""
    for seed in range(3):
        assert play(replace(QUOTAS, seed=seed)).finished
    assert work.most_calls > 100, "it counts"


@pytest.mark.timeout(600)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenario=scenarios())
def test_any_decision_is_bounded_work(work: Work, scenario: Scenario) -> None:
    """Whatever the configuration and the weather."""
    play(scenario)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenario=scenarios(on_stuck="split", quotas=True, unit="sequences", batch_size=64))
def test_any_decision_by_quota_is_bounded_work(work: Work, scenario: Scenario) -> None:
    """Where most arithmetic is done for a batch."""
    play(scenario)
