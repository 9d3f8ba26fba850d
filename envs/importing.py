"""From "module:attribute" to the object: the one importer of environments, strategies and functions that users name.

A mistake is an `ImportReferenceError` of one line: it tells a module that is not there from one whose own dependency is
not, and names the nearest attributes. What a module raises while it is imported, other than an ImportError, passes
through with its traceback.

The rule of where modules are found is here alone: in the working directory, then in the directory of the configuration
file that names them, then wherever the interpreter looks. `module_path` is that rule for the path of a child process.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.places import describe, find_place


class ImportReferenceError(ValueError):
    """A reference that leads nowhere; the message is one line for the user."""


_beside: list[Path] = []
"""Directories of the configuration files that this process has read, the newest first."""


def look_beside(directory: Path) -> None:
    """Find modules of a configuration's own directory too, from now on."""
    if directory in _beside:
        _beside.remove(directory)
    _beside.insert(0, directory)


def module_path(*beside: Path) -> list[str]:
    """Where modules are looked for first: the working directory, then the directories beside it."""
    return list(dict.fromkeys(map(str, (Path.cwd(), *beside))))


def import_attribute(reference: str, *, what: str, suggest: Callable[[object], bool] | None = None) -> Any:
    """The object that "module:attribute" names; `what` names it in messages.

    When no attribute has a similar name, the message lists those whose value `suggest` accepts.
    """
    module_name, _, attribute = reference.partition(":")
    # A leading dot is a path or a relative import, and there is nothing that it could be relative to.
    if not module_name or not attribute or module_name.startswith("."):
        raise ImportReferenceError(f'{what} "{reference}" is not module:attribute')
    module = _import(module_name, f'{what} "{reference}"')
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")] if found is module else []
            close = difflib.get_close_matches(part, public, cutoff=0.5)
            fitting = [name for name, value in vars(module).items() if suggest is not None and suggest(value)]
            raise ImportReferenceError(
                f'{what} "{reference}": module {module_name} has no "{part}"; {nearest(part, close or fitting)}'
            )
        found = getattr(found, part)
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the closest ones, else all."""
    there = sorted(known)
    close = difflib.get_close_matches(name, there, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(f'"{match}"' for match in close) + "?"
    return f"there are: {', '.join(there)}" if there else "there are none"


def _import(module_name: str, shown: str) -> ModuleType:
    """Import a module, also from places that a console script does not have on its path."""
    places = module_path(*_beside)
    sys.path[:0] = [place for place in places if place not in sys.path]
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ImportReferenceError(
                f"{shown}: there is no module {missing} for {sys.executable}, nor in {' or '.join(places)}; "
                "install it, or start where it is found"
            ) from None
        place = find_place(error)
        raise ImportReferenceError(
            f'{shown}: its module needs "{missing}", which is not installed for {sys.executable}'
            + (f" (at {place})" if place else "")
        ) from error
    except ImportError as error:
        raise ImportReferenceError(
            f"{shown}: its module cannot be imported: {describe(error).removeprefix('ImportError: ')}"
        ) from error
