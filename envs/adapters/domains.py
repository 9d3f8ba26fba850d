"""Domains: environments without a class, as `<domain>::<dataset>[@subset]`.

A domain is a rollout function and a dataset loader, named in the configuration:

    [domains.math]
    rollout = "pkg.module:function"    # async (task, model, **args) -> Rollout
    dataset = "pkg.module:function"    # (name, subset, **args) -> tasks
    system_prompt = "…"                # unless the env sets its own

`route` rewrites such an id, in the service, into one that an env server can load by itself; what the functions
do is no affair of this module. A function gets only those of the env's `args` that its signature names, unless
it takes any.
"""

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError
from envs.importing import ImportReferenceError, import_attribute, nearest
from envs.loader import parse_id
from envs.model import Model
from envs.rollout import Rollout

_LOADER = "envs.adapters.domains:LOADER"

RolloutFunction = Callable[..., Awaitable[Rollout]]
DatasetFunction = Callable[..., Tasks]


@dataclass(frozen=True, slots=True)
class Domain:
    """What the configuration says of one domain. `rollout` and `dataset` are "module:function"."""

    rollout: str
    dataset: str
    system_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class Routed:
    """What an env server is given in place of a domain's id."""

    id: str
    args: dict[str, Any]
    system_prompt: str | None


def route(
    text: str, args: Mapping[str, Any], *, domains: Mapping[str, Domain], loaders: Collection[str] = ()
) -> Routed | None:
    """Where the id of a domain leads, None for any other id.

    An id whose first part is neither a domain nor one of `loaders` is an error that names the nearest of both.
    """
    identity = parse_id(text)
    domain = domains.get(identity.loader)
    if domain is None:
        if identity.loader and ":" not in identity.loader and loaders and identity.loader not in loaders:
            raise EnvironmentLoadError(
                f'environment id "{text}": there is no domain or loader "{identity.loader}"; '
                f"{nearest(identity.loader, [*domains, *loaders])}"
            )
        return None
    split = f"@{identity.split}" if identity.split else ""
    table = {"rollout": domain.rollout, "dataset": domain.dataset, "args": dict(args)}
    return Routed(f"{_LOADER}::{identity.loader}::{identity.name}{split}", table, domain.system_prompt)


class DomainEnvironment(Environment):
    """One dataset of a domain. The split it is asked for is the subset; without one, "train" or "eval"."""

    def __init__(self, name: str, *, rollout: str, dataset: str, args: Mapping[str, Any]) -> None:
        domain, _, self._dataset_name = name.partition("::")
        if not self._dataset_name:
            raise EnvironmentLoadError(f'"{name}" names no dataset: write {domain or "<domain>"}::<dataset>')
        self._name = name
        self._rollout: RolloutFunction = _function(rollout, f'domain "{domain}": rollout')
        self._dataset: DatasetFunction = _function(dataset, f'domain "{domain}": dataset')
        if not inspect.iscoroutinefunction(inspect.unwrap(self._rollout)):
            raise EnvironmentLoadError(f'domain "{domain}": rollout "{rollout}" must be an async function')
        self._rollout_args = _taken(self._rollout, args)
        self._dataset_args = _taken(self._dataset, args)
        unused = sorted(set(args) - set(self._rollout_args) - set(self._dataset_args))
        if unused:
            raise EnvironmentLoadError(
                f'domain "{domain}": neither "{rollout}" nor "{dataset}" takes {", ".join(unused)}'
            )

    def tasks(self, split: str) -> Tasks:
        tasks = self._dataset(self._dataset_name, split, **self._dataset_args)
        if not hasattr(tasks, "__getitem__"):
            raise EnvironmentLoadError(
                f'"{self._name}@{split}": the dataset must be indexable, got {type(tasks).__name__}'
            )
        return tasks

    async def rollout(self, task: Task, model: Model) -> Rollout:
        return await self._rollout(task, model, **self._rollout_args)


class DomainLoader:
    """Loads what `route` made; domains live in the configuration, so there are no names to list."""

    def names(self) -> list[str]:
        return []

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        return DomainEnvironment(name, **args)


LOADER = DomainLoader()


def _function(reference: str, shown: str) -> Callable[..., Any]:
    try:
        found = import_attribute(reference, what=shown, suggest=inspect.isfunction)
    except ImportReferenceError as error:
        raise EnvironmentLoadError(str(error)) from error.__cause__
    if not callable(found):
        raise EnvironmentLoadError(f'{shown} "{reference}" is not a function')
    function: Callable[..., Any] = found
    return function


def _taken(function: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the args that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(args)
    return {name: value for name, value in args.items() if name in parameters}
