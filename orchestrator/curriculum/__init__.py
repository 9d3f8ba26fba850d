"""Which task of an environment next: statistics of every task, and strategies that choose by them.

`build_curriculum` is the way in. A strategy of your own is named "module:Class" and subclasses `CurriculumStrategy`.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.importing import ImportReferenceError, import_attribute
from orchestrator.curriculum.chance import Chance
from orchestrator.curriculum.difficulty import Difficulty
from orchestrator.curriculum.foreign import make, verify_curriculum
from orchestrator.curriculum.frontier import Frontier
from orchestrator.curriculum.notable import Notable
from orchestrator.curriculum.statistics import OUTCOMES, Outcomes, TaskOutcome, TaskStatistics
from orchestrator.curriculum.strategy import CurriculumError, CurriculumStrategy
from orchestrator.mix.foreign import describe_fault

__all__ = [
    "OUTCOMES",
    "STRATEGIES",
    "UNIFORM",
    "Chance",
    "CurriculumError",
    "CurriculumSettings",
    "CurriculumStrategy",
    "Difficulty",
    "Frontier",
    "Notable",
    "Outcomes",
    "TaskOutcome",
    "TaskStatistics",
    "build_curriculum",
    "verify_curriculum",
]

STRATEGIES: Mapping[str, str] = {
    "difficulty": "orchestrator.curriculum.difficulty:Difficulty",
    "frontier": "orchestrator.curriculum.frontier:Frontier",
}


@dataclass(frozen=True, slots=True)
class CurriculumSettings:
    """How the tasks of one env are chosen. `explore`: the share of tasks that come in turn, whatever the strategy says.
    `reward_range`: the rewards of a task that is never and of one that is always solved."""

    strategy: str = "uniform"
    options: Mapping[str, Any] = field(default_factory=dict)
    explore: float = 0.05
    reward_range: tuple[float, float] = (0.0, 1.0)


UNIFORM = CurriculumSettings()


def build_curriculum(
    settings: CurriculumSettings, tasks: TaskStatistics, *, env: str
) -> CurriculumStrategy | None:
    """The named strategy for the tasks of an env; None for "uniform", whose order needs none. CurriculumError names the env."""
    name = settings.strategy
    try:
        if name == "uniform":
            if settings.options:
                raise CurriculumError('curriculum "uniform" has no options')
            return None
        found = _strategy_class(name)
        _check_options(name, found, settings.options)
        return None if tasks.num_tasks is None else make(found, name, tasks, settings.options)
    except CurriculumError as error:
        raise CurriculumError(f'env "{env}": {error}') from error


def _strategy_class(name: str) -> type[CurriculumStrategy]:
    known = STRATEGIES.get(name, name)
    if ":" not in known:
        names = ["uniform", *STRATEGIES]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        raise CurriculumError(
            f'no curriculum is named "{name}"; use one of {", ".join(names)}, or "module:Class"{hint}'
        )
    try:
        found = import_attribute(known, what="curriculum")
    except ImportReferenceError as error:
        raise CurriculumError(f'curriculum "{name}" cannot be loaded: {error}') from error
    except Exception as error:
        raise CurriculumError(
            f'curriculum "{name}" cannot be loaded: {describe_fault(error, None)}'
        ) from error
    if not (isinstance(found, type) and issubclass(found, CurriculumStrategy)):
        raise CurriculumError(f'curriculum "{name}" is not a subclass of CurriculumStrategy')
    return found


def _check_options(name: str, found: type[CurriculumStrategy], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(found).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in options:
        if option not in known:
            offered = f"it has: {', '.join(known)}" if known else "it has none"
            close = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise CurriculumError(f'curriculum "{name}" has no option "{option}"; {offered}{hint}')
