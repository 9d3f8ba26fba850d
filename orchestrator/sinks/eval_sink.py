"""Evaluations: which tasks are still to be attempted, and what the finished ones say.

A run of one eval env is booked under the version it started with. Failures are reported apart and never count as a
reward of zero. avg@k is the mean reward over attempts, pass@k the unbiased estimate that at least one of k attempts
solves the task (reward ≥ 1 counts as solved), each with its standard error over tasks. Pure.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from orchestrator.dispatch.work import PendingGroup
from orchestrator.tasks.task import EvalTask, TrainTask

SOLVED = 1.0 - 1e-6
"""A reward of at least this counts as a solved task."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """How one eval env is evaluated."""

    env: str
    split: str
    num_examples: int
    rollouts_per_example: int
    interval: int


@dataclass(slots=True, eq=False)
class Evaluation:
    """One evaluation of one env under way."""

    plan: EvalPlan
    step: int
    version: int
    started: float
    next_index: int = 0
    ended_tasks: int = 0
    rewards: list[list[float]] = field(default_factory=list)
    failures: int = 0
    failure_kinds: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.ended_tasks == self.plan.num_examples


class Evals:
    """Starts runs by step, hands out their tasks, gathers their results."""

    def __init__(self, plans: Collection[EvalPlan]) -> None:
        self._plans = list(plans)
        self._active: deque[Evaluation] = deque()
        self._last_step: dict[str, int] = {}
        self.results: list[dict[str, Any]] = []

    @property
    def active(self) -> list[Evaluation]:
        """Runs that are not finished."""
        return list(self._active)

    def trigger(self, step: int, version: int, now: float) -> list[Evaluation]:
        """Start the runs that are due after `step` (0: before the first). A run still going is not started twice."""
        started = []
        for plan in self._plans:
            due = step % plan.interval == 0 and self._last_step.get(plan.env) != step
            if due and all(run.plan.env != plan.env for run in self._active):
                self._last_step[plan.env] = step
                run = Evaluation(plan=plan, step=step, version=version, started=now)
                self._active.append(run)
                started.append(run)
        return started

    def next_eval(self, eligible: Collection[str]) -> EvalTask | None:
        """The next task of the oldest run that has one left."""
        for run in self._active:
            plan = run.plan
            if run.next_index < plan.num_examples and plan.env in eligible:
                index = run.next_index
                run.next_index += 1
                task = TrainTask(env=plan.env, split=plan.split, index=index, epoch=0, position=index)
                return EvalTask(task=task, size=plan.rollouts_per_example, context=run)
        return None

    def finished(self, group: PendingGroup, now: float) -> dict[str, Any] | None:
        """A task's attempts ended; the run's result when that was the last one."""
        run: Evaluation = group.context
        run.rewards.append([rollout.reward for result in group.results for rollout in result.rollouts])
        missing = group.size - group.valid
        if missing:
            run.failures += missing
            kind = group.failure or "cancelled"
            run.failure_kinds[kind] = run.failure_kinds.get(kind, 0) + missing
        run.ended_tasks += 1
        if not run.done:
            return None
        self._active.remove(run)
        result = summarise(run, now)
        self.results.append(result)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Which step each env was last evaluated at; a run cut short is started again."""
        unfinished = {run.plan.env for run in self._active}
        return {"last_step": {env: step for env, step in self._last_step.items() if env not in unfinished}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_step = dict(state["last_step"])


def summarise(run: Evaluation, now: float) -> dict[str, Any]:
    """The record of a finished run."""
    k = run.plan.rollouts_per_example
    tried = [rewards for rewards in run.rewards if rewards]
    averages = [sum(rewards) / len(rewards) for rewards in tried]
    passes = {
        width: [
            pass_at_k(len(rewards), sum(reward >= SOLVED for reward in rewards), width)
            for rewards in tried
            if len(rewards) >= width
        ]
        for width in _widths(k)
    }
    return {
        "env": run.plan.env,
        "step": run.step,
        "version": run.version,
        "tasks": run.plan.num_examples,
        "k": k,
        "rollouts": sum(len(rewards) for rewards in run.rewards),
        "failures": run.failures,
        "failure_kinds": dict(run.failure_kinds),
        f"avg@{k}": _mean(averages),
        f"avg@{k}_stderr": _stderr(averages),
        **{f"pass@{width}": _mean(values) for width, values in passes.items()},
        **{f"pass@{width}_stderr": _stderr(values) for width, values in passes.items()},
        "seconds": round(now - run.started, 3),
    }


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Unbiased estimate that at least one of k attempts drawn from n is among the solved ones."""
    if n - solved < k:
        return 1.0
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def _widths(k: int) -> list[int]:
    """1, 2, 4, … and k itself."""
    return sorted({*(2**power for power in range(k.bit_length()) if 2**power <= k), k})


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _stderr(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    centre = sum(values) / len(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values))
