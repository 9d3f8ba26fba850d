"""Notices reward functions that raise inside a library that would score them as zero.

Functions of a classic verifiers rubric are replaced by ones that note the exception and raise it again; the
library then logs it and goes on with 0.0, and whoever opened `watching()` learns of it. Signatures and names
stay, because the library reads them. Functions without weight are metrics: theirs is left out, not a failure.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RewardError:
    """An exception in a reward function; `weight` is what the function counts for."""

    name: str
    weight: float
    error: Exception


_noted: ContextVar[list[RewardError] | None] = ContextVar("noted_reward_errors", default=None)


@contextmanager
def watching() -> Iterator[list[RewardError]]:
    """Collects what goes wrong in the reward functions called inside, also in tasks and threads they start."""
    errors: list[RewardError] = []
    token = _noted.set(errors)
    try:
        yield errors
    finally:
        _noted.reset(token)


def rubrics_of(rubric: Any) -> Iterator[Any]:
    """A rubric and all rubrics inside it: groups hold rubrics, groups of environments hold environments."""
    yield rubric
    for inner in getattr(rubric, "rubrics", None) or ():
        yield from rubrics_of(inner)
    environments = getattr(rubric, "env_map", None)
    if isinstance(environments, Mapping):
        for environment in environments.values():
            yield from rubrics_of(environment.rubric)


def watch(rubric: Any, *, is_group: Callable[[Any], bool]) -> None:
    """Wrap the reward functions of a rubric that are not wrapped yet, in place."""
    for inner in rubrics_of(rubric):
        functions = getattr(inner, "funcs", None)
        if not isinstance(functions, list):
            continue
        for place, function in enumerate(functions):
            if not hasattr(function, "_watched"):
                functions[place] = _watched(inner, function, group=is_group(function))


def _watched(rubric: Any, function: Callable[..., Any], *, group: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        # Foreign code that may raise anything; it goes on to the library, which expects to see it.
        except Exception as error:
            _note(rubric, watched, error)
            raise
        if inspect.isawaitable(result):
            return awaited(result)
        return checked(result)

    async def awaited(pending: Awaitable[Any]) -> Any:
        try:
            result = await pending
        # As above, for functions that are coroutines.
        except Exception as error:
            _note(rubric, watched, error)
            raise
        return checked(result)

    def checked(result: Any) -> Any:
        """The library turns what is not a number into zero as well."""
        try:
            if group:
                if not isinstance(result, Sequence):
                    raise TypeError(f"expected a list of rewards, got {type(result).__name__}")
                for value in result:
                    float(value)
            else:
                float(result)
        except (TypeError, ValueError) as error:
            _note(rubric, watched, error)
            raise
        return result

    if not hasattr(function, "__name__"):
        watched.__name__ = type(function).__name__
    watched._watched = True  # type: ignore[attr-defined]  # marks it for the next look
    return watched


def _note(rubric: Any, function: Any, error: Exception) -> None:
    errors = _noted.get()
    if errors is not None:
        place = next((place for place, known in enumerate(rubric.funcs) if known is function), None)
        weight = float(rubric.weights[place]) if place is not None else 1.0
        errors.append(RewardError(function.__name__, weight, error))
