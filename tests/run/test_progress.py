"""Every run makes progress, exactly and once only, whatever its configuration and whatever happens to it.

A random search over configurations and weather in virtual time, and the scenarios by name that stopped runs or lost
work before.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings

from orchestrator.dispatch.ledger import Lane
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.support.scenarios import Env, Scenario, check, explain, play, scenarios, steered, thrown_away
from tests.support.worlds import NEVER, make_world

EXAMPLES = int(os.environ.get("PROGRESS_EXAMPLES", "600"))
"""Of the slow searches; before a release there are more."""

search: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@pytest.mark.timeout(600)
@settings(max_examples=50, **search)
@given(scenario=scenarios())
def test_any_run_finishes_with_exact_batches(scenario: Scenario) -> None:
    """It ends, batches are exact and fresh enough, minimums hold, and nothing is trained on twice."""
    check(scenario, play(scenario))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, **search)
@given(scenario=scenarios())
def test_any_of_many_runs_finishes_with_exact_batches(scenario: Scenario) -> None:
    """The same, searched for longer; the smallest scenario that fails is printed."""
    note(repr(scenario))
    check(scenario, play(scenario))


calm: dict[str, Any] = {"mode": "pace", "on_stuck": "split", "kills": (), "server_deaths": ()}
"""No process dies; rollouts fail, trainers are slow, and inference servers go away all the same."""


def throws_nothing_away(scenario: Scenario) -> None:
    """Nothing that is finished becomes too old, but for the ends of groups that no later batch may use."""
    played = play(scenario)
    assert played.finished, played.why
    assert thrown_away(played) == []


@pytest.mark.timeout(600)
@settings(max_examples=20, derandomize=True, **search)
@given(scenario=scenarios(**calm))
def test_pace_throws_nothing_away(scenario: Scenario) -> None:
    """What is finished is trained on: by minimums, by quotas and by tokens."""
    throws_nothing_away(scenario)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, derandomize=True, **search)
@given(scenario=scenarios(**calm, quotas=False))
def test_pace_throws_nothing_away_in_many_runs(scenario: Scenario) -> None:
    """The same, searched for longer."""
    note(repr(scenario))
    throws_nothing_away(scenario)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("on_starved", ["redistribute", "wait"])
def test_pace_throws_nothing_away_by_quota(on_starved: str) -> None:
    """Quotas give way by a part of a group where a group would otherwise become too old."""

    @settings(max_examples=EXAMPLES // 2, derandomize=True, **search)
    @given(
        scenario=scenarios(**calm, quotas=True, unit="sequences", on_starved=on_starved).filter(
            lambda scenario: scenario.batch_size <= 64
        )
    )
    def look(scenario: Scenario) -> None:
        note(repr(scenario))
        throws_nothing_away(scenario)

    look()


THROWN_AWAY = {
    "a minimum of one that only whole groups of six can keep": Scenario(
        envs=(
            Env(group_size=6, minimum=0.1, latency=0.05, spread=0.0),
            Env(group_size=5, minimum=0.2),
            Env(group_size=3),
        ),
        batch_size=8,
        capacity=8,
        train_s=0.1,
    ),
    "first groups of four sequences per rollout, beside minimums": Scenario(
        envs=(
            Env(group_size=8, minimum=0.2, spread=0.0, loss=0.05, sequences=(2, 4), group_scored=True),
            Env(group_size=2, minimum=0.25, spread=0.0, sequences=(4,), group_scored=True),
            Env(group_size=3, ratio=3.0, sequences=(4,)),
        ),
        batch_size=64,
        max_versions=3,
        max_inflight=200,
        train_s=20.0,
        seed=130,
    ),
    "quotas that wait, with rollouts of one to four sequences": Scenario(
        envs=(
            Env(group_size=8, latency=8.0, spread=0.0, sequences=(1, 2, 3, 4)),
            Env(group_size=4, latency=8.0, spread=0.0, group_scored=True),
        ),
        batch_size=64,
        quotas=True,
        on_starved="wait",
        max_versions=3,
        max_inflight=16,
        capacity=8,
        train_s=20.0,
        load_s=2.0,
    ),
    "quotas beside an env that often fails": Scenario(
        envs=(
            Env(group_size=2, ratio=0.2, spread=0.0, loss=0.05, group_scored=True, rollouts_per_minute=600.0),
            Env(
                group_size=1,
                ratio=0.2,
                spread=1.0,
                loss=0.2,
                sequences=(1, 2, 3),
                max_inflight=4,
                rollouts_per_minute=600.0,
            ),
            Env(group_size=2, ratio=0.2, spread=0.0, max_inflight=4, rollouts_per_minute=600.0),
        ),
        batch_size=16,
        quotas=True,
        max_versions=1,
        max_inflight=16,
        train_s=0.0,
        seed=544,
    ),
    "quotas that wait for an env that is at its cap": Scenario(
        envs=(
            Env(
                group_size=1,
                ratio=3.0,
                loss=0.8,
                group_scored=True,
                max_inflight=4,
                rollouts_per_minute=600.0,
            ),
            Env(group_size=3, ratio=0.2, spread=0.0, loss=0.2, sequences=(1, 2, 3, 4), max_inflight=16),
        ),
        batch_size=16,
        quotas=True,
        on_starved="wait",
        max_buffered=1.5,
        max_versions=0,
        servers=2,
        capacity=8,
        train_s=0.0,
        load_s=10.0,
        seed=26,
    ),
    "quotas whose whole groups are more than a batch": Scenario(
        envs=(
            Env(group_size=7, loss=0.05, max_inflight=4, rollouts_per_minute=600.0),
            Env(
                group_size=1,
                ratio=3.0,
                latency=0.05,
                spread=0.0,
                loss=0.05,
                sequences=(2,),
                group_scored=True,
                max_inflight=4,
                rollouts_per_minute=600.0,
            ),
            Env(group_size=4, ratio=3.0, latency=8.0, group_scored=True, rollouts_per_minute=60.0),
        ),
        batch_size=24,
        quotas=True,
        on_starved="wait",
        max_buffered=1.0,
        max_versions=0,
        max_inflight=16,
        servers=3,
        capacity=32,
        train_s=20.0,
        seed=360,
    ),
}


@pytest.mark.parametrize("name", THROWN_AWAY)
def test_a_named_scenario_throws_nothing_away(name: str) -> None:
    """Each of them gave up finished groups in some design."""
    throws_nothing_away(THROWN_AWAY[name])


def finishes(scenario: Scenario) -> None:
    """For several draws of latencies and losses."""
    for seed in (0, 1, 159):
        drawn = replace(scenario, seed=seed)
        check(drawn, play(drawn))


NAMED = {
    "more is planned at once than the servers have room for": Scenario(
        envs=(Env(),), batch_size=64, max_inflight=512, capacity=16, max_versions=4
    ),
    "groups of seventeen to twenty sequences make batches of 64": Scenario(
        envs=(Env(group_size=17), Env(group_size=18), Env(group_size=19), Env(group_size=20)), batch_size=64
    ),
    "minimums of groups that do not sum to the batch": Scenario(
        envs=(Env(group_size=4), Env(group_size=3, minimum=0.4), Env(group_size=4, minimum=0.1)),
        batch_size=16,
    ),
    "a minimum of an env that has a rate": Scenario(
        envs=(Env(), Env(minimum=0.25, rollouts_per_minute=60.0)), batch_size=16
    ),
    "quotas that wait for an env that has a rate": Scenario(
        envs=(Env(), Env(rollouts_per_minute=60.0)), quotas=True, on_starved="wait"
    ),
    "drop with an env that has a cap": Scenario(
        envs=(Env(), Env(minimum=0.25, max_inflight=4, latency=8.0)), mode="drop", max_versions=1
    ),
    "a queue of one batch with mixed sizes": Scenario(
        envs=(Env(group_size=5), Env(group_size=3), Env(group_size=7, minimum=0.25)), max_buffered=1.0
    ),
    "no staleness at all with groups of 48 and 16": Scenario(
        envs=(Env(group_size=48), Env(group_size=16)), batch_size=64, max_versions=0, max_inflight=200
    ),
    "a death with a partial batch queued": Scenario(
        envs=(Env(group_size=3), Env(group_size=5, latency=8.0)), kills=(0.9, 2.5, 9.0)
    ),
    "a target of nothing beside an env that has a cap": Scenario(
        envs=(Env(ratio=0.0), Env(max_inflight=4)), batch_size=16
    ),
    "a rollout that yields several sequences": Scenario(
        envs=(Env(group_size=4, sequences=(1, 2, 3, 4)),), batch_size=64, max_versions=1
    ),
    "a stuck queue whose batch is held back meanwhile": Scenario(
        envs=(
            Env(group_size=6, spread=1.0, group_scored=True, rollouts_per_minute=60.0),
            Env(
                group_size=7,
                ratio=0.2,
                latency=8.0,
                spread=0.0,
                loss=0.3,
                sequences=(1, 2),
                max_inflight=4,
                rollouts_per_minute=600.0,
            ),
        ),
        batch_size=32,
        quotas=True,
        on_starved="wait",
        max_versions=1,
        max_inflight=16,
        servers=2,
        capacity=32,
        train_s=0.0,
        load_s=2.0,
        kills=(47.4, 8.6, 22.6),
        server_deaths=(9.8, 44.2),
    ),
    "whole groups that only those of other envs complete": Scenario(
        envs=(Env(group_size=5, minimum=0.5), Env(group_size=10), Env(group_size=9)),
        batch_size=48,
        on_stuck="wait",
        max_versions=0,
        max_inflight=16,
    ),
    "an env that is quarantined, and no batch without its probes": Scenario(
        envs=(Env(group_size=8, loss=0.2, sequences=(1, 2)),),
        batch_size=32,
        on_stuck="wait",
        max_buffered=1.5,
        mode="drop",
        max_versions=3,
        max_inflight=16,
        train_s=20.0,
        load_s=10.0,
    ),
    "an env that is quarantined, and another that cannot make a batch without it": Scenario(
        envs=(Env(group_size=8, loss=0.2, sequences=(1, 2)), Env(group_size=6)),
        batch_size=32,
        on_stuck="wait",
        max_buffered=1.5,
        mode="drop",
        max_versions=1,
        max_inflight=16,
        train_s=20.0,
        load_s=10.0,
    ),
    "a ratio set to nothing by hand, and a group of that env would complete the batch": Scenario(
        envs=(Env(group_size=3, sequences=(1, 2)), Env(group_size=1)),
        batch_size=16,
        on_stuck="wait",
        max_buffered=1.0,
        max_inflight=16,
        commands=((4.0, {"command": "ratio", "envs": {"e1": 0.0}}),),
    ),
    "a ratio set to nothing by hand, while the rate of that env keeps it from completing the batch": Scenario(
        envs=(Env(group_size=3, sequences=(1, 2)), Env(group_size=1, rollouts_per_minute=0.5)),
        batch_size=16,
        mix="oldest",
        on_stuck="wait",
        max_buffered=1.0,
        max_inflight=16,
        commands=((60.0, {"command": "ratio", "envs": {"e1": 0.0}}),),
    ),
    "servers that die and endpoints that go": Scenario(
        envs=(Env(), Env(minimum=0.25)),
        servers=2,
        server_deaths=(1.0, 2.0, 9.0),
        endpoint_losses=(3.0, 15.0),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_scenario_finishes(name: str) -> None:
    """Each of them stopped a run, or lost finished work, in some design."""
    finishes(NAMED[name])


def test_a_journal_that_was_full_and_has_room_again_lets_the_run_go_on() -> None:
    """What is in flight ends meanwhile, and nothing new is opened."""
    world = make_world({"a": Behaviour(latency=lambda rng: 1.0)}, max_steps=5)

    def has_room(room: bool) -> None:
        world.journal.full = not room

    world.at(0.5, lambda: has_room(False))
    world.at(99.0, lambda: None)
    world.at(100.0, lambda: has_room(True))
    assert world.play(until=lambda: world.now >= 99.0 or bool(world.ended))
    assert not world.ended
    assert world.ledger.total_inflight == 0
    assert world.play(until=lambda: bool(world.ended)), explain(world)


def test_a_slow_good_env_beside_one_with_equal_rewards_does_not_end_as_barren() -> None:
    """Probes of an env that yields nothing do not count while another may still deliver."""
    world = make_world(
        {
            "dull": Behaviour(latency=lambda rng: 0.05, reward=lambda rng: 1.0),
            "good": Behaviour(latency=lambda rng: 60.0),
        },
        keep_equal_rewards=False,
        max_barren_batches=20,
        strategy_options={"breaker": True},
        max_steps=3,
    )
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert "dull" in world.parts.mix.quarantined
    assert {group.env for _, _, batch in world.trained for group in batch.groups} == {"good"}


@pytest.mark.parametrize("options", [{}, {"mix": "oldest"}, {"max_inflight": 4}, {"quotas": True}], ids=str)
@pytest.mark.parametrize("group_size", [10, 16])
def test_probes_that_would_fill_the_batch_do_not_keep_others_from_filling_it(
    group_size: int, options: dict[str, Any]
) -> None:
    """What is lacking is less than a group of the good env, and just a group of one that is quarantined."""
    world = make_world(
        {
            "good": Behaviour(latency=lambda rng: 1.0),
            "dull": Behaviour(latency=lambda rng: 1.0, reward=lambda rng: 1.0),
        },
        train={"good": {"group_size": group_size}, "dull": {"group_size": 8}},
        batch_size=24,
        max_versions=0,
        keep_equal_rewards=False,
        strategy_options={"breaker": True},
        max_steps=10,
        **options,
    )
    assert world.play(until=lambda: bool(world.ended) or world.now > 600.0)
    assert world.steps() == 10, explain(world)


def test_hanging_evaluations_do_not_stop_training() -> None:
    """They have at most half of the slots, and the run ends once their time is up."""
    plan = EvalPlan(env="e", split="eval", num_examples=100, rollouts_per_example=2, interval=1)
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 1.0), "e": Behaviour(latency=lambda rng: NEVER)},
        evals=[plan],
        max_inflight=16,
        rollout_timeout_s=600.0,
        max_attempts=1,
        max_steps=10,
    )
    assert world.play(until=lambda: world.steps() >= 10 or world.now > 600.0)
    assert world.steps() == 10, explain(world)
    assert world.now < 200.0
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert world.eval_results[-1]["failure_kinds"] == {"timed_out": 200}


def test_an_env_that_hangs_is_given_up_in_bounded_time() -> None:
    """Its minimum is waived when it is quarantined, and the others go on without it."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 1.0), "b": Behaviour(latency=lambda rng: NEVER)},
        train={"b": {"minimum": 0.25}},
        rollout_timeout_s=60.0,
        group_timeout_s=300.0,
        max_attempts=2,
        strategy_options={"breaker": True},
        max_steps=10,
    )
    assert world.play(until=lambda: bool(world.ended)), explain(world)
    assert world.now < 3600.0
    assert world.parts.facts.envs["b"].dropped.total() > 0
    assert world.ledger.inflight[Lane.TRAIN, "b"] == 0


def test_one_rollout_in_fifty_that_hangs_holds_no_batch_for_long() -> None:
    """The group that holds a batch back is given up after a few times what others took."""
    scenario = Scenario(envs=(Env(hangs=0.02, spread=0.0),), max_versions=1, batch_size=16)
    played = play(scenario)
    assert played.finished, played.why
    assert played.world.now < 1200.0


@pytest.mark.timeout(600)
@settings(max_examples=25, **search)
@given(scenario=steered())
def test_a_run_that_a_person_keeps_changing_finishes(scenario: Scenario) -> None:
    """Pauses, ratios, quarantines, limits and inference servers, changed at any moment, never stop it for good."""
    check(scenario, play(scenario))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, **search)
@given(scenario=steered())
def test_many_runs_that_a_person_keeps_changing_finish(scenario: Scenario) -> None:
    """The same, searched for longer."""
    note(repr(scenario))
    check(scenario, play(scenario))
