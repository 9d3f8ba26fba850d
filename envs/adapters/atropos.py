"""Environments of Atropos: `atropos::module:Class`, a `BaseEnv` as it is, without its API server and its workers.

This module knows what is installed and finds the class; the adapter is imported only then.
"""

import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

from envs.environment import Environment
from envs.errors import EnvironmentLoadError
from envs.importing import ImportReferenceError, import_attribute

INSTALL = "pip install 'rollout-orchestrator[atropos]'"

_SINCE, _BEFORE = (0, 4), (0, 5)


class AtroposLoader:
    """Classes by their place; Atropos keeps no list of them."""

    def names(self) -> list[str]:
        """What stands for any of them."""
        check_versions()
        return ["<module:Class>"]

    def about(self, name: str) -> str:
        return "a BaseEnv of Atropos, found from the working directory"

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        check_versions()
        adapter = importlib.import_module("envs.adapters.atropos_environment")
        try:
            found = import_attribute(name, what="Atropos environment", suggest=adapter.is_environment)
        except ImportReferenceError as error:
            raise EnvironmentLoadError(str(error)) from error.__cause__
        made: Environment = adapter.AtroposEnvironment(name, found, args)
        return made


LOADER = AtroposLoader()


def check_versions() -> None:
    """Raise EnvironmentLoadError unless this interpreter has what the adapter fits."""
    try:
        library, tokenisers = (importlib.metadata.version(name) for name in ("atroposlib", "transformers"))
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLoadError(
            f"atroposlib is not installed for this interpreter; {INSTALL}, or set `python` to one that has it"
        ) from None
    refuse_other_releases(library, tokenisers)


def refuse_other_releases(library: str, tokenisers: str) -> None:
    """Of the library, and of transformers: since its release 5 the library's own tokenising is broken."""
    remedy = f"{INSTALL} in a virtualenv of its own and set `python` to it"
    if not _SINCE <= _numbers(library) < _BEFORE:
        raise EnvironmentLoadError(f"atroposlib {library} is not supported, 0.4 is; {remedy}")
    if _numbers(tokenisers) >= (5,):
        raise EnvironmentLoadError(
            f"atroposlib {library} does not work with transformers {tokenisers}; {remedy}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
