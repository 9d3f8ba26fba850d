"""What a run says that it waits for: each kind of wait is produced by its cause, and says when time ends it."""

from typing import Any

import pytest

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.run.status import build_status, diagnose
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.run.test_patience import held, hold
from tests.support.worlds import NEVER, TestedWorld, make_world, quiet


def said(world: TestedWorld, kind: WaitKind) -> Wait:
    """What the run says of this kind; it must say it, and status and diagnosis must show it too."""
    wait = world.wait(kind)
    assert wait is not None, f"the run says nothing of {kind}"
    shown = [entry for entry in build_status(world.run, world.now).waits if entry.kind == kind.value]
    assert [entry.text for entry in shown] == [wait.text]
    assert diagnose(world.run, world.now)["waits"][kind.value] == wait.text
    return wait


def started(**options: Any) -> TestedWorld:
    world = quiet(**options)
    world.turn()
    return world


def test_the_start_is_waited_for() -> None:
    """Nothing may be opened before it."""
    assert said(quiet(), WaitKind.START).text == "the start"


def test_an_endpoint_that_is_down_is_waited_for() -> None:
    """With what the pool says about it."""
    world = started()
    world.lose_endpoint(away_s=5.0)
    world.turn()
    assert said(world, WaitKind.ENDPOINT).text == "an inference server: it is down"


def test_full_slots_are_waited_for() -> None:
    """With how much is in flight."""
    assert "8 rollouts in flight" in said(started(), WaitKind.SLOT).text


def test_an_env_without_a_server_is_named() -> None:
    """Its servers' supervisor ends the wait."""
    world = quiet()
    world.envs["a"].kill(0)
    world.turn()
    assert said(world, WaitKind.SERVER).text == 'a ready server (env "a")'


def test_servers_without_room_are_named() -> None:
    """A rollout that ends makes room."""
    world = started(capacity=4, max_inflight=64)
    assert said(world, WaitKind.ROOM).text == 'room on its servers (env "a")'


def test_a_cap_is_said_with_the_name_of_its_env() -> None:
    """The other env goes on until its slots are full."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: NEVER), "b": Behaviour(latency=lambda rng: NEVER)},
        train={"b": {"max_inflight": 4}},
        max_inflight=64,
        max_versions=1,
    )
    world.turn()
    assert said(world, WaitKind.CAP).text == 'its cap of 4 in flight (env "b")'


def test_rollouts_under_which_a_server_died_are_named() -> None:
    """They are asked again a few at a time, though there is room for all of them."""
    world = started(max_inflight=64, max_versions=0)
    world.kill_server("a", 0, away_s=0.0)
    world.play(until=lambda: world.ledger.total_inflight > 0)
    assert "on a server when it died" in said(world, WaitKind.SUSPECTS).text


def test_evaluations_that_have_their_half_of_the_slots_are_named() -> None:
    """Training has the other half."""
    plan = EvalPlan(env="e", split="eval", num_examples=30, rollouts_per_example=1, interval=1)
    behaviours = {"a": Behaviour(latency=lambda rng: NEVER), "e": Behaviour(latency=lambda rng: NEVER)}
    world = make_world(behaviours, batch_size=8, max_inflight=64, max_versions=0, evals=[plan])
    world.pool.set_max_inflight(20)
    world.turn()
    assert world.ledger.inflight[Lane.EVAL, "e"] == 10
    assert 'have half of them while training goes on (env "e")' in said(world, WaitKind.EVALUATION_SLOT).text


def test_a_rate_says_until_when() -> None:
    """And that is when the run looks again."""
    world = started(max_inflight=64, train={"a": {"rollouts_per_minute": 60.0}})
    wait = said(world, WaitKind.RATE)
    assert wait.text == 'its rate of 60 a minute (env "a")'
    assert wait.until == 4.0
    assert world.run.next_event_at(0.0) == 4.0
    world.now = 4.0
    world.turn()
    assert len(world.starts) == 8


def test_the_trainer_is_waited_for_where_more_work_would_be_too_old() -> None:
    """Nobody is named where it holds for all."""
    world = started(max_inflight=64, max_versions=0)
    wait = said(world, WaitKind.TRAINER)
    assert wait.text == "the trainer (more work now would be too old when it is trained on)"


def test_a_full_queue_is_waited_for() -> None:
    """The trainer ends the wait by taking a batch."""
    world = make_world(
        {"a": Behaviour(latency=lambda rng: 0.1)},
        batch_size=8,
        max_versions=99,
        max_buffered=1.0,
        train_s=NEVER,
    )
    world.play(until=lambda: world.ledger.total_inflight == 0)
    assert "the queue is full" in said(world, WaitKind.QUEUE).text
    assert "2 batches are formed" in said(world, WaitKind.ACKNOWLEDGEMENT).text


def test_a_full_journal_is_waited_for() -> None:
    """With how much is not written yet; it stops what is new, and nothing that is in flight."""
    world = quiet()
    world.journal.full, world.journal.backlog_bytes = True, 300 << 20
    world.turn()
    assert said(world, WaitKind.JOURNAL).text == "the disk (300 MiB are not written yet)"
    assert world.starts == []
    world.journal.full = False
    world.turn()
    assert len(world.starts) == 8


def test_weights_that_are_not_loaded_yet_are_waited_for() -> None:
    """With both versions."""
    world = started()
    world.parts.versions.publish(3)
    text = "the inference servers to load version 3 (they have 0)"
    assert said(world, WaitKind.WEIGHTS).text == text
    world.run.on_refused(3, "no such file", 1.0)
    assert "version 3 could not be loaded: no such file" in said(world, WaitKind.WEIGHTS).text


def test_a_version_that_the_trainer_sends_itself_is_waited_for_until_it_is_given_up() -> None:
    """The inference servers stand still meanwhile, in service."""
    world = started()
    world.run.on_sending(3, 40.0, 1.0)
    wait = said(world, WaitKind.WEIGHTS)
    assert (wait.text, wait.until) == (
        "the trainer to send version 3; the inference servers stand still meanwhile",
        40.0,
    )
    world.run.on_sending(None, 40.0, 2.0)
    assert world.wait(WaitKind.WEIGHTS) is None


def test_where_nothing_sampled_now_could_be_trained_on_the_weights_are_waited_for() -> None:
    """The engines are so far behind that starting anything would be waste."""
    world = quiet(max_versions=0)
    world.parts.versions.publish(3)
    world.parts.versions.formed = world.parts.versions.trained = 1
    world.run.start(0.0)
    world.run.advance(0.0)
    assert world.starts == []
    kinds = [wait.kind for wait in world.parts.dispatcher.waits(0.0)]
    assert kinds == [WaitKind.WEIGHTS]


def test_an_older_group_says_until_when_it_is_waited_for() -> None:
    """Then it is given up."""
    world = held()
    hold(world)
    wait = said(world, WaitKind.OLDER_GROUP)
    assert 'env "a" from version 0' in wait.text
    assert wait.until == world.run.held_until is not None


def test_the_share_of_a_slow_env_is_said_with_how_much_of_it_is_there() -> None:
    """Its groups end the wait, however they end."""
    world = make_world(
        {"quick": Behaviour(latency=lambda rng: 1.0), "slow": Behaviour(latency=lambda rng: NEVER)},
        batch_size=16,
        max_versions=4,
        max_inflight=256,
        train_s=1.0,
    )
    assert world.play(until=lambda: world.parts.sink.awaited is not None)
    wait = said(world, WaitKind.SHARE)
    assert wait.until == world.run.held_until is not None
    assert (
        wait.text
        == 'groups (env "slow" has 0 of its share of 8 sequences, and later batches would be crowded with it)'
    )


def odd(on_stuck: str) -> TestedWorld:
    """Three and three are queued and one may come that makes a batch of four."""
    behaviours = {"a": Behaviour(latency=lambda rng: NEVER), "b": Behaviour(latency=lambda rng: NEVER)}
    world = make_world(
        behaviours,
        batch_size=4,
        on_stuck=on_stuck,
        train={"a": {"group_size": 3}, "b": {"group_size": 1}},
        max_versions=9,
        train_s=NEVER,
    )
    world.turn()
    for group in [group for group in world.open_groups() if group.env == "a"][:2]:
        world.finish_group(group)
    world.turn()
    return world


def test_a_group_that_will_be_split_says_until_when() -> None:
    """Something in flight may still make the batch exact."""
    world = odd("split")
    wait = said(world, WaitKind.SPLIT)
    assert wait.text == "groups of sizes 3 (×2) cannot make exactly 4; a group will be split"
    assert wait.until == 10.0
    assert world.run.next_event_at(world.now) == 10.0
    world.now = 10.0
    world.turn()
    assert world.parts.versions.formed == 1


def test_a_misfit_where_groups_are_not_split_has_no_end_in_time() -> None:
    """Another group must come."""
    world = odd("wait")
    wait = said(world, WaitKind.MISFIT)
    assert wait.text == "groups of sizes 3 (×2) cannot make exactly 4"
    assert wait.until is None


def test_missing_groups_are_waited_for() -> None:
    """With how many are there."""
    assert said(started(), WaitKind.GROUPS).text == "0 of 8 sequences are queued"


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (
            WaitKind.MINIMUM,
            {"train": {"a": {}, "b": {"minimum": 0.5}}},
            'groups (env "b" has 0 of its minimum of 4 sequences)',
        ),
        (
            WaitKind.QUOTA,
            {"quotas": True, "on_starved": "wait"},
            'groups (env "b" has 0 of its quota of 4 sequences)',
        ),
    ],
)
def test_the_env_that_a_full_queue_lacks_is_named(kind: WaitKind, options: dict[str, Any], text: str) -> None:
    """With what it has and what every batch must have of it."""
    behaviours = {"a": Behaviour(latency=lambda rng: NEVER), "b": Behaviour(latency=lambda rng: NEVER)}
    world = make_world(behaviours, batch_size=8, max_inflight=64, max_versions=9, **options)
    world.turn()
    for group in [group for group in world.open_groups() if group.env == "a"][:2]:
        world.finish_group(group)
    world.turn()
    assert said(world, kind).text == text


def test_probes_are_waited_for_when_every_env_is_quarantined() -> None:
    """Nothing else is started, and the envs are named."""
    world = make_world(
        {"a": Behaviour(loss=1.0, retryable=0.0), "b": Behaviour(loss=1.0, retryable=0.0)},
        strategy_options={},
    )
    assert world.play(until=lambda: len(world.parts.mix.quarantined) == 2)
    assert said(world, WaitKind.PROBES).text == 'probes: each env yields next to nothing ("a", "b")'


def test_a_pause_after_a_failure_says_until_when() -> None:
    """Unless the slots are full with other work."""
    world = started(capacity=4, max_inflight=64, backoff_s=3.0, max_backoff_s=3.0)
    world.fail(world.starts[0], retryable=True)
    wait = said(world, WaitKind.BACKOFF)
    assert wait.until is not None
    assert 0.0 < wait.until <= 3.0


def test_a_due_evaluation_that_cannot_start_is_said() -> None:
    """The one before it goes on."""
    plan = EvalPlan(env="e", split="eval", num_examples=1, rollouts_per_example=1, interval=1)
    world = make_world({"a": Behaviour(), "e": Behaviour(latency=lambda rng: NEVER)}, evals=[plan])
    assert world.play(until=lambda: world.steps() >= 2)
    assert said(world, WaitKind.EVALUATION).text == 'the evaluation before, or the weights, for "e"'


def test_a_run_whose_batches_are_all_formed_waits_for_the_trainer() -> None:
    """Dispatch and batch say so."""
    world = make_world({"a": Behaviour()}, max_steps=1, train_s=NEVER)
    assert world.play(until=lambda: world.parts.sink.finished)
    world.turn()
    kinds = [wait.kind for wait in world.parts.dispatcher.waits(world.now)]
    assert kinds == [WaitKind.DONE]
    assert said(world, WaitKind.DONE).text == "the trainer to finish the last batches"


def test_a_draining_run_waits_for_open_groups_alone() -> None:
    """Nothing else matters any more."""
    world = started()
    world.run.stop(1.0)
    assert said(world, WaitKind.DRAIN).text == "open groups to end"
    assert len(build_status(world.run, 1.0).waits) == 1


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_the_status_shows_seconds_that_are_left_instead_of_a_time(seconds: float) -> None:
    """People do not know our clock."""
    world = started(max_inflight=64, train={"a": {"rollouts_per_minute": 60.0}})
    entry = next(e for e in build_status(world.run, seconds).waits if e.kind == "rate")
    assert entry.seconds == 4.0 - seconds
