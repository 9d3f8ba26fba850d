"""Tasks of Inspect: `inspect::module/task`, a function that `@task` decorates, as an environment.

This module knows what is installed; the adapter is imported only then.
"""

import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from envs.environment import Environment
from envs.errors import EnvironmentLoadError
from envs.loader import make_environment

INSTALL = "pip install 'rollout-orchestrator[inspect]'"

_SINCE, _BEFORE = (0, 3, 285), (0, 4)


class InspectLoader:
    """Tasks by their place."""

    def names(self) -> list[str]:
        """What stands for any of them."""
        check_installed()
        return ["<module/task>"]

    def about(self, name: str) -> str:
        return "a task of Inspect, found from the working directory"

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        check_installed()
        module, slash, task = name.rpartition("/")
        if not slash or not module or not task:
            raise EnvironmentLoadError(
                f'inspect::{name} is not inspect::module/task, as in "inspect::my_evals/arithmetic"'
            )
        adapter = importlib.import_module("envs.adapters.inspect_environment")
        return make_environment(
            partial(adapter.InspectEnvironment, module.replace("/", "."), task), args, f"inspect::{name}"
        )


LOADER = InspectLoader()


def check_installed() -> None:
    """Raise EnvironmentLoadError unless this interpreter has what the adapter fits."""
    try:
        version = importlib.metadata.version("inspect-ai")
        importlib.metadata.version("openai")
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentLoadError(
            f"{error.name} is not installed for this interpreter; {INSTALL}, or set `python` to one that has it"
        ) from None
    refuse_other_releases(version)


def refuse_other_releases(version: str) -> None:
    """Tasks that are fed while they run are what the adapter builds on."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not _SINCE <= numbers < _BEFORE:
        raise EnvironmentLoadError(
            f"inspect-ai {version} is not supported, 0.3.285 and later of 0.3 are; {INSTALL} in a virtualenv of its own "
            "and set `python` to it"
        )
