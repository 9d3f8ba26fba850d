"""The run at one moment, as the display and the summary show it."""

import json

import msgspec

from orchestrator.curriculum import CurriculumSettings
from orchestrator.run.status import build_status, build_summary, diagnose
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.support.worlds import NEVER, make_world, quiet


def test_the_status_of_a_run_adds_up() -> None:
    """It is read off the books, which balance."""
    world = make_world(
        {"a": Behaviour(loss=0.2), "b": Behaviour()}, train={"b": {"minimum": 0.25}}, max_steps=20
    )
    assert world.play(until=lambda: world.run.version == 6)
    status = build_status(world.run, world.now, loop_lag_p99_s=0.5)
    assert status.state == "running"
    assert (status.step, status.trained) == (world.parts.versions.formed, 6)
    assert status.version == status.published == 6
    assert status.max_steps == 20
    assert status.batch_size == 16
    assert status.queued_sequences == sum(env.queued for env in status.envs.values())
    assert status.inflight == sum(env.inflight for env in status.envs.values())
    dispatched = sum(env.dispatched for env in status.envs.values())
    assert dispatched == status.inflight + sum(status.outcomes.values())
    assert sum(env.emitted for env in status.envs.values()) == 16 * status.step
    assert sum(env.actual for env in status.envs.values()) == 1.0
    assert status.envs["b"].minimum == 4
    assert status.envs["a"].minimum == 0
    assert status.envs["a"].acceptance < 1.0
    assert status.failures.keys() == {"a: broken"}
    assert status.loop_lag_p99_s == 0.5
    assert [endpoint.healthy for endpoint in status.endpoints] == [True]
    assert status.staleness["max"] <= 2
    assert json.loads(msgspec.json.encode(status))["state"] == "running"


def test_a_waived_minimum_is_shown_with_its_reason() -> None:
    """And how often it happened."""
    world = make_world({"a": Behaviour(), "b": Behaviour()}, train={"b": {"minimum": 0.25}})
    world.turn()
    world.envs["b"].kill(0)
    world.turn()
    status = build_status(world.run, world.now)
    assert status.envs["b"].minimum_waived == "it has no ready server"
    assert status.envs["b"].minimum == 4
    assert (status.envs["b"].servers_ready, status.envs["b"].servers, status.envs["b"].restarts) == (0, 1, 1)
    assert status.minimums_waived == 1


def test_the_last_evaluation_of_every_env_is_shown_however_many_there_are() -> None:
    """Also those of an earlier process; a score that left the status would be missing in the metrics."""
    names = [f"e{number}" for number in range(30)]
    plans = [
        EvalPlan(env=name, split="eval", num_examples=1, rollouts_per_example=1, interval=2) for name in names
    ]
    world = make_world({"a": Behaviour(), **dict.fromkeys(names, Behaviour())}, evals=plans, max_steps=4)
    assert world.play(until=lambda: bool(world.ended))
    world.kill()
    shown = build_status(world.run, world.now).evals
    assert [(result["env"], result["step"]) for result in shown] == [
        (result["env"], result["step"]) for result in world.eval_results if result["step"] in (2, 4)
    ]
    assert {result["env"] for result in shown} == set(names)


def test_a_diagnosis_names_the_oldest_rollout() -> None:
    """With how long it has been under way."""
    world = quiet()
    assert diagnose(world.run, 0.0)["oldest_rollout"] is None
    world.turn()
    found = diagnose(world.run, 30.0)
    assert found["oldest_rollout"] == {"task": "a/train/0", "seconds": 30.0}
    assert found["inflight"] == 8
    assert found["servers_ready"] == {"a": 1}
    assert found["endpoints"] == {"http://virtual/v1": "in service"}
    world.lose_endpoint(away_s=1.0)
    assert diagnose(world.run, 30.0)["endpoints"] == {"http://virtual/v1": "out of service"}


def test_credentials_in_an_address_are_shown_nowhere() -> None:
    """The status goes to the display, to HTTP and to Prometheus, the diagnosis to the log."""
    world = make_world({"a": Behaviour()})
    world.run.parts.pool.endpoints[0].url = "http://user:sesame@virtual/v1?key=sesame"  # type: ignore[misc]
    status = build_status(world.run, 0.0)
    assert [endpoint.url for endpoint in status.endpoints] == ["http://virtual/v1"]
    assert "sesame" not in msgspec.json.encode(status).decode() + str(diagnose(world.run, 0.0))


def test_a_cancelled_rollout_is_not_a_failed_one() -> None:
    """What is given up at the end of a run did nothing wrong."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 1.0), "b": Behaviour(latency=lambda rng: 50.0)}, max_steps=4
    )
    assert world.play(until=lambda: bool(world.ended))
    status = build_status(world.run, world.now)
    assert world.parts.ledger.totals()["cancelled"] > 0
    assert [env.failed for env in status.envs.values()] == [0, 0]
    assert status.eta_s == 0
    assert (status.last.step if status.last else 0) == 4
    assert len(status.envs["a"].rewards) == 4


def test_the_summary_closes_the_run() -> None:
    """Steps that were trained, what came of each env, and every evaluation."""
    plan = EvalPlan(env="e", split="eval", num_examples=2, rollouts_per_example=1, interval=2)
    world = make_world(
        {"a": Behaviour(), "e": Behaviour()}, max_steps=3, evals=[plan], train={"a": {"num_tasks": 7}}
    )
    assert world.play(until=lambda: bool(world.ended))
    summary = build_summary(world.run, world.ended, world.now)
    assert summary["end"] == "max_steps reached"
    assert summary["steps"] == summary["version"] == 3
    assert summary["sequences"] == summary["envs"]["a"]["sequences"] == 48
    assert summary["tokens"] == sum(
        len(group.tokens) for batch in world.journal.batches for group in batch.groups
    )
    assert (summary["last_step"]["step"], summary["last_step"]["staleness"]) == (
        3,
        world.journal.steps[-1].staleness,
    )
    assert summary["envs"]["a"]["last_step"]["latency_s"]["p99"] > 0
    assert summary["envs"]["a"]["num_tasks"] == 7
    assert summary["envs"]["a"]["actual_share"] == 1.0
    assert [result["step"] for result in summary["evals"]] == [0, 2, 3]
    assert summary["wall_time_s"] == round(world.now, 3)


def test_a_run_that_has_done_nothing_has_a_status() -> None:
    """No division by what is not there."""
    world = make_world({"a": Behaviour(latency=lambda rng: NEVER)})
    status = build_status(world.run, 0.0)
    assert (status.state, status.step, status.reward) == ("starting", 0, None)
    assert build_summary(world.run, "stopped", 0.0)["steps"] == 0


def test_tasks_are_shown_by_solve_rate_and_pool() -> None:
    """Of an env with a curriculum and of one without; the summary has the same."""
    curriculum = {"num_tasks": 20, "curriculum": CurriculumSettings("frontier")}
    world = make_world({"a": Behaviour(), "b": Behaviour()}, train={"a": curriculum}, max_steps=4)
    assert world.play(until=lambda: bool(world.ended))
    envs = build_status(world.run, world.now).envs
    told = envs["a"].tasks
    assert told is not None
    assert (told.num_tasks, told.strategy) == (20, "frontier")
    assert 0 < told.tried == sum(told.solve_rates)
    assert sum(told.pools.values()) == 20
    assert len(told.hardest) == len(told.most_tried) == min(8, told.tried)
    rates = [row["solve_rate"] for row in told.hardest]
    assert rates == sorted(rates)
    assert envs["b"].tasks is not None
    assert (envs["b"].tasks.num_tasks, envs["b"].tasks.pools) == (None, {})
    summary = build_summary(world.run, "", world.now)
    assert summary["envs"]["a"]["tasks"]["solve_rates"] == told.solve_rates
    assert summary["envs"]["a"]["tasks"]["hardest"] == told.hardest
