"""The rules that join the parts: what starts, what an acknowledgement and a version mean, and when a run ends."""

from typing import Any

from orchestrator.dispatch.ledger import Lane
from orchestrator.run.ports import EndRun, LoadWeights
from orchestrator.run.run import RunState
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.support.worlds import NEVER, TestedWorld, make_world, quiet


def formed(steps: int, **options: Any) -> TestedWorld:
    """A run that has formed so many batches of two groups; nobody trains on them."""
    world = quiet(train_s=NEVER, **options)
    world.turn()
    while world.parts.versions.formed < steps:
        world.finish_group(world.open_groups()[0])
        world.turn()
    return world


def test_nothing_is_started_before_the_start() -> None:
    """Everything is restored and the servers are there first."""
    world = quiet()
    assert world.run.state is RunState.STARTING
    world.run.advance(0.0)
    assert world.run.drain() == []
    world.run.start(0.0)
    world.run.advance(0.0)
    assert len(world.run.drain()) == 8


def test_a_start_asks_for_the_published_version_where_the_servers_have_another() -> None:
    """An earlier process published it and did not live to see it loaded."""
    world = quiet()
    world.parts.versions.publish(3)
    world.run.weights.path = "step_3"
    world.run.start(0.0)
    assert world.run.drain() == [LoadWeights(3, "step_3")]


def test_an_acknowledgement_is_recorded_and_says_that_the_step_was_trained_on() -> None:
    """The book and the journal agree; a step that is told twice changes nothing."""
    world = formed(2)
    world.run.on_ack(1, 5.0)
    world.run.on_ack(1, 6.0)
    assert world.run.acknowledged == world.parts.versions.trained == world.journal.acknowledged == 1
    assert world.journal.recover().state["version"]["trained"] == 1


def test_so_many_batches_are_formed_ahead_as_the_trainer_takes() -> None:
    """Two by default, so that it never waits; more for one that takes more of them before it trains."""
    for options, ahead in (({}, 2), ({"ahead": 4}, 4)):
        world = formed(ahead, max_versions=8, **options)
        assert not world.parts.sink.wanted
        world.run.on_ack(1, 5.0)
        assert world.parts.sink.wanted


def test_no_step_is_trained_on_before_it_is_formed() -> None:
    """A trainer that is ahead of us says nothing about batches that do not exist."""
    world = formed(1)
    world.run.on_trained(7, 5.0)
    assert world.parts.versions.trained == 1


def test_a_version_that_names_its_step_says_nothing_of_others() -> None:
    """However it is numbered: version 2 of step 1 does not say that step 2 was trained on, and the journal has its step."""
    world = formed(3, ahead=3, max_versions=8)
    world.run.on_publish(2, "weights", 5.0, step=1)
    assert (world.parts.versions.trained, world.parts.versions.published) == (1, 2)
    world.run.on_publish(3, "weights", 6.0)
    assert world.parts.versions.trained == 3


def test_a_published_version_is_loaded_and_says_that_its_step_was_trained_on() -> None:
    """Before the step is acknowledged: the trainer publishes first."""
    world = formed(2)
    world.run.drain()
    world.run.on_publish(1, "step_1", 5.0)
    assert world.run.drain() == [LoadWeights(1, "step_1")]
    assert world.parts.versions.trained == 1
    assert world.run.acknowledged == 0
    assert world.run.version == 0


def test_versions_that_are_not_newer_are_ignored() -> None:
    """A trainer that reconnects may tell them again."""
    world = formed(2)
    world.run.on_publish(2, "step_2", 5.0)
    world.run.drain()
    world.run.on_publish(2, "again", 6.0)
    world.run.on_publish(1, "older", 6.0)
    assert world.run.drain() == []
    assert world.run.weights.path == "step_2"


def test_a_loaded_version_is_what_new_groups_are_sampled_by() -> None:
    """And it is what the journal says that the servers have."""
    world = formed(1)
    world.run.on_publish(1, "step_1", 5.0)
    world.run.on_loaded(1, "step_1", 6.0)
    world.turn()
    before = world.open_groups()
    world.finish_group(before[0])
    world.turn()
    assert world.open_groups()[-1].version == 1
    state = world.journal.recover().state["version"]
    assert (state["serving"], state["loaded_path"]) == (1, "step_1")


def test_a_refused_version_is_withdrawn() -> None:
    """The last one stays in use, and nothing has become older; a later one that loads ends the complaint."""
    world = formed(2)
    world.run.on_publish(1, "step_1", 5.0)
    world.run.on_loaded(1, "step_1", 5.0)
    world.run.on_publish(2, "broken", 6.0)
    world.run.on_refused(2, "no such file", 7.0)
    assert world.parts.versions.published == world.run.version == 1
    assert world.run.weights.path == "step_1"
    assert world.run.weights.refused == "version 2 could not be loaded: no such file"
    world.run.on_publish(3, "step_3", 8.0)
    world.run.on_loaded(3, "step_3", 9.0)
    assert world.run.weights.refused == ""


def test_a_draining_run_opens_and_forms_nothing_more() -> None:
    """What is in flight may end, and its groups are kept for a later process."""
    world = quiet(train_s=NEVER)
    world.turn()
    world.run.stop(1.0)
    for group in world.open_groups():
        world.finish_group(group)
        world.turn()
    assert world.run.idle
    assert world.parts.versions.formed == 0
    assert len(world.starts) == 8
    assert len(world.journal.recover().groups) == 2


def test_an_abandoned_run_gives_everything_up_to_be_asked_again() -> None:
    """Nothing is resolved by it."""
    world = quiet()
    world.turn()
    world.run.abandon(1.0)
    world._perform()
    assert world.run.state is RunState.FINISHED
    assert world.run.idle
    assert world.ledger.total_inflight == 0
    assert len(world.cancels) == 8
    assert world.journal.tasks == []
    assert world.parts.source.waiting("a") == 2


def test_the_run_ends_when_every_step_is_acknowledged_and_the_last_version_is_loaded() -> None:
    """Not before: the last version would be lost to evaluations and to people."""
    world = formed(1, max_steps=1)
    world.run.on_publish(1, "step_1", 5.0)
    world.turn()
    assert not world.run.ended
    world.run.on_ack(1, 6.0)
    world.run.advance(6.0)
    assert not world.run.ended
    world.run.on_loaded(1, "step_1", 7.0)
    world.run.drain()
    world.run.advance(7.0)
    assert EndRun("max_steps reached") in world.run.drain()
    assert world.run.ended


def test_the_run_ends_only_after_the_evaluations_of_its_last_step() -> None:
    """They are due with the last version and are part of the run."""
    plan = EvalPlan(env="e", split="eval", num_examples=2, rollouts_per_example=1, interval=100)
    world = make_world(
        {"a": Behaviour(), "e": Behaviour(latency=lambda rng: 50.0)},
        batch_size=8,
        max_steps=2,
        evals=[plan],
    )
    assert world.play(until=lambda: bool(world.ended))
    assert [(result["step"], result["version"]) for result in world.eval_results] == [(0, 0), (2, 2)]
    assert world.now >= 100.0


def test_the_first_reason_for_an_end_counts() -> None:
    """Later ones follow from it."""
    world = quiet()
    world.run.end("stopped")
    world.run.end("max_steps reached")
    assert world.run.ended == "stopped"
    assert world.run.drain() == [EndRun("stopped")]


def test_what_is_in_flight_when_the_last_batch_is_formed_is_abandoned() -> None:
    """Nobody could train on it; evaluations go on, and the tasks are there for a run with more steps."""
    plan = EvalPlan(env="e", split="eval", num_examples=1, rollouts_per_example=1, interval=100)
    world = make_world(
        {"a": Behaviour(latency=lambda rng: NEVER), "e": Behaviour(latency=lambda rng: NEVER)},
        batch_size=8,
        max_steps=1,
        max_inflight=16,
        max_versions=9,
        train_s=NEVER,
        evals=[plan],
    )
    world.turn()
    for group in world.open_groups()[:2]:
        world.finish_group(group)
    world.turn()
    assert world.parts.versions.formed == 1
    assert world.open_groups() == []
    assert len(world.open_groups(Lane.EVAL)) == 1
    assert world.parts.facts.envs["a"].dropped["run_complete"] == 8
    assert world.journal.tasks == []


def test_under_drop_a_new_version_gives_up_what_is_too_old_at_once() -> None:
    """Its slots are better used for what can still be trained on."""
    world = formed(1, mode="drop", max_versions=0, max_inflight=16)
    old = world.open_groups()
    assert old
    world.run.on_publish(1, "step_1", 5.0)
    world._perform()
    assert all(group.closed for group in old)
    assert world.parts.facts.envs["a"].dropped["stale"] > 0
