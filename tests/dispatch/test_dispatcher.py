"""The dispatch core in virtual time: scripted and random histories, the ledger checked after every event."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.dispatch.ledger import Lane, Outcome
from orchestrator.sinks.eval_sink import EvalPlan, Evals
from tests.support.dispatch_world import Behaviour, World, make_data, open_group


def quiet(**options: Any) -> World:
    """A world in which nothing ends by itself: tests end attempts by hand."""
    options.setdefault("max_inflight", 8)
    return World(
        {"a": Behaviour(latency=lambda rng: 1e9)}, group_size=4, batch_size=8, max_versions=5, **options
    )


def test_fills_every_slot_and_no_more() -> None:
    """With work to do, exactly the limit is in flight."""
    world = quiet()
    world.turn()
    assert world.ledger.total_inflight == 8
    assert "free slot" in world.core.waiting_for


def test_a_retryable_failure_is_tried_again_after_a_pause_that_frees_the_slot() -> None:
    """While an attempt backs off, another takes its slot."""
    world = quiet(max_inflight=4, backoff_s=1.0)
    world.turn()
    failed = world.starts[0]
    world.core.fail(failed, "http", retryable=True, lost=False, now=0.0)
    world.turn()
    assert world.ledger.total_inflight == 4
    assert world.starts[-1].group is not failed.group
    world.core.finish(world.starts[-1], make_data([1.0]), 0.5)
    world.now = 1.0
    world.turn()
    assert world.starts[-1].group is failed.group
    assert world.starts[-1].number == 2


def test_attempts_are_capped_and_the_task_is_given_up() -> None:
    """A task whose attempts are used up ends as dropped, is resolved, and is not asked again."""
    world = quiet(max_inflight=4, max_attempts=2)
    world.turn()
    group = open_group(world)
    victim = world.starts[0]
    world.core.fail(victim, "crash", retryable=True, lost=True, now=0.0)
    world.now = 5.0
    world.turn()
    again = next(attempt for attempt in world.starts if attempt.group is group and attempt.number == 2)
    world.core.fail(again, "crash", retryable=True, lost=True, now=5.0)
    world.turn()
    assert group.closed
    assert ("a", group.task.position, "given_up:server_lost") in world.record.tasks
    assert world.ledger.outcomes[Lane.TRAIN, "a", Outcome.LOST, ""] == 2
    assert world.ledger.outcomes[Lane.TRAIN, "a", Outcome.CANCELLED, "server_lost"] == 3


def test_a_failure_that_is_not_retryable_fails_a_strict_group_at_once() -> None:
    """The other members are cancelled and their slots are free again."""
    world = quiet(max_inflight=4)
    world.turn()
    group = open_group(world)
    world.core.fail(world.starts[0], "invalid_rollout", retryable=False, lost=False, now=0.0)
    world.turn()
    assert group.closed
    assert len(world.cancels) == 3
    assert world.ledger.total_inflight == 4


def test_min_valid_keeps_a_partial_group() -> None:
    """With min_valid, failed members make a group smaller instead of losing it."""
    world = quiet(max_inflight=4, min_valid=2)
    world.turn()
    first = world.starts[:4]
    for attempt in first[:2]:
        world.core.fail(attempt, "invalid_rollout", retryable=False, lost=False, now=0.0)
    for attempt in first[2:]:
        world.core.finish(attempt, make_data([1.0]), 1.0)
    world.turn()
    assert [group.size for group in world.record.groups] == [2]


def test_extra_rollouts_the_first_to_finish_win() -> None:
    """With redundancy the group is complete with group_size results and the rest is cancelled."""
    world = quiet(max_inflight=6, extra_rollouts=2)
    world.turn()
    for attempt in world.starts[2:6]:
        world.core.finish(attempt, make_data([1.0]), 1.0)
    world.turn()
    assert [group.size for group in world.record.groups] == [4]
    assert {id(attempt) for attempt in world.cancels} == {id(attempt) for attempt in world.starts[:2]}
    assert world.ledger.outcomes[Lane.TRAIN, "a", Outcome.CANCELLED, "surplus"] == 2


def test_a_rollout_over_its_deadline_is_timed_out_and_cancelled() -> None:
    """The deadline sits in the core; a late answer changes nothing."""
    world = quiet(max_inflight=4, rollout_timeout_s=10.0, min_valid=1)
    world.turn()
    late = world.starts[0]
    world.now = 10.0
    world.turn()
    assert world.ledger.outcomes[Lane.TRAIN, "a", Outcome.TIMED_OUT, ""] == 4
    world.core.finish(late, make_data([1.0]), 11.0)
    assert world.ledger.balances()
    assert not world.record.groups


def test_a_group_over_its_deadline_keeps_what_it_has_by_policy() -> None:
    """One stuck member does not hold the others for ever."""
    world = quiet(max_inflight=4, group_timeout_s=20.0, min_valid=3)
    world.turn()
    for attempt in world.starts[:3]:
        world.core.finish(attempt, make_data([1.0]), 1.0)
    world.now = 20.0
    world.turn()
    assert [group.size for group in world.record.groups] == [3]
    assert world.ledger.outcomes[Lane.TRAIN, "a", Outcome.CANCELLED, "group_deadline"] == 1


def test_a_group_scored_env_is_one_request_that_costs_its_whole_group() -> None:
    """Capacity counts the rollouts of a group request."""
    world = World(
        {"a": Behaviour(latency=lambda rng: 1e9, group_scored=True)},
        group_size=4,
        batch_size=8,
        max_inflight=10,
        max_versions=5,
    )
    world.turn()
    assert [attempt.count for attempt in world.starts] == [4, 4]
    assert world.ledger.total_inflight == 8
    world.core.finish(world.starts[0], make_data([0.0, 1.0, 1.0, 0.0]), 1.0)
    world.turn()
    assert world.record.groups[0].size == 4


def test_an_env_at_its_cap_is_left_out_and_the_others_go_on() -> None:
    """max_inflight bounds one env."""
    world = World(
        {"a": Behaviour(latency=lambda rng: 1e9), "b": Behaviour(latency=lambda rng: 1e9)},
        max_inflight=32,
        max_versions=9,
        train_rules={"a": {"max_inflight": 4}},
    )
    world.turn()
    assert world.ledger.inflight[Lane.TRAIN, "a"] == 4
    assert world.ledger.inflight[Lane.TRAIN, "b"] == 28


def test_a_rate_limit_spreads_starts_over_time() -> None:
    """rollouts_per_minute holds over any minute, and the core says when it may go on."""
    world = World(
        {"a": Behaviour(latency=lambda rng: 0.01)},
        max_versions=1000,
        train_s=0.0,
        train_rules={"a": {"rollouts_per_minute": 240.0}},
    )
    assert world.run(until=lambda: world.now >= 60.0)
    assert 200 <= world.ledger.dispatched[Lane.TRAIN, "a"] <= 240 + 4


def test_a_raised_limit_is_filled_smoothly() -> None:
    """After a pause the slots fill over the ramp's time."""
    world = quiet(max_inflight=100, ramp_s=10.0)
    world.turn()
    assert world.ledger.total_inflight <= 1
    world.now = 5.0
    world.turn()
    assert 40 <= world.ledger.total_inflight <= 50
    world.now = 10.0
    world.turn()
    assert world.ledger.total_inflight == min(100, 6 * 8)


def test_without_a_healthy_endpoint_nothing_starts() -> None:
    """And the reason is said."""
    world = quiet()
    world.pool.healthy = False
    world.turn()
    assert world.ledger.total_inflight == 0
    assert world.core.waiting_for == "a healthy inference endpoint"


def test_rollouts_on_a_lost_endpoint_are_asked_again_elsewhere() -> None:
    """They end at once as retryable failures and are cancelled; the task is not lost."""
    world = quiet(max_inflight=4)
    world.turn()
    group = open_group(world)
    world.core.lose_endpoint(world.pool.endpoint, 0.0)
    world.turn()
    assert len(world.cancels) == 4
    assert world.ledger.outcomes[Lane.TRAIN, "a", Outcome.FAILED, "endpoint_lost"] == 4
    world.now = 2.0
    world.core.abandon("test", 2.0, lanes=())
    for attempt in [attempt for attempt in world.starts[4:] if attempt.group is not group]:
        world.core.finish(attempt, make_data([1.0]), 2.0)
    world.turn()
    assert any(attempt.group is group and attempt.number == 2 for attempt in world.starts)


def test_evaluations_go_ahead_of_training_without_stopping_it() -> None:
    """A triggered evaluation takes the next free slots; what is in flight stays."""
    evals = Evals([EvalPlan(env="e", split="eval", num_examples=3, rollouts_per_example=2, interval=1)])
    world = quiet(evals=evals)
    world.add_eval_env("e", Behaviour(latency=lambda rng: 1e9))
    world.turn()
    evals.trigger(0, 0, world.now)
    for attempt in world.starts[:4]:
        world.core.finish(attempt, make_data([1.0]), 1.0)
    world.turn()
    assert [attempt.group.lane for attempt in world.starts[8:12]] == [Lane.EVAL] * 4
    assert not world.cancels
    assert world.ledger.inflight[Lane.EVAL, "e"] == 4


def test_a_failed_evaluation_attempt_is_reported_apart() -> None:
    """Failures are counted by kind and never as a reward of zero."""
    evals = Evals([EvalPlan(env="e", split="eval", num_examples=1, rollouts_per_example=2, interval=1)])
    world = quiet(evals=evals)
    world.add_eval_env("e", Behaviour(latency=lambda rng: 1e9))
    evals.trigger(0, 0, 0.0)
    world.turn()
    first, second = (attempt for attempt in world.starts if attempt.group.lane is Lane.EVAL)
    world.core.fail(first, "broken", retryable=False, lost=False, now=1.0)
    world.core.finish(second, make_data([1.0]), 1.0)
    world.turn()
    (result,) = world.eval_results
    assert result["failures"] == 1
    assert result["failure_kinds"] == {"broken": 1}
    assert result["avg@2"] == 1.0


def test_groups_without_variance_are_filtered_and_refilled() -> None:
    """Equal rewards are dropped, booked, and the run goes on to full batches."""
    world = World({"a": Behaviour()}, keep_equal_rewards=False, max_versions=0, train_s=0.1)
    world.behaviours["a"].latency = lambda rng: 0.5
    assert world.run(until=lambda: world.steps() >= 5)
    assert all(batch.size == 16 for _, _, batch in world.trained)


def test_a_trainer_ten_times_slower_wastes_no_finished_rollout() -> None:
    """pace admits only what can be trained in time, so nothing is evicted or dropped."""
    world = World(
        {"a": Behaviour(), "b": Behaviour(latency=lambda rng: rng.lognormvariate(0, 1))},
        train_s=40.0,
        max_inflight=48,
    )
    assert world.run(until=lambda: world.steps() >= 30)
    assert not world.record.evicted
    assert not world.record.tasks
    assert max(world.ages()) <= 2


def test_a_trainer_ten_times_faster_sees_no_idle_slot() -> None:
    """With a staleness budget above what is in flight, every slot is always busy."""
    world = World(
        {"a": Behaviour(latency=lambda rng: 1.0 + rng.random())},
        train_s=0.01,
        max_inflight=32,
        max_versions=6,
    )
    busy: list[int] = []
    assert world.run(until=lambda: busy.append(world.ledger.total_inflight) or world.steps() >= 50)  # type: ignore[func-returns-value]  # records and goes on
    assert Counter(busy[1:]).most_common(1)[0][0] == 32
    assert sum(busy[1:]) / len(busy[1:]) >= 0.99 * 32


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    loss=st.floats(0, 0.9),
    slowest=st.floats(0.1, 30.0),
    train_s=st.floats(0.0, 30.0),
    max_versions=st.integers(0, 4),
    min_valid=st.sampled_from([None, 1, 3]),
    mode=st.sampled_from(["pace", "drop"]),
    max_inflight=st.sampled_from([4, 16, 64, 200]),
    group_scored=st.booleans(),
)
def test_any_loss_latency_and_trainer_speed_make_progress_within_the_staleness_bound(
    seed: int,
    loss: float,
    slowest: float,
    train_s: float,
    max_versions: int,
    min_valid: int | None,
    mode: str,
    max_inflight: int,
    group_scored: bool,
) -> None:
    """Every loss gives its budget back, and no sequence is trained beyond max_versions."""
    world = World(
        {
            "quick": Behaviour(latency=lambda rng: rng.expovariate(2.0), loss=loss),
            "slow": Behaviour(
                latency=lambda rng: rng.expovariate(1.0 / slowest), loss=loss / 2, group_scored=group_scored
            ),
        },
        seed=seed,
        train_s=train_s,
        max_versions=max_versions,
        min_valid=min_valid,
        mode=mode,
        max_inflight=max_inflight,
    )
    assert world.run(until=lambda: world.steps() >= 12), (
        f"no progress: {world.core.waiting_for}; {world.assembly.explain()}"
    )
    assert [step for step, _, _ in world.trained] == list(range(1, world.steps() + 1))
    assert all(batch.size == 16 for _, _, batch in world.trained)
    assert max(world.ages()) <= max_versions
    trained = [group.id for _, _, batch in world.trained for group in batch.groups]
    assert len(trained) == len(set(trained))
    if mode == "pace" and min_valid is None:
        assert not world.record.evicted, "pace throws nothing away that was finished"


def test_groups_of_different_sizes_lose_little_under_pace() -> None:
    """Whole groups of 4, 3 and 2 do not always sum to 12 with the oldest in it; the slack keeps what is lost rare."""
    sizes = {"a": 4, "b": 3, "c": 2}
    lost = {}
    for slack in (0, 3):
        behaviours = {name: Behaviour(latency=lambda rng: rng.lognormvariate(0, 1)) for name in sizes}
        world = World(behaviours, group_sizes=sizes, batch_size=12, slack=slack, train_s=0.5, seed=1)
        assert world.run(until=lambda world=world: world.steps() >= 100)  # type: ignore[misc]  # binds the loop's value
        lost[slack] = len(world.record.evicted) / len(world.record.groups)
        assert max(world.ages()) <= 2
    assert lost[3] < 0.03 < lost[0]


@pytest.mark.parametrize("mode", ["pace", "drop"])
def test_drop_mode_evicts_and_pace_does_not(mode: str) -> None:
    """With stragglers and a fast trainer, drop loses old work while pace waits for it."""
    world = World(
        {"a": Behaviour(latency=lambda rng: 50.0 if rng.random() < 0.02 else 0.5)},
        train_s=0.05,
        max_versions=1,
        mode=mode,
        max_inflight=16,
    )
    assert world.run(until=lambda: world.steps() >= 40)
    stale = world.facts.envs["a"].dropped["stale"]
    assert (stale > 0) is (mode == "drop")
    assert max(world.ages()) <= 1
