"""From complete groups to offered batches: what is recorded, dropped, told, and when."""

import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.errors import StalledError
from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import NEVER, TestedWorld, make_data, make_pending, make_world

MIXED = [0.0, 1.0, 0.0, 1.0]
EQUAL = [1.0, 1.0, 1.0, 1.0]


def world(**options: Any) -> TestedWorld:
    return make_world({"a": Behaviour(latency=lambda rng: NEVER)}, batch_size=8, **options)


def complete(world: TestedWorld, position: int, rewards: list[float], *, version: int = 0) -> None:
    """A group comes back, and batches are formed of what there is."""
    world.parts.mix.on_dispatch("a", len(rewards), now=world.now)
    world.parts.sink.completed(make_pending(position, rewards, version=version), world.now)
    world.parts.sink.form(world.now, {"a"}, states=world.run.states)


def test_groups_are_recorded_before_the_batch_that_holds_them() -> None:
    """The order in which a crash can lose nothing."""
    made = world()
    complete(made, 0, MIXED)
    complete(made, 1, MIXED)
    assert made.journal.events == ["group a/train/0", "group a/train/1", "batch 1"]
    assert list(made._offered) == [1]


def test_a_batch_is_not_offered_until_it_is_durable() -> None:
    """The trainer never sees what a crash could undo."""
    made = world()
    made.journal.at_once = False
    complete(made, 0, MIXED)
    complete(made, 1, MIXED)
    assert not made._offered
    made.journal.waiting.pop()()
    assert list(made._offered) == [1]


def test_equal_rewards_are_dropped_with_a_reason_and_the_task_is_done() -> None:
    """They carry no gradient; the mix learns of it."""
    made = world(keep_equal_rewards=False)
    complete(made, 0, EQUAL)
    assert made.journal.tasks == [("a", 0, "equal_rewards")]
    assert made.parts.facts.envs["a"].dropped["equal_rewards"] == 4
    assert made.parts.mix.numbers(0.0)["a"].accepted == 0
    assert made.parts.mix.numbers(0.0)["a"].finished == 4
    assert made.parts.buffer.sequences == 0
    assert made.parts.source.low_water("a") == 1


def test_a_group_too_large_for_a_batch_is_dropped_with_a_reason() -> None:
    """One oversize group does not block every batch."""
    made = world()
    complete(made, 0, [float(i) for i in range(9)])
    assert made.journal.tasks == [("a", 0, "oversize")]


def test_a_group_that_is_too_old_on_arrival_is_asked_again() -> None:
    """Only possible under `drop`, or for an env that had no server: the task did what it should."""
    made = world(max_versions=1)
    versions = made.parts.versions
    for version in range(1, 6):
        versions.publish(version)
    versions.serving = versions.formed = versions.trained = 5
    complete(made, 0, MIXED, version=3)
    assert made.journal.groups == []
    assert made.journal.tasks == []
    assert made.parts.facts.envs["a"].dropped["stale"] == 4
    assert made.parts.source.next_task().position == 0


def test_a_group_stopped_by_us_is_asked_again_and_costs_its_env_nothing() -> None:
    """A group that failed is given up, and the mix counts it against its env."""
    made = world()
    made.parts.source.next_task()
    made.parts.source.next_task()
    for position, (reason, again) in enumerate([("run_complete", True), ("crash", False)]):
        made.parts.mix.on_dispatch("a", 4, now=0.0)
        made.parts.sink.dropped(make_pending(position, MIXED), reason, again=again, now=0.0)
    numbers = made.parts.mix.numbers(0.0)["a"]
    assert (numbers.cancelled, numbers.finished, numbers.accepted) == (4, 4, 0)
    assert made.journal.tasks == [("a", 1, "given_up:crash")]
    assert made.parts.source.next_task().position == 0


def test_batches_are_formed_only_as_far_ahead_as_the_trainer_needs() -> None:
    """The rest stays in the queue, where it can still be put together better."""
    made = world(max_versions=9)
    for position in range(8):
        complete(made, position, MIXED)
    assert made.parts.versions.formed == 2
    assert made.parts.buffer.sequences == 16
    made.parts.versions.trained = 1
    made.parts.sink.form(0.0, {"a"}, states=made.run.states)
    assert made.parts.versions.formed == 3


def test_the_last_step_ends_the_forming() -> None:
    """max_steps batches and no more."""
    made = world(max_steps=1, max_versions=9)
    for position in range(4):
        complete(made, position, MIXED)
    assert made.parts.versions.formed == 1
    assert made.parts.sink.finished
    assert made.parts.sink.explain() == "every batch of the run is formed"


def test_a_run_in_which_nothing_survives_ends_with_the_env_and_the_reason() -> None:
    """Not a silent spin."""
    made = world(keep_equal_rewards=False, max_barren_batches=2)
    for position in range(3):
        complete(made, position, EQUAL)
    with pytest.raises(StalledError, match=r'env "a": equal_rewards \(16 rollouts\)'):
        complete(made, 3, EQUAL)


def test_a_group_that_can_be_trained_on_starts_the_count_of_barren_ones_again() -> None:
    """Only rollouts in a row count."""
    made = world(keep_equal_rewards=False, max_barren_batches=2)
    for position in range(3):
        complete(made, position, EQUAL)
    complete(made, 3, MIXED)
    for position in range(4, 7):
        complete(made, position, EQUAL)
    with pytest.raises(StalledError):
        complete(made, 7, EQUAL)


def test_what_an_earlier_process_left_is_queued_in_order() -> None:
    """And makes the same batch as it would have made there."""
    made = world()
    complete(made, 0, MIXED)
    later = world()
    assert later.parts.sink.restore(made.journal.groups) == 1
    later.journal._queued = {group.id: group for group in made.journal.groups}
    complete(later, 1, MIXED)
    assert [group.id for group in later._offered[1].groups] == ["a/train/0", "a/train/1"]


def test_what_an_earlier_process_left_of_an_env_that_is_gone_is_given_up() -> None:
    """It says so in the record; a group that no batch can hold any more is asked again."""
    made = world(max_versions=9)
    complete(made, 0, MIXED)
    later = make_world({"b": Behaviour()}, batch_size=8)
    later.journal._queued = {group.id: group for group in made.journal.groups}
    assert later.parts.sink.restore(made.journal.groups) == 0
    assert [(group.id, reason) for group, reason in later.journal.evicted] == [("a/train/0", "env_gone")]
    smaller = make_world({"a": Behaviour()}, batch_size=2, group_size=2)
    smaller.journal._queued = {group.id: group for group in made.journal.groups}
    assert smaller.parts.sink.restore(made.journal.groups) == 0
    assert [reason for _, reason in smaller.journal.evicted] == ["oversize"]
    assert smaller.parts.source.waiting("a") == 1


def test_a_queued_token_takes_at_most_ten_bytes() -> None:
    """int32 token, float32 log-probability, mask, and small change; transcripts are left to the journal."""
    made = world(max_versions=99, on_stuck="wait")
    data = replace(make_data(MIXED, length=2048), transcript=b"\x90" + b"x" * 40_000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for position in range(40):
        group = make_pending(position, MIXED)
        group.results[:] = [
            replace(data, tokens=data.tokens.copy(), mask=data.mask.copy(), logprobs=data.logprobs.copy())
        ]
        made.parts.mix.on_dispatch("a", 4, now=0.0)
        made.parts.sink.completed(group, 0.0)
    made.parts.sink.form(0.0, {"a"}, states=made.run.states)
    made.journal.groups.clear()
    made.journal._queued.clear()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    queued_and_formed = 40 * 4 * 2048
    assert (after - before) / queued_and_formed <= 10
    assert made.parts.buffer.sequences > 100
