"""What evaluations say: the rewards of their tasks become one record each.

An evaluation is booked under the version it started with. Failures are reported apart and never count as a reward of
zero. avg@k is the mean reward over attempts, pass@k the unbiased estimate that at least one of k attempts
solves the task (reward ≥ 1 counts as solved), each with its standard error over tasks. Pure.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from orchestrator.dispatch.work import PendingGroup
from orchestrator.tasks.evaluations import Evaluation, Evaluations

SOLVED = 1.0 - 1e-6
"""A reward of at least this counts as a solved task."""

RECENT, RECENT_OF_ENV = 20, 2
"""Results that the status shows: the last ones, and of each env the last and the one before it, however many envs there are."""


class EvalSink:
    """Gathers what the attempts at evaluation tasks brought."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self.results: list[dict[str, Any]] = []
        self._last: dict[str, deque[int]] = {}
        """Where the last results of each env stand."""

    def load(self, results: Iterable[dict[str, Any]]) -> None:
        """Results of earlier processes of the run."""
        for result in results:
            self._add(result)

    def recent(self) -> list[dict[str, Any]]:
        """The results that the status shows, oldest first."""
        last = range(max(0, len(self.results) - RECENT), len(self.results))
        return [
            self.results[place] for place in sorted({*last, *(n for of in self._last.values() for n in of)})
        ]

    def completed(self, group: PendingGroup, now: float) -> dict[str, Any] | None:
        """A task's attempts ended; the evaluation's record when that was the last one."""
        evaluation: Evaluation = group.context
        evaluation.rewards.append([rollout.reward for result in group.results for rollout in result.rollouts])
        missing = group.size - group.valid
        if missing:
            evaluation.failures += missing
            kind = group.failure or "cancelled"
            evaluation.failure_kinds[kind] = evaluation.failure_kinds.get(kind, 0) + missing
        evaluation.ended_tasks += 1
        if not evaluation.done:
            return None
        self._evaluations.ended(evaluation)
        result = summarise(evaluation, now)
        self._add(result)
        return result

    def _add(self, result: dict[str, Any]) -> None:
        self._last.setdefault(result["env"], deque(maxlen=RECENT_OF_ENV)).append(len(self.results))
        self.results.append(result)


def summarise(evaluation: Evaluation, now: float) -> dict[str, Any]:
    """The record of a finished evaluation."""
    k = evaluation.plan.rollouts_per_example
    tried = [rewards for rewards in evaluation.rewards if rewards]
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
        "env": evaluation.plan.env,
        "step": evaluation.step,
        "version": evaluation.version,
        "tasks": evaluation.plan.num_examples,
        "k": k,
        "rollouts": sum(len(rewards) for rewards in evaluation.rewards),
        "failures": evaluation.failures,
        "failure_kinds": dict(evaluation.failure_kinds),
        f"avg@{k}": _mean(averages),
        f"avg@{k}_stderr": _stderr(averages),
        **{f"pass@{width}": _mean(values) for width, values in passes.items()},
        **{f"pass@{width}_stderr": _stderr(values) for width, values in passes.items()},
        "seconds": round(now - evaluation.started, 3),
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
