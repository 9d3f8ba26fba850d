"""How long a batch is held back for an older group in flight."""

from typing import Any

from orchestrator.run.patience import LEAST_S, TIMES
from orchestrator.simulate.neighbours import Behaviour
from tests.support.scenarios import explain
from tests.support.worlds import NEVER, TestedWorld, make_world


def held(**options: Any) -> TestedWorld:
    """Nothing ends by itself."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: NEVER)},
        batch_size=8,
        max_versions=3,
        max_inflight=16,
        train_s=NEVER,
        **options,
    )
    world.turn()
    return world


def hold(world: TestedWorld) -> None:
    """Groups end and batches are trained, but the first group does not, until the next batch waits for it."""
    left = world.open_groups()[0]
    while world.parts.sink.held is None or world.parts.buffer.sequences < 8:
        others = [group for group in world.open_groups() if group is not left]
        assert others, "nothing is held back"
        world.finish_group(others[0])
        world.turn()
        versions = world.parts.versions
        if versions.formed > versions.trained and world.parts.sink.held is None:
            world.run.on_publish(versions.formed, None, world.now)
            world.run.on_ack(versions.formed, world.now)
            world.run.on_loaded(versions.published, None, world.now)
            world.turn()
    assert world.parts.sink.held == ("a", 0)


def test_a_group_has_as_long_as_a_rollout_while_its_env_has_finished_none() -> None:
    """Nothing is known of the env yet but its limit."""
    world = held(rollout_timeout_s=500.0)
    patience = world.run._patience
    assert patience.ends_at(("a", 0)) == 500.0
    assert patience.ends_at(None) is None
    assert patience.ends_at(("a", 7)) is None, "no such group"


def test_a_group_has_a_few_times_as_long_as_the_slowest_one_took() -> None:
    """And never less than a moment; the memory of a slow one fades."""
    world = held()
    patience = world.run._patience
    patience.learn("a", 1.0)
    assert patience.ends_at(("a", 0)) == LEAST_S
    patience.learn("a", 100.0)
    assert patience.ends_at(("a", 0)) == TIMES * 100.0
    for _ in range(500):
        patience.learn("a", 1.0)
    assert patience.ends_at(("a", 0)) == LEAST_S


def test_a_group_that_holds_a_batch_back_for_too_long_is_given_up_and_asked_again() -> None:
    """The batch is formed at the moment that was announced, and the task is not lost."""
    world = held()
    hold(world)
    left = world.open_groups()[0]
    formed, until = world.parts.versions.formed, world.run.held_until
    assert until == left.opened + LEAST_S
    assert world.run.next_event_at(world.now) == until
    world.now = until
    world.turn()
    assert left.closed
    assert world.parts.versions.formed > formed
    assert world.parts.facts.envs["a"].dropped["overdue"] == 4
    assert world.journal.tasks == []
    again = [attempt for attempt in world.starts if attempt.group.task == left.task]
    assert len(again) > 4


def test_a_group_that_ends_in_time_is_in_the_batch_that_waited_for_it() -> None:
    """Nothing is thrown away."""
    world = held()
    hold(world)
    left = world.open_groups()[0]
    world.finish_group(left)
    world.turn()
    assert left.task.key in [group.id for group in world.journal.batches[-1].groups]
    assert not world.journal.evicted


def test_a_queue_that_was_stuck_before_its_batch_was_held_back_is_no_reason_to_look_again_at_once() -> None:
    """The time of the split is past and nothing is split meanwhile: a driver that looked again would never rest."""
    world = held()
    hold(world)
    world.parts.buffer._stuck_since = -100.0
    assert world.run.next_event_at(world.now) == world.run.held_until


def test_the_room_of_a_group_that_was_given_up_is_used_at_once() -> None:
    """Nothing else happens: its env alone is needed, and its only server had no room but that."""
    world = make_world(
        {
            "quick": Behaviour(latency=lambda rng: 1.0),
            "hangs": Behaviour(latency=lambda rng: NEVER if 50 < world.now < 60 else 8.0, group_scored=True),
        },
        group_size=6,
        batch_size=8,
        train={"hangs": {"minimum": 0.125}},
        max_versions=0,
        capacity=3,
        rollout_timeout_s=600.0,
        max_attempts=1,
        max_steps=20,
    )
    assert world.play(until=lambda: bool(world.ended) or world.now > 10_000)
    assert world.ended, explain(world)
