"""When evaluations are due, and which tasks each still has to try.

One is due before the first step, whenever the interval's count has gone up since the last one, and after the last
step. It waits until the version of that step is loaded and until an earlier one of the same env has ended, and is then
booked with the step and the version that it really starts with: a due evaluation is delayed, never skipped, while
the run goes on. Pure.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from orchestrator.tasks.task import EvalTask, TrainTask


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


class Evaluations:
    """Starts evaluations by step and hands out their tasks."""

    def __init__(self, plans: Collection[EvalPlan]) -> None:
        self._plans = list(plans)
        self._active: deque[Evaluation] = deque()
        self._last_step: dict[str, int] = {}
        self._due: dict[str, int] = {}
        self._stopped = False
        self.paused = False
        """While true, no further task is handed out."""

    def stop(self) -> None:
        """Hand out no further task, ever."""
        self._stopped = True

    @property
    def envs(self) -> list[str]:
        """Envs that can be evaluated."""
        return [plan.env for plan in self._plans]

    def ask(self, env: str, version: int) -> None:
        """An evaluation is wanted beside those that come by steps; one that is due already counts as this one."""
        self._due.setdefault(env, version)

    @property
    def active(self) -> list[Evaluation]:
        """Evaluations that are under way."""
        return list(self._active)

    @property
    def due(self) -> list[str]:
        """Envs whose evaluation is due and has not started."""
        return list(self._due)

    @property
    def idle(self) -> bool:
        """Whether nothing is due and nothing under way."""
        return not self._active and not self._due

    def reached(self, step: int, version: int, *, last: bool) -> None:
        """Training has come to `step`, whose weights are `version`; `last`: there is no further step."""
        for plan in self._plans:
            before = self._last_step.get(plan.env)
            if before is None or step // plan.interval > before // plan.interval or (last and step > before):
                self._due.setdefault(plan.env, version)

    def start(self, step: int, *, serving: int, published: int, now: float) -> list[Evaluation]:
        """Start what is due and can be: its version is loaded, and none of the same env is under way."""
        started = []
        for plan in self._plans:
            wanted = self._due.get(plan.env)
            if wanted is None or serving < min(wanted, published):
                continue
            if any(evaluation.plan.env == plan.env for evaluation in self._active):
                continue
            del self._due[plan.env]
            self._last_step[plan.env] = step
            evaluation = Evaluation(plan=plan, step=step, version=serving, started=now)
            self._active.append(evaluation)
            started.append(evaluation)
        return started

    def next_eval(self, eligible: Collection[str]) -> EvalTask | None:
        """The next task of the oldest evaluation that has one left."""
        for evaluation in () if self._stopped or self.paused else self._active:
            plan = evaluation.plan
            if evaluation.next_index < plan.num_examples and plan.env in eligible:
                index = evaluation.next_index
                evaluation.next_index += 1
                task = TrainTask(env=plan.env, split=plan.split, index=index, epoch=0, position=index)
                return EvalTask(task=task, size=plan.rollouts_per_example, context=evaluation)
        return None

    @property
    def waiting(self) -> list[str]:
        """Envs of evaluations that have tasks left to hand out."""
        active = () if self._stopped else self._active
        return [one.plan.env for one in active if one.next_index < one.plan.num_examples]

    def ended(self, evaluation: Evaluation) -> None:
        """Every task of an evaluation has been tried."""
        self._active.remove(evaluation)

    def state_dict(self) -> dict[str, Any]:
        """Which step each env was last evaluated at; an evaluation that was cut short is started again."""
        unfinished = {evaluation.plan.env for evaluation in self._active}
        return {"last_step": {env: step for env, step in self._last_step.items() if env not in unfinished}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_step = dict(state["last_step"])
