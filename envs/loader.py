"""From an environment's id to the environment.

An id is `<loader>::<environment>[@split]`, "module:Class" of an `Environment` (a function that returns one
does as well), or the plain name of a built-in. Loaders are a table of names to "module:attr"; each is
imported only when an id asks for it, so that what an adapter depends on stays out of every other process.
Every mistake is an `EnvironmentLoadError` of one line that names the nearest valid names; an exception
inside an environment's own constructor passes through with its traceback.
"""

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from envs.builtin import BUILTIN
from envs.environment import Environment
from envs.errors import EnvironmentLoadError


class Loader(Protocol):
    """A family of environments. It may also have `about(name)`, one line for lists."""

    def names(self) -> Sequence[str]:
        """The environments there are, or EnvironmentLoadError that says how to install them."""

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        """One of them, made with `args`. Raises EnvironmentLoadError for a name it does not have."""


LOADERS: Mapping[str, str] = {
    "builtin": "envs.loader:BUILTINS",
    "reasoning_gym": "envs.adapters.reasoning_gym:LOADER",
    "verifiers": "envs.adapters.verifiers:LOADER",
}
"""Loaders by name; a loader that is not here can be given in the id as "module:attr::environment"."""


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
        return make_environment(_resolve(identity.name, "environment"), args or {}, text)
    return find_loader(identity.loader, loaders=loaders).load(identity.name, args or {})


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
    environment = factory(**args)
    if not isinstance(environment, Environment):
        raise EnvironmentLoadError(f'"{shown}" returned a {type(environment).__name__}, not an Environment')
    return environment


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the closest ones, else all."""
    there = sorted(known)
    close = difflib.get_close_matches(name, there, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(f'"{match}"' for match in close) + "?"
    return f"there are: {', '.join(there)}" if there else "there are none"


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
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise EnvironmentLoadError(f'{what} "{reference}" is not module:attribute')
    module = _import(module_name, f'{what} "{reference}"')
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")] if found is module else []
            hint = nearest(part, difflib.get_close_matches(part, public, cutoff=0.5) or _environments(module))
            raise EnvironmentLoadError(f'{what} "{reference}": module {module_name} has no "{part}"; {hint}')
        found = getattr(found, part)
    return found


def _environments(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and value is not Environment
    ]


def _import(module_name: str, shown: str) -> ModuleType:
    """Import a module, also from the working directory, which a console script does not have on its path."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise EnvironmentLoadError(
                f"{shown}: there is no module {missing} for {sys.executable}; install it, or start where it is found"
            ) from None
        raise EnvironmentLoadError(
            f'{shown}: its module needs "{missing}", which is not installed for {sys.executable}'
        ) from error
