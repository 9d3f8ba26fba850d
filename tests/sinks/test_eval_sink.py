"""Evaluations: when they start, which tasks they ask, what they report."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.sinks.eval_sink import EvalPlan, Evals, pass_at_k
from orchestrator.tasks.task import EvalTask
from tests.support.dispatch_world import make_data


def plan(env: str = "e", *, tasks: int = 2, k: int = 4, interval: int = 10) -> EvalPlan:
    return EvalPlan(env=env, split="eval", num_examples=tasks, rollouts_per_example=k, interval=interval)


def finish(
    evals: Evals, work: EvalTask, rewards: list[float], *, failure: str = ""
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
    return evals.finished(group, 5.0)


def take(evals: Evals, eligible: list[str] | None = None) -> EvalTask:
    work = evals.next_eval(eligible or ["e", "f"])
    assert work is not None
    return work


def test_runs_start_before_the_first_step_and_at_their_interval() -> None:
    """Each env at its own interval, once per step."""
    evals = Evals([plan("e", interval=10), plan("f", interval=4)])
    assert [run.plan.env for run in evals.trigger(0, 0, 0.0)] == ["e", "f"]
    assert evals.trigger(0, 0, 0.0) == []
    for env in ("e", "e", "f", "f"):
        finish(evals, take(evals, [env]), [1.0] * 4)
    started = [(step, run.plan.env) for step in range(1, 9) for run in evals.trigger(step, step, 0.0)]
    assert started == [(4, "f")], "the run of step 4 goes on, so step 8 starts none"


def test_every_task_is_handed_out_once() -> None:
    """And only for envs that have room."""
    evals = Evals([plan(tasks=3)])
    evals.trigger(0, 0, 0.0)
    assert evals.next_eval([]) is None
    assert [take(evals).task.index for _ in range(3)] == [0, 1, 2]
    assert evals.next_eval(["e"]) is None


def test_the_record_of_a_run() -> None:
    """avg@k over attempts, pass@k over tasks, failures apart."""
    evals = Evals([plan(tasks=2, k=2)])
    evals.trigger(0, 3, 0.0)
    first, second = take(evals), take(evals)
    assert finish(evals, first, [1.0, 0.0]) is None
    record = finish(evals, second, [1.0], failure="timed_out")
    assert record is not None
    assert record["version"] == 3
    assert record["avg@2"] == pytest.approx(0.75)
    assert record["avg@2_stderr"] == pytest.approx(math.sqrt(0.125 / 2))
    assert record["pass@1"] == pytest.approx(0.75)
    assert record["pass@2"] == pytest.approx(1.0)
    assert record["failures"] == 1
    assert record["failure_kinds"] == {"timed_out": 1}


def test_a_task_without_any_valid_attempt_is_not_a_zero() -> None:
    """It is left out of the averages and shows as failures."""
    evals = Evals([plan(tasks=1, k=2)])
    evals.trigger(0, 0, 0.0)
    record = finish(evals, take(evals), [], failure="broken")
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


def test_a_run_cut_short_is_started_again_after_a_restart() -> None:
    """The state names only finished evaluations."""
    evals = Evals([plan()])
    evals.trigger(0, 0, 0.0)
    take(evals)
    later = Evals([plan()])
    later.load_state_dict(evals.state_dict())
    assert len(later.trigger(0, 0, 0.0)) == 1
    for _ in range(2):
        finish(later, take(later), [1.0] * 4)
    after = Evals([plan()])
    after.load_state_dict(later.state_dict())
    assert after.trigger(0, 0, 0.0) == []
