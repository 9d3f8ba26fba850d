"""When evaluations are due, and which tasks they ask."""

from orchestrator.tasks.evaluations import EvalPlan, Evaluation, Evaluations


def plan(env: str = "e", *, tasks: int = 2, interval: int = 10) -> EvalPlan:
    return EvalPlan(env=env, split="eval", num_examples=tasks, rollouts_per_example=4, interval=interval)


def reach(
    evaluations: Evaluations, step: int, *, serving: int | None = None, last: bool = False
) -> list[tuple[int, str]]:
    """Training comes to a step, whose weights are loaded unless said otherwise; which evaluations start."""
    evaluations.reached(step, step, last=last)
    loaded = step if serving is None else serving
    begun = evaluations.start(step, serving=loaded, published=step, now=0.0)
    return [(evaluation.step, evaluation.plan.env) for evaluation in begun]


def end(evaluations: Evaluations, env: str) -> None:
    found: Evaluation = next(active for active in evaluations.active if active.plan.env == env)
    evaluations.ended(found)


def test_they_start_before_the_first_step_and_at_their_interval() -> None:
    """Each env at its own interval, once per step."""
    evaluations = Evaluations([plan("e", interval=10), plan("f", interval=4)])
    assert reach(evaluations, 0) == [(0, "e"), (0, "f")]
    assert reach(evaluations, 0) == []
    end(evaluations, "e")
    end(evaluations, "f")
    assert [started for step in range(1, 8) for started in reach(evaluations, step)] == [(4, "f")]


def test_one_that_is_due_while_the_one_before_goes_on_is_delayed_and_not_skipped() -> None:
    """It is booked with the step at which it really starts."""
    evaluations = Evaluations([plan("f", interval=4)])
    assert reach(evaluations, 0) == [(0, "f")]
    assert [started for step in range(1, 10) for started in reach(evaluations, step)] == []
    assert evaluations.due == ["f"]
    end(evaluations, "f")
    assert not evaluations.idle
    assert reach(evaluations, 10) == [(10, "f")]
    end(evaluations, "f")
    assert reach(evaluations, 11) == []
    assert reach(evaluations, 12) == [(12, "f")]


def test_one_that_is_due_waits_for_its_weights() -> None:
    """Otherwise it would measure an older version."""
    evaluations = Evaluations([plan(interval=4)])
    reach(evaluations, 0)
    end(evaluations, "e")
    assert reach(evaluations, 4, serving=3) == []
    assert evaluations.due == ["e"]
    assert reach(evaluations, 5, serving=4) == [(5, "e")]
    assert evaluations.active[0].version == 4


def test_a_version_that_was_withdrawn_is_not_waited_for() -> None:
    """No inference server could load it, so the newest one that there is must do."""
    evaluations = Evaluations([plan(interval=4)])
    reach(evaluations, 0)
    end(evaluations, "e")
    evaluations.reached(4, 4, last=False)
    assert evaluations.start(4, serving=3, published=4, now=0.0) == []
    assert len(evaluations.start(4, serving=3, published=3, now=0.0)) == 1


def test_the_last_step_is_always_evaluated() -> None:
    """Whatever the interval; once."""
    evaluations = Evaluations([plan(interval=4)])
    reach(evaluations, 0)
    end(evaluations, "e")
    assert reach(evaluations, 2, last=True) == [(2, "e")]
    end(evaluations, "e")
    assert reach(evaluations, 2, last=True) == []
    assert evaluations.idle


def test_every_task_is_handed_out_once() -> None:
    """And only for envs that have room."""
    evaluations = Evaluations([plan(tasks=3)])
    reach(evaluations, 0)
    assert evaluations.next_eval([]) is None
    taken = [evaluations.next_eval(["e"]) for _ in range(3)]
    assert [work.task.index for work in taken if work is not None] == [0, 1, 2]
    assert evaluations.next_eval(["e"]) is None


def test_one_cut_short_is_started_again_after_a_restart() -> None:
    """The state names only finished evaluations."""
    evaluations = Evaluations([plan()])
    reach(evaluations, 0)
    evaluations.next_eval(["e"])
    later = Evaluations([plan()])
    later.load_state_dict(evaluations.state_dict())
    assert reach(later, 0) == [(0, "e")]
    end(later, "e")
    after = Evaluations([plan()])
    after.load_state_dict(later.state_dict())
    assert reach(after, 0) == []
