"""Going on after a death at any moment: nothing is lost, doubled or skipped."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.curriculum import STRATEGIES, CurriculumSettings
from orchestrator.run.resume import JournaledWeights, resume
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.support.scenarios import check_choices
from tests.support.worlds import NEVER, TestedWorld, make_world, quiet

quick = settings(max_examples=15, deadline=None)


def mixed(**options: Any) -> TestedWorld:
    """Groups of 4 and 3 in batches of 12: some are split, some are filtered, some fail for good."""
    return make_world(
        {
            "a": Behaviour(latency=lambda rng: rng.expovariate(1.0), loss=0.1),
            "b": Behaviour(
                latency=lambda rng: rng.expovariate(0.5), reward=lambda rng: float(rng.random() < 0.3)
            ),
        },
        **{"train": {"b": {"group_size": 3}}, **options},
        batch_size=12,
        keep_equal_rewards=False,
    )


def check_positions(world: TestedWorld) -> None:
    """Every position below the low-water mark was trained on exactly once, or filtered, or given up."""
    sequences: Counter[tuple[str, int, int]] = Counter()
    trained: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}
    for batch in world.journal.batches:
        for group in batch.groups:
            trained[group.env][group.task.position] += group.size
            sequences.update((group.env, group.task.position, group.part + n) for n in range(group.size))
    assert set(sequences.values()) == {1}, "no sequence is trained on twice"
    ended = {env: {position for of, position, _ in world.journal.tasks if of == env} for env in trained}
    for env, size in (("a", 4), ("b", 3)):
        assert not ended[env] & trained[env].keys(), "a task has one end"
        for position in range(world.parts.source.low_water(env)):
            # The rest of a split group may still be queued, or was given up where no batch may hold it any more.
            assert position in ended[env] or 0 < trained[env][position] <= size


@pytest.mark.timeout(600)
@quick
@given(
    seed=st.integers(0, 1000),
    kills=st.lists(st.floats(0.0, 40.0), max_size=4),
    train_s=st.sampled_from([0.0, 1.0, 5.0]),
    mode=st.sampled_from(["pace", "drop"]),
)
def test_a_run_that_is_killed_at_any_moment_loses_doubles_and_skips_nothing(
    seed: int, kills: list[float], train_s: float, mode: str
) -> None:
    """Whatever was formed is served again as it was, whatever was handed out and not ended is asked again."""
    world = mixed(seed=seed, train_s=train_s, mode=mode, max_steps=12)
    for time_s in kills:
        world.at(time_s, world.kill)
    assert world.play(until=lambda: bool(world.ended))
    assert [batch.step for batch in world.journal.batches] == list(range(1, 13))
    served: dict[int, list[str]] = {}
    for step, _, batch in world.trained:
        ids = [group.id for group in batch.groups]
        assert served.setdefault(step, ids) == ids, "a step that is served again is the same"
        assert batch.size == 12
    assert sorted(served) == list(range(1, 13))
    assert world.parts.facts.sequences == 12 * 12, (
        "what was emitted is counted with the batch that emitted it"
    )
    assert [record.step for record in world.journal.steps] == list(range(1, 13))
    check_positions(world)


def test_a_process_that_dies_between_publishing_and_acknowledging_knows_that_the_step_was_trained_on() -> (
    None
):
    """The batch is served again, but what its version trained on does not count twice."""
    world = quiet(train_s=NEVER)
    world.turn()
    for group in world.open_groups():
        world.finish_group(group)
    world.turn()
    world.run.on_publish(1, "step_1", 1.0)
    world.kill()
    versions = world.parts.versions
    assert (versions.formed, versions.trained, world.run.acknowledged) == (1, 1, 0)
    assert (versions.published, versions.serving) == (1, 0)
    assert list(world._offered) == [1]


@pytest.mark.timeout(600)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kills=st.lists(st.floats(0.0, 40.0), min_size=1, max_size=4),
    mode=st.sampled_from(["pace", "drop"]),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    num_tasks=st.sampled_from([3, 50]),
)
def test_a_run_with_a_curriculum_goes_on_with_the_same_tasks_and_what_it_knew(
    seed: int, kills: list[float], mode: str, strategy: str, num_tasks: int
) -> None:
    """A position stands for one task over all lives, and the statistics are those of everything that came back."""
    curriculum = {"num_tasks": num_tasks, "curriculum": CurriculumSettings(strategy)}
    world = mixed(
        seed=seed, mode=mode, max_steps=12, train={"a": curriculum, "b": {**curriculum, "group_size": 3}}
    )
    for time_s in kills:
        world.at(time_s, world.kill)
    assert world.play(until=lambda: bool(world.ended))
    check_positions(world)
    check_choices(world)
    world.kill()
    for env in ("a", "b"):
        statistics, learned = world.parts.source.statistics(env), world.journal.learned[env]
        assert statistics.groups.sum() == len(learned)
        assert statistics.rollouts.sum() == sum(one.rollouts for one in learned)
        recovered = world.journal.recover()
        assert all(position >= recovered.resolved[env][0] for position in recovered.chosen[env]), (
            "what is done with is given up"
        )


def test_versions_and_their_places_go_on() -> None:
    """The servers are brought to what was loaded, and asked for what was published."""
    world = quiet(train_s=NEVER)
    world.turn()
    for version in (1, 2):
        world.run.on_publish(version, f"step_{version}", 1.0)
    world.run.on_loaded(1, "step_1", 2.0)
    world.kill()
    assert (world.run.weights.path, world.run.weights.loaded_path) == ("step_2", "step_1")
    assert world.pool.endpoint.version == 1
    assert world.play(until=lambda: world.run.version == 2)


def test_a_journal_that_knows_only_what_was_published_takes_it_for_loaded() -> None:
    """Journals of earlier revisions did not tell them apart."""
    weights = JournaledWeights({"version": {"published": [0, 3], "path": "step_3", "trained": 2}})
    assert (weights.loaded, weights.published, weights.loaded_path) == (3, 3, "step_3")


def test_an_empty_journal_is_a_fresh_start() -> None:
    """Version 0, step 0, the first task."""
    world = quiet()
    recovered = world.journal.recover()
    assert recovered.empty
    resume(world.run, recovered, JournaledWeights(recovered.state), ())
    assert (world.parts.versions.formed, world.run.acknowledged, world.run.version) == (0, 0, 0)
    world.turn()
    assert world.starts[0].group.task.position == 0


def test_a_partial_batch_goes_on_where_it_was() -> None:
    """A queued group is in the next batch, and only what is missing of it is asked."""
    world = quiet(train_s=NEVER)
    world.turn()
    first, second = world.open_groups()
    world.finish_group(second)
    world.kill()
    assert world.parts.buffer.sequences == 4
    world.turn()
    assert world.starts[8].group.task == first.task, "what was in flight is asked again, and first"
    assert second.task not in [attempt.group.task for attempt in world.starts[8:]]
    world.finish_group(world.open_groups()[0])
    world.turn()
    assert {group.id for group in world.journal.batches[0].groups} == {first.task.key, second.task.key}


def test_books_and_evaluations_go_on() -> None:
    """Counts, results and what is evaluated already are those of the whole run."""
    plan = EvalPlan(env="e", split="eval", num_examples=2, rollouts_per_example=1, interval=4)
    world = make_world({"a": Behaviour(), "e": Behaviour()}, max_steps=8, evals=[plan])
    assert world.play(until=lambda: world.run.acknowledged == 5 and len(world.eval_results) == 2)
    emitted = world.parts.facts.sequences
    world.kill()
    assert world.run.acknowledged == 5
    assert world.parts.facts.sequences <= emitted
    assert len(world.eval_results) == 2
    assert world.play(until=lambda: bool(world.ended))
    assert [result["step"] for result in world.eval_results] == [0, 4, 8]
    assert world.parts.facts.sequences == 8 * 16
    assert sum(batch.size for batch in world.journal.batches) == 8 * 16


@pytest.mark.parametrize("kills", [1, 3])
def test_an_evaluation_that_was_cut_short_is_started_again(kills: int) -> None:
    """Its record is whole, and there is one of it."""
    plan = EvalPlan(env="e", split="eval", num_examples=3, rollouts_per_example=1, interval=100)
    world = make_world(
        {"a": Behaviour(), "e": Behaviour(latency=lambda rng: 10.0)}, max_steps=20, evals=[plan]
    )
    for number in range(kills):
        world.at(5.0 + number, world.kill)
    assert world.play(until=lambda: bool(world.ended))
    assert [(result["step"] == 0, result["tasks"]) for result in world.eval_results][-1] == (False, 3)
    assert len({result["step"] for result in world.eval_results}) == len(world.eval_results) == 2


def test_an_env_that_is_gone_does_not_keep_the_run_from_going_on() -> None:
    """Its queued groups are given up, and its place is kept."""
    world = mixed(train_s=NEVER)
    assert world.play(until=lambda: world.parts.buffer.queued_by_env["b"] > 0)
    alone = make_world({"a": Behaviour()}, batch_size=12)
    alone.journal = world.journal
    alone.kill()
    assert [reason for group, reason in world.journal.evicted if group.env == "b"]
    assert alone.play(until=lambda: alone.steps() >= 3)
