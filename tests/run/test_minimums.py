"""Which minimums hold: waived while their env cannot deliver, unless they are to be waited for."""

from typing import Any

from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import NEVER, TestedWorld, make_world


def two(**options: Any) -> TestedWorld:
    """Env "b" has a quarter of every batch of 16; nothing ends by itself."""
    special = options.pop("b", {})
    return make_world(
        {"a": Behaviour(latency=lambda rng: NEVER), "b": Behaviour(latency=lambda rng: NEVER)},
        train={"b": {"minimum": 0.25, **special}},
        max_inflight=64,
        train_s=NEVER,
        **options,
    )


def test_the_minimum_of_an_env_without_a_server_is_waived_and_counted() -> None:
    """And it holds again when a server is back."""
    world = two()
    world.turn()
    assert world.parts.buffer.minimums == {"b": 4}
    world.envs["b"].kill(0)
    world.turn()
    assert world.parts.buffer.minimums == {"b": 0}
    assert world.run.minimums.waived == {"b": "it has no ready server"}
    assert world.run.minimums.times_waived == 1
    world.turn()
    assert world.run.minimums.times_waived == 1, "once per change, not per look"
    world.envs["b"].revive(0)
    world.turn()
    assert world.run.minimums.waived == {}
    assert world.parts.buffer.minimums == {"b": 4}


def test_a_minimum_that_is_to_be_waited_for_is_never_waived() -> None:
    """The configuration says that a batch without the env is worse than no batch."""
    world = two(b={"on_unmet_minimum": "wait"})
    world.envs["b"].kill(0)
    world.turn()
    assert world.run.minimums.waived == {}
    for group in world.open_groups():
        if group.env == "a":
            world.finish_group(group)
    world.turn()
    assert world.parts.versions.formed == 0


def test_a_quarantine_that_waives_a_minimum_forms_the_batch_that_is_now_possible() -> None:
    """In the same turn: nothing else may ever happen that would have the run look again."""
    world = two(strategy_options={"breaker": True}, max_versions=9)
    world.turn()
    for group in [group for group in world.open_groups() if group.env == "a"][:4]:
        world.finish_group(group)
    world.turn()
    assert world.parts.versions.formed == 0
    while "b" not in world.parts.mix.quarantined:
        group = next(group for group in world.open_groups() if group.env == "b")
        world.fail(next(iter(group.running)), "broken", retryable=False)
        if "b" not in world.parts.mix.quarantined:
            assert world.parts.versions.formed == 0
            world.turn()
    world.turn()
    assert world.run.minimums.waived == {"b": "it yields next to nothing and is quarantined"}
    assert world.parts.versions.formed == 1


def test_a_minimum_comes_back_only_when_what_is_under_way_leaves_room_for_it() -> None:
    """Under pace it would push finished groups of other envs out of their last batch."""
    world = two(max_versions=0)
    world.envs["b"].kill(0)
    world.turn()
    for group in world.open_groups()[:3]:
        world.finish_group(group)
    world.turn()
    while sum(world.parts.pace.coming.values()) + sum(world.parts.sink.queued().values()) < 16:
        world.turn()
    world.envs["b"].revive(0)
    world.turn()
    assert world.run.minimums.waived == {"b": "it has no ready server"}, "a batch of env a is under way"
    while world.parts.versions.formed < 1:
        world.finish_group(world.open_groups()[0])
        world.turn()
    world.run.on_publish(1, "step_1", 1.0)
    world.run.on_loaded(1, "step_1", 1.0)
    world.turn()
    assert world.run.minimums.waived == {}
    assert world.parts.buffer.minimums == {"b": 4}


def test_under_drop_a_minimum_comes_back_at_once() -> None:
    """What is too old is given up there anyway."""
    world = two(max_versions=0, mode="drop")
    world.envs["b"].kill(0)
    world.turn()
    world.envs["b"].revive(0)
    world.turn()
    assert world.run.minimums.waived == {}


def test_an_env_that_comes_back_gets_its_minimum_and_its_share_again() -> None:
    """The others do not use the room for ever that is missing for its minimum."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 0.5), "b": Behaviour(latency=lambda rng: 2.0)},
        train={"b": {"minimum": 0.25}},
        batch_size=32,
        max_versions=4,
    )
    world.at(10.0, lambda: world.kill_server("b", 0, away_s=20.0))
    assert world.play(until=lambda: world.now > 30.0 and bool(world.run.minimums.waived))
    assert world.play(until=lambda: not world.run.minimums.waived or world.steps() > 150)
    assert world.run.minimums.waived == {}
    steps = world.steps() + 20
    assert world.play(until=lambda: world.steps() >= steps)
    assert sum(g.size for g in world.trained[-1][2].groups if g.env == "b") == 16
