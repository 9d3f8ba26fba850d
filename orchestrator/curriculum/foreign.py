"""Curricula written by others: what they are asked, what their answers must be, and how their mistakes are told.

`Foreign` stands in front of a strategy that does not come along with this package. Whatever goes wrong inside ends the run
as a `StrategyError` that names the strategy, the file and the line; so does an index that is no task of the env.
`verify_curriculum` tries all of it once, before anything is started.
"""

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from orchestrator.curriculum.chance import Chance
from orchestrator.curriculum.statistics import TaskOutcome, TaskStatistics
from orchestrator.curriculum.strategy import CurriculumError, CurriculumStrategy
from orchestrator.errors import OrchestratorError
from orchestrator.mix import StrategyError
from orchestrator.mix.foreign import describe_fault

T = TypeVar("T")

CONSTRUCTOR = "__init__(self, tasks, **options)"
_TRIAL_TASKS = 8


def is_foreign(strategy: CurriculumStrategy) -> bool:
    """Whether the strategy's class is somebody else's."""
    return not type(strategy).__module__.startswith("orchestrator.curriculum.")


class Foreign(CurriculumStrategy):
    """A strategy of somebody else, with its mistakes told."""

    def __init__(self, strategy: CurriculumStrategy, name: str) -> None:
        super().__init__(strategy.tasks)
        self._strategy = strategy
        self._name = name

    def pick(self, chance: Chance) -> int:
        picked = self._call("pick", self._strategy.pick, chance)
        try:
            task = operator.index(picked)
        except TypeError:
            task = -1
        if isinstance(picked, bool) or not 0 <= task < self.num_tasks:
            raise StrategyError(
                f'curriculum "{self._name}": pick returned {picked!r}, '
                f"which is not one of the {self.num_tasks} tasks (0 to {self.num_tasks - 1})"
            )
        return task

    def on_hand_out(self, task: int) -> None:
        self._call("on_hand_out", self._strategy.on_hand_out, task)

    def on_end(self, task: int) -> None:
        self._call("on_end", self._strategy.on_end, task)

    def on_load(self) -> None:
        self._call("on_load", self._strategy.on_load)

    def pools(self) -> Mapping[str, int]:
        told = self._call("pools", self._strategy.pools)
        try:
            return {str(name): int(count) for name, count in told.items()}
        except (AttributeError, TypeError, ValueError):
            raise StrategyError(
                f'curriculum "{self._name}": pools returned {told!r}, which is not a mapping of names to counts'
            ) from None

    def _call(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except OrchestratorError:
            raise
        except Exception as error:
            fault = describe_fault(error, type(self._strategy))
            raise StrategyError(f'curriculum "{self._name}" failed in {method}: {fault}') from error


def make(
    found: type[CurriculumStrategy], name: str, tasks: TaskStatistics, options: Mapping[str, Any]
) -> CurriculumStrategy:
    """Call a strategy's constructor; CurriculumError that says why it cannot be made."""
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise CurriculumError(f'curriculum "{name}" does not define {missing}; pick(self, chance) is needed')
    try:
        inspect.signature(found).bind(tasks, **options)
    except TypeError as error:
        raise CurriculumError(
            f'curriculum "{name}" cannot be made: {error}; {CONSTRUCTOR} is needed'
        ) from None
    try:
        made = found(tasks, **options)
    except CurriculumError as error:
        raise CurriculumError(f'curriculum "{name}": {error}') from None
    except Exception as error:
        raise CurriculumError(
            f'curriculum "{name}" cannot be made: {describe_fault(error, found)}'
        ) from error
    if not hasattr(made, "num_tasks"):
        raise CurriculumError(f'curriculum "{name}": its constructor does not call super().__init__(tasks)')
    return Foreign(made, name) if is_foreign(made) else made


def verify_curriculum(build: Callable[[TaskStatistics], CurriculumStrategy | None]) -> None:
    """Try once what a run will ask of a curriculum; CurriculumError if that fails. `build` is called twice."""
    tasks = TaskStatistics(_TRIAL_TASKS, reward_range=(0.0, 1.0))
    strategy = build(tasks)
    if strategy is None:
        return
    try:
        for number in range(_TRIAL_TASKS):
            task = strategy.pick(Chance(number))
            strategy.on_hand_out(task)
            tasks.add(TaskOutcome(task, 0, number / _TRIAL_TASKS, 4, equal=False))
            strategy.on_end(task)
        strategy.pools()
        again = build(tasks)
        assert again is not None
        again.on_load()
        again.pick(Chance(0))
    except StrategyError as error:
        raise CurriculumError(str(error)) from error
