"""From an environment's id to the environment.

An id is `<loader>::<environment>[@split]`, "module:Class" of an `Environment` (a function that returns one
does as well), or the plain name of a built-in. Loaders are a table of names to "module:attr"; each is
imported only when an id asks for it, so that what an adapter depends on stays out of every other process.
Every mistake is an `EnvironmentLoadError` of one line that names the nearest valid names. What an environment's own
code raises while it is imported or made is an `EnvironmentRaisedError`, with the author's file and line, and a traceback.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envs.builtin import BUILTIN
from envs.environment import Environment
from envs.errors import EnvironmentLoadError, EnvironmentRaisedError
from envs.importing import ImportReferenceError, import_attribute, nearest
from envs.places import place_of


class Loader(Protocol):
    """A family of environments. It may also have `about(name)`, one line for lists."""

    def names(self) -> Sequence[str]:
        """The environments there are, or EnvironmentLoadError that says how to install them.

        A name in angle brackets stands for any.
        """

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        """One of them, made with `args`. Raises EnvironmentLoadError for a name it does not have."""


LOADERS: Mapping[str, str] = {
    "builtin": "envs.loader:BUILTINS",
    "dataset": "envs.dataset.environment:LOADER",
    "reasoning_gym": "envs.adapters.reasoning_gym:LOADER",
    "verifiers": "envs.adapters.verifiers:LOADER",
    "atropos": "envs.adapters.atropos:LOADER",
    "openenv": "envs.adapters.openenv:LOADER",
    "textarena": "envs.adapters.textarena:LOADER",
    "inspect": "envs.adapters.inspect_tasks:LOADER",
}
"""Loaders by name; a loader that is not here can be given in the id as "module:attr::environment"."""

FAMILIES: Mapping[str, str] = {
    "builtin::<name>": "comes along; short examples that the small local policy learns",
    "dataset::<file>": "rows of JSON lines, Parquet or a Hugging Face folder, with a prompt and a scorer; no Python",
    "reasoning_gym::<dataset>": "puzzles of reasoning-gym, generated without end",
    "verifiers::<environment>": "environments of verifiers, either generation",
    "atropos::<module>:<Class>": "environments of Atropos, as they are",
    "openenv::<URL>": "an environment behind a running OpenEnv server; openenv::<package>.server.app:app starts one",
    "textarena::<game>": "games of TextArena: alone, by self-play, against a fixed opponent",
    "inspect::<module>/<task>": "tasks of Inspect, for evaluations and for training",
    "<domain>::<dataset>": "a rollout function and a dataset loader, named in [domains] of the configuration",
    "module:Class": "an envs.Environment of your own, found from the working directory",
}
"""The forms that an id can have, each with a line for lists; docs/environments.md tells about each."""


@dataclass(frozen=True, slots=True)
class EnvironmentId:
    """An id, taken apart. `loader` is empty for "module:Class"."""

    loader: str
    name: str
    split: str | None = None


def parse_id(text: str) -> EnvironmentId:
    """Take an id apart without importing anything."""
    head, at, split = text.strip().rpartition("@")
    if not at:
        head, split = split, ""
    if at and not split:
        raise EnvironmentLoadError(f'environment id "{text}": the split after "@" is missing')
    loader, double_colon, name = head.partition("::")
    if not double_colon:
        loader, name = ("" if ":" in head else "builtin"), head
    if not name or (double_colon and not loader) or name != name.strip():
        raise EnvironmentLoadError(
            f'environment id "{text}" is not <loader>::<environment>[@split], module:Class or a built-in name'
        )
    return EnvironmentId(loader, name, split or None)


def load_environment(
    text: str, args: Mapping[str, Any] | None = None, *, loaders: Mapping[str, str] = LOADERS
) -> Environment:
    """The environment of an id, made with `args`."""
    identity = parse_id(text)
    if not identity.loader:
        environment = make_environment(_resolve(identity.name, "environment"), args or {}, text)
    else:
        loader = find_loader(identity.loader, loaders=loaders)
        environment = _made(lambda: loader.load(identity.name, args or {}), f'loading "{text}"')
    check_methods(environment, text)
    return environment


def check_methods(environment: Environment, shown: str) -> None:
    """Refuse methods that are async where they must not be, or the other way round: later errors would not say so."""
    for name in ("rollout", "score_group", "setup", "close"):
        method = inspect.unwrap(getattr(environment, name))
        if inspect.isasyncgenfunction(method):
            raise EnvironmentLoadError(
                f'"{shown}": {name} ({place_of(method)}) yields; it must return its result instead'
            )
        if inspect.isroutine(method) and not inspect.iscoroutinefunction(method):
            raise EnvironmentLoadError(
                f'"{shown}": {name} ({place_of(method)}) is a plain function; write "async def {name}", '
                "and await what it calls"
            )
    if inspect.iscoroutinefunction(environment.tasks) or inspect.isasyncgenfunction(environment.tasks):
        raise EnvironmentLoadError(
            f'"{shown}": tasks ({place_of(environment.tasks)}) is async; write "def tasks", and load what it needs '
            'in "async def setup"'
        )


def _made(make: Callable[[], Environment], step: str) -> Environment:
    try:
        return make()
    except EnvironmentLoadError:
        raise
    # The environment's own code, which may raise anything, exit() included.
    except (Exception, SystemExit) as error:
        raise EnvironmentRaisedError(step, error) from error


def find_factory(text: str) -> Any:
    """The class or function that makes the environment of an id; None where that is a loader's own affair."""
    identity = parse_id(text)
    if not identity.loader:
        return _resolve(identity.name, "environment")
    return _resolve(BUILTIN[identity.name].target, "environment") if identity.loader == "builtin" else None


def find_loader(name: str, *, loaders: Mapping[str, str] = LOADERS) -> Loader:
    """The loader of that name, imported."""
    reference = name if ":" in name else loaders.get(name)
    if reference is None:
        raise EnvironmentLoadError(f'there is no loader "{name}"; {nearest(name, loaders)}')
    loader = _resolve(reference, "loader")
    if not callable(getattr(loader, "load", None)):
        raise EnvironmentLoadError(f'loader "{name}": "{reference}" has no load(name, args)')
    found: Loader = loader
    return found


def make_environment(factory: Any, args: Mapping[str, Any], shown: str) -> Environment:
    """Call a class or function with `args`; what it takes and returns is checked first and last."""
    if not callable(factory):
        raise EnvironmentLoadError(f'"{shown}" is a {type(factory).__name__}, not an Environment class')
    if isinstance(factory, type) and not issubclass(factory, Environment):
        raise EnvironmentLoadError(f'"{shown}" is not a subclass of envs.Environment')
    if inspect.isabstract(factory):
        missing = ", ".join(sorted(factory.__abstractmethods__))
        raise EnvironmentLoadError(f'"{shown}" does not define {missing}')
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        taken = list(inspect.signature(factory).parameters)
        takes = f"it takes {', '.join(taken)}" if taken else "it takes none"
        raise EnvironmentLoadError(f'args of "{shown}" do not fit: {error}; {takes}') from None
    what = "the constructor of" if isinstance(factory, type) else "calling"
    environment = _made(lambda: factory(**args), f'{what} "{shown}"')
    if not isinstance(environment, Environment):
        raise EnvironmentLoadError(f'"{shown}" returned a {type(environment).__name__}, not an Environment')
    return environment


class BuiltinLoader:
    """The environments that come with the project."""

    def names(self) -> list[str]:
        return sorted(BUILTIN)

    def about(self, name: str) -> str:
        return BUILTIN[name].description

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        entry = BUILTIN.get(name)
        if entry is None:
            raise EnvironmentLoadError(f'there is no built-in environment "{name}"; {nearest(name, BUILTIN)}')
        return make_environment(_resolve(entry.target, "environment"), args, name)


BUILTINS = BuiltinLoader()


def _resolve(reference: str, what: str) -> Any:
    """The object that "module:attr" names."""
    try:
        return import_attribute(reference, what=what, suggest=_is_environment)
    except ImportReferenceError as error:
        raise EnvironmentLoadError(str(error)) from error.__cause__
    # The module's own code, which may raise anything, exit() included.
    except (Exception, SystemExit) as error:
        raise EnvironmentRaisedError(f'importing {what} "{reference}"', error) from error


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment) and value is not Environment
