"""From complete groups to offered batches: what is recorded, dropped, told, and when."""

import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.errors import StalledError
from orchestrator.tasks.task import TrainTask
from tests.support.dispatch_world import Behaviour, World, make_data


def world(**options: Any) -> World:
    return World({"a": Behaviour(latency=lambda rng: 1e9)}, batch_size=8, group_size=4, **options)


def complete(world: World, position: int, rewards: list[float], *, version: int = 0) -> None:
    task = TrainTask(env="a", split="train", index=position, epoch=0, position=position)
    group = PendingGroup(
        task=task,
        lane=Lane.TRAIN,
        size=len(rewards),
        needed=1,
        group_scored=False,
        version=version,
        opened=0.0,
    )
    group.results.append(make_data(rewards))
    group.valid = len(rewards)
    world.mix.on_dispatch("a", len(rewards), now=world.now)
    world.assembly.completed(group, world.now)


def test_groups_are_recorded_before_the_batch_that_holds_them() -> None:
    """The order in which a crash can lose nothing."""
    made = world()
    complete(made, 0, [0.0, 1.0, 0.0, 1.0])
    complete(made, 1, [0.0, 1.0, 0.0, 1.0])
    assert made.record.events == ["group a/train/0", "group a/train/1", "batch 1"]
    assert [batch.step for batch in made.offered] == [1]


def test_a_batch_is_not_offered_until_it_is_durable() -> None:
    """The trainer never sees what a crash could undo."""
    made = world()
    made.record.at_once = False
    complete(made, 0, [0.0, 1.0, 0.0, 1.0])
    complete(made, 1, [0.0, 1.0, 0.0, 1.0])
    assert made.offered == []
    made.record.waiting.pop()()
    assert [batch.step for batch in made.offered] == [1]


def test_equal_rewards_are_dropped_with_a_reason_and_the_task_is_done() -> None:
    """They carry no gradient; the mix learns of it."""
    made = world(keep_equal_rewards=False)
    complete(made, 0, [1.0, 1.0, 1.0, 1.0])
    assert made.record.tasks == [("a", 0, "equal_rewards")]
    assert made.facts.envs["a"].dropped["equal_rewards"] == 4
    assert made.mix.numbers(0.0)["a"].accepted == 0
    assert made.buffer.sequences == 0


def test_a_group_too_large_for_a_batch_is_dropped_with_a_reason() -> None:
    """One oversize group does not block every batch."""
    made = world()
    complete(made, 0, [float(i) for i in range(9)])
    assert made.record.tasks == [("a", 0, "oversize")]


def test_a_group_that_is_too_old_on_arrival_is_dropped() -> None:
    """Only possible under `drop`, or for an env that had no server."""
    made = world(max_versions=1)
    for version in range(1, 6):
        made.staleness.publish(version)
    made.staleness.serving = made.staleness.formed = made.staleness.trained = 5
    complete(made, 0, [0.0, 1.0, 0.0, 1.0], version=3)
    assert made.record.tasks == [("a", 0, "stale")]


def test_batches_are_formed_only_as_far_ahead_as_the_trainer_needs() -> None:
    """The rest stays in the queue, where it can still be put together better."""
    made = world(max_versions=9)
    for position in range(8):
        complete(made, position, [0.0, 1.0, 0.0, 1.0])
    assert made.staleness.formed == 2
    assert made.buffer.sequences == 16
    made.staleness.trained = 1
    made.assembly.form(0.0)
    assert made.staleness.formed == 3


def test_the_last_step_ends_the_forming() -> None:
    """max_steps batches and no more."""
    made = world(max_steps=1, max_versions=9)
    for position in range(4):
        complete(made, position, [0.0, 1.0, 0.0, 1.0])
    assert made.staleness.formed == 1
    assert made.assembly.finished
    assert made.assembly.explain() == "every batch of the run is formed"


def test_a_run_in_which_nothing_survives_ends_with_the_env_and_the_reason() -> None:
    """Not a silent spin."""
    made = world(keep_equal_rewards=False)
    made.assembly._max_barren = 16
    for position in range(3):
        complete(made, position, [1.0, 1.0, 1.0, 1.0])
    with pytest.raises(StalledError, match=r'env "a": equal_rewards \(16 rollouts\)'):
        complete(made, 3, [1.0, 1.0, 1.0, 1.0])


def test_what_an_earlier_process_left_is_queued_in_order() -> None:
    """And makes the same batch as it would have made there."""
    made = world()
    complete(made, 0, [0.0, 1.0, 0.0, 1.0])
    later = world()
    later.assembly.restore(made.record.groups)
    complete(later, 1, [0.0, 1.0, 0.0, 1.0])
    assert [group.id for group in later.offered[0].groups] == ["a/train/0", "a/train/1"]


def test_a_queued_token_takes_at_most_ten_bytes() -> None:
    """int32 token, float32 log-probability, mask, and small change; transcripts are left to the journal."""
    made = world(max_versions=99)
    data = replace(make_data([0.0, 1.0, 0.0, 1.0], length=2048), transcript=b"\x90" + b"x" * 40_000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for position in range(40):
        task = TrainTask(env="a", split="train", index=position, epoch=0, position=position)
        group = PendingGroup(
            task=task, lane=Lane.TRAIN, size=4, needed=4, group_scored=True, version=0, opened=0.0
        )
        group.results.append(
            replace(data, tokens=data.tokens.copy(), mask=data.mask.copy(), logprobs=data.logprobs.copy())
        )
        group.valid = 4
        made.mix.on_dispatch("a", 4, now=0.0)
        made.assembly.completed(group, 0.0)
    made.record.groups.clear()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    queued_and_formed = 40 * 4 * 2048
    assert (after - before) / queued_and_formed <= 10
    assert made.buffer.sequences > 100
