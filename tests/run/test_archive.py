"""What a run tells its archive, in virtual time: how every group ended, and why attempts failed."""

from collections import Counter

from envs.wire import Failure
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch, Group
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.tasks.evaluations import EvalPlan
from tests.support.worlds import make_world


class Told:
    """An archive that writes down what it is told."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str, int]] = []
        self.batches: dict[int, list[str]] = {}
        self.failures: Counter[tuple[str, str]] = Counter()
        self.gone: list[tuple[str, str]] = []
        self.evaluations: list[tuple[int, int]] = []

    def scored(self, pending: PendingGroup, outcome: str, now: float) -> None:
        self.ended.append((pending.task.key, outcome, len(pending.results)))

    def dropped(self, pending: PendingGroup, reason: str, now: float) -> None:
        self.ended.append((pending.task.key, reason, len(pending.results)))

    def evicted(self, group: Group, reason: str) -> None:
        self.gone.append((group.task.key, reason))

    def batch_formed(self, batch: Batch) -> None:
        self.batches[batch.step] = [group.task.key for group in batch.groups]

    def evaluated(self, pending: PendingGroup, now: float) -> None:
        self.evaluations.append((pending.context.step, len(pending.results)))

    def attempt_failed(self, pending: PendingGroup, failure: Failure, now: float) -> None:
        self.failures[pending.env, failure.kind] += 1


def test_every_group_is_told_once_with_what_it_had() -> None:
    """Queued ones before their batch, failed ones with the rollouts that worked, evaluations with their step."""
    told = Told()
    plan = EvalPlan(env="c", split="eval", num_examples=3, rollouts_per_example=2, interval=2)
    behaviours = {"a": Behaviour(), "b": Behaviour(loss=0.1, retryable=0.0), "c": Behaviour()}
    world = make_world(behaviours, evals=[plan], max_steps=6, archive=told)
    assert world.play(until=lambda: bool(world.ended))
    outcomes = Counter(outcome for _, outcome, _ in told.ended)
    queued = [key for key, outcome, _ in told.ended if outcome == "queued"]
    assert len(queued) == len(set(queued)) == outcomes["queued"]
    formed = [key for keys in told.batches.values() for key in keys]
    assert sorted(told.batches) == [1, 2, 3, 4, 5, 6]
    assert set(formed) <= set(queued)
    assert {results for _, outcome, results in told.ended if outcome == "queued"} == {4}
    failed = [results for _, outcome, results in told.ended if outcome not in ("queued", "run_complete")]
    assert failed
    assert max(failed) > 0
    assert {env for env, _ in told.failures} == {"b"}
    assert told.failures.total() >= len(failed)
    assert told.evaluations[:3] == [(0, 2)] * 3
    assert not any(group.results for group in world.open_groups())


def test_a_group_that_cannot_be_trained_on_is_told_with_its_reason() -> None:
    """Rejected with equal rewards, with all its rollouts."""
    told = Told()
    seldom = Behaviour(reward=lambda rng: float(rng.random() < 0.2))
    world = make_world({"a": seldom}, max_steps=2, keep_equal_rewards=False, archive=told)
    assert world.play(until=lambda: bool(world.ended))
    assert {results for _, outcome, results in told.ended if outcome == "equal_rewards"} == {4}
    assert not {key for key, outcome, _ in told.ended if outcome == "equal_rewards"} & {
        key for keys in told.batches.values() for key in keys
    }
