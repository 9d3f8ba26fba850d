"""The search for runs that stop has teeth: defects that once were there, put back, are found by a named scenario."""

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.buffer import BatchBuffer
from orchestrator.dispatch.admission import Admission
from orchestrator.simulate.neighbours import Server, VirtualEnv
from orchestrator.sinks.train_sink import TrainSink
from tests.support.scenarios import Env, Scenario, check, play, thrown_away

CROWDED = Scenario(envs=(Env(),), batch_size=64, max_inflight=512, capacity=16, max_versions=4)
MISFIT = Scenario(envs=(Env(group_size=3),), batch_size=16, max_versions=0, max_inflight=64)
STARVED = Scenario(
    envs=(Env(latency=0.05), Env(minimum=0.4, rollouts_per_minute=60.0)),
    batch_size=16,
    max_buffered=1.0,
    max_versions=4,
    mode="drop",
)
SEVERAL = Scenario(
    envs=(Env(group_size=4, sequences=(4,), spread=1.0),), batch_size=64, max_versions=1, max_inflight=200
)


def fails(scenario: Scenario) -> str:
    """What is wrong with a scenario; empty where nothing is."""
    try:
        played = play(scenario, limit_s=3000.0, max_events=20_000)
        check(scenario, played)
    except AssertionError as error:
        return str(error)
    lost = thrown_away(played) if scenario.mode == "pace" else []
    return f"thrown away: {lost}" if lost else ""


def no_room_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(self: VirtualEnv, count: int) -> Server | None:
        return next((server for server in self._servers if server.has_room(count)), None)

    monkeypatch.setattr(VirtualEnv, "reserve", reserve)


def nothing_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BatchBuffer.take

    def whole(self: BatchBuffer[Any], now: float | None = None, **options: Any) -> list[Any] | None:
        options["at_once"] = False
        return take(self, None, **options)

    monkeypatch.setattr(BatchBuffer, "take", whole)
    monkeypatch.setattr(BatchBuffer, "split_at", None)


def a_full_queue_stops_every_env(monkeypatch: pytest.MonkeyPatch) -> None:
    def eligible(self: Admission, now: float) -> list[list[str]]:
        if self._closed() is not None or self._pace.engines_behind:
            return []
        crowded = self._crowded()
        return [[name for name in self._train if self._limit(name, now) is None and crowded[name] is None]]

    monkeypatch.setattr(Admission, "eligible", eligible)


def a_rollout_is_taken_for_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainSink, "expected", lambda self, env: self._group_sizes[env])


@pytest.mark.parametrize(
    ("defect", "scenario", "complaint"),
    [
        (no_room_is_reserved, CROWDED, "requests on a server for 16"),
        (nothing_is_split, MISFIT, "no progress"),
        (a_full_queue_stops_every_env, STARVED, "no progress"),
        (a_rollout_is_taken_for_one_sequence, SEVERAL, "thrown away"),
    ],
)
def test_a_defect_that_is_put_back_is_found(
    defect: Callable[[pytest.MonkeyPatch], None],
    scenario: Scenario,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scenario holds without the defect, and fails with it, for the reason that is meant."""
    assert fails(scenario) == ""
    defect(monkeypatch)
    assert complaint in fails(scenario)
