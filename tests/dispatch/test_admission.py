"""Which envs may open a group: the bound of the queue, and what goes beyond it."""

from typing import Any

from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.waits import WaitKind
from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import NEVER, TestedWorld, make_world


def admission(world: TestedWorld) -> Admission:
    training = world.parts.dispatcher._training
    assert training is not None
    return training.admission


def eligible(world: TestedWorld) -> set[str]:
    """Every env that may open a group now, the best choices and the others."""
    return {name for tier in admission(world).eligible(world.now) for name in tier}


def crowd(**options: Any) -> TestedWorld:
    """Env "b" has half of every batch of 8 and is very slow, env "a" is quick: the queue fills with "a"."""
    return make_world(
        {"a": Behaviour(latency=lambda rng: 0.1), "b": Behaviour(latency=lambda rng: NEVER)},
        train={"b": {"minimum": 0.5}},
        batch_size=8,
        max_versions=99,
        max_buffered=2.0,
        train_s=0.1,
        **options,
    )


def give_up(world: TestedWorld) -> None:
    """Every open group fails."""
    for group in world.open_groups():
        world.parts.dispatcher.drop(group, "broken", again=False)
    world.run._absorb(world.now)
    world._perform()


def test_beyond_the_bound_only_what_the_next_batch_needs_is_admitted() -> None:
    """An env that is short is not held back by the groups of others, and the others are not admitted with it."""
    world = crowd()
    world.play(until=lambda: world.now > 50.0)
    assert world.parts.sink.queued()["a"] >= 16
    assert world.ledger.inflight[Lane.TRAIN, "a"] == 0
    give_up(world)
    assert eligible(world) == {"b"}
    world.turn()
    assert {group.env for group in world.open_groups()} == {"b"}
    assert eligible(world) == set(), "enough of it is coming"


def test_the_queue_does_not_grow_while_an_env_is_waited_for() -> None:
    """However long it takes: the bound, what was in flight when it was reached, and no more."""
    world = crowd(max_inflight=16)
    world.play(until=lambda: world.now > 50.0)
    early = world.parts.buffer.sequences
    for _ in range(30):
        give_up(world)
        world.play(until=lambda until=world.now + 20.0: world.now >= until)  # type: ignore[misc]  # binds the loop's value
    assert world.parts.buffer.sequences == early <= 16 + 16


def test_a_full_queue_admits_nothing_while_a_batch_can_be_had() -> None:
    """The trainer takes one, then there is room again."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 0.1)},
        batch_size=8,
        max_versions=99,
        max_buffered=1.0,
        train_s=NEVER,
    )
    world.play(until=lambda: world.ledger.total_inflight == 0 and world.parts.versions.formed == 2)
    world.turn()
    assert eligible(world) == set()
    assert world.wait(WaitKind.QUEUE) is not None
    world.run.on_publish(1, None, world.now)
    world.run.on_ack(1, world.now)
    world.turn()
    assert world.parts.versions.formed == 3


def test_nothing_is_admitted_while_nothing_sampled_now_could_be_trained_on() -> None:
    """Not even what the next batch needs: nobody could train on it."""
    world = crowd()
    world.run.start(0.0)
    for version in range(1, 103):
        world.parts.versions.publish(version)
    assert world.parts.pace.engines_behind
    assert eligible(world) == set()


def test_a_group_larger_than_its_cap_runs_alone() -> None:
    """A cap that nothing fits under would be a stop."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: NEVER, group_scored=True)},
        train={"a": {"max_inflight": 3}},
        max_versions=9,
    )
    world.turn()
    assert [attempt.count for attempt in world.starts] == [4]
    assert not admission(world).under_cap("a", 4)
    world.finish(world.starts[0], [0.0, 1.0, 2.0, 3.0])
    world.turn()
    assert len(world.starts) == 2
