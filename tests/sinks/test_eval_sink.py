"""What evaluations report: averages, estimates, failures apart."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.sinks.eval_sink import EvalSink, pass_at_k
from orchestrator.tasks.evaluations import EvalPlan, Evaluations
from orchestrator.tasks.task import EvalTask
from tests.support.worlds import make_data


def started(*, tasks: int = 2, k: int = 4, version: int = 0) -> tuple[Evaluations, EvalSink]:
    """An evaluation of env "e" that has begun."""
    plan = EvalPlan(env="e", split="eval", num_examples=tasks, rollouts_per_example=k, interval=10)
    evaluations = Evaluations([plan])
    evaluations.reached(0, version, last=False)
    assert evaluations.start(0, serving=version, published=version, now=0.0)
    return evaluations, EvalSink(evaluations)


def finish(
    sink: EvalSink, work: EvalTask, rewards: list[float], *, failure: str = ""
) -> dict[str, object] | None:
    group = PendingGroup(
        task=work.task,
        lane=Lane.EVAL,
        size=work.size,
        needed=0,
        group_scored=False,
        version=0,
        opened=0.0,
        context=work.context,
    )
    if rewards:
        group.results.append(make_data(rewards))
    group.valid, group.failure = len(rewards), failure
    return sink.completed(group, 5.0)


def take(evaluations: Evaluations) -> EvalTask:
    work = evaluations.next_eval(["e"])
    assert work is not None
    return work


def test_the_record_of_an_evaluation() -> None:
    """avg@k over attempts, pass@k over tasks, failures apart."""
    evaluations, sink = started(tasks=2, k=2, version=3)
    first, second = take(evaluations), take(evaluations)
    assert finish(sink, first, [1.0, 0.0]) is None
    assert not evaluations.idle
    record = finish(sink, second, [1.0], failure="timed_out")
    assert record is not None
    assert sink.results == [record]
    assert evaluations.idle
    assert record["version"] == 3
    assert record["avg@2"] == pytest.approx(0.75)
    assert record["avg@2_stderr"] == pytest.approx(math.sqrt(0.125 / 2))
    assert record["pass@1"] == pytest.approx(0.75)
    assert record["pass@2"] == pytest.approx(1.0)
    assert record["failures"] == 1
    assert record["failure_kinds"] == {"timed_out": 1}
    assert record["seconds"] == 5.0


def test_a_task_without_any_valid_attempt_is_not_a_zero() -> None:
    """It is left out of the averages and shows as failures."""
    evaluations, sink = started(tasks=1, k=2)
    record = finish(sink, take(evaluations), [], failure="broken")
    assert record is not None
    assert record["avg@2"] is None
    assert record["failures"] == 2


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_attempt(n: int, data: st.DataObject) -> None:
    """Checked by enumerating every way to draw k of n."""
    solved = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    expected = sum(any(i < solved for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, solved, k) == pytest.approx(expected)
