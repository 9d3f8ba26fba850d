"""Environments of verifiers: `verifiers::<environment>[@split]`, whichever generation the interpreter has.

Releases up to 0.3 are the classic one (`load_environment`), 0.4 is the v1 one (tasksets, episodes); they
cannot share a virtualenv. This module looks at what is installed and at the environment itself, imports only
the adapter that fits, and says what to install when none does.
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

from envs.environment import Environment
from envs.errors import EnvironmentLoadError

INSTALL = "pip install 'rollout-orchestrator[verifiers]'"
INSTALL_CLASSIC = "pip install 'rollout-orchestrator[verifiers-legacy]'"

Generation = Literal["classic", "v1"]

_CLASSIC_SINCE = (0, 1, 14)
_V1_SINCE = (0, 4)
_TASKSETS = "verifiers.v1.tasksets"


class VerifiersLoader:
    """What the installed generation of the library can load."""

    def names(self) -> list[str]:
        """Tasksets that the library ships and installed packages that build on it."""
        version = installed_version()
        found = {
            module
            for distribution in importlib.metadata.distributions()
            if _requires_verifiers(distribution)
            for module in _modules(distribution)
        }
        if version >= _V1_SINCE:
            package = importlib.import_module(_TASKSETS)
            found |= {info.name for info in pkgutil.iter_modules(package.__path__)}
        return sorted(found)

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        version = installed_version()
        module = _import(name, builtin=version >= _V1_SINCE)
        if generation_of(module, name, version) == "classic":
            classic = importlib.import_module("envs.adapters.verifiers_classic")
            made: Environment = classic.ClassicEnvironment(name, args)
        else:
            v1 = importlib.import_module("envs.adapters.verifiers_v1")
            made = v1.TasksetEnvironment(name, args)
        return made


LOADER = VerifiersLoader()


def generation_of(module: ModuleType, name: str, version: tuple[int, ...]) -> Generation:
    """Which adapter an environment's module needs; an error where this interpreter has the other generation."""
    shown = ".".join(map(str, version))
    is_classic = callable(getattr(module, "load_environment", None))
    if version >= _V1_SINCE:
        if is_classic and not getattr(module, "__all__", None):
            raise EnvironmentLoadError(
                f"verifiers::{name} is a classic environment, and this interpreter has verifiers {shown}; "
                f"{INSTALL_CLASSIC} in a virtualenv of its own and set `python` to it"
            )
        return "v1"
    if not is_classic:
        raise EnvironmentLoadError(
            f"verifiers::{name} has no load_environment; if it is a v1 taskset, {INSTALL} in a virtualenv of "
            f"its own and set `python` to it (this interpreter has verifiers {shown})"
        )
    if version < _CLASSIC_SINCE:
        wanted = ".".join(map(str, _CLASSIC_SINCE))
        raise EnvironmentLoadError(f"verifiers {shown} is too old; {INSTALL_CLASSIC} ({wanted} or later)")
    return "classic"


def installed_version() -> tuple[int, ...]:
    """The release that this interpreter has, as numbers."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLoadError(
            f"verifiers is not installed for this interpreter; {INSTALL} (0.4), or {INSTALL_CLASSIC} (classic), "
            "or set `python` to an interpreter that has it"
        ) from None
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _import(name: str, *, builtin: bool) -> ModuleType:
    """The environment's module, found as the library finds it: the last part of the id, with underscores."""
    module = name.rpartition("+")[2].rsplit("/", 1)[-1].replace("-", "_")
    if builtin and importlib.util.find_spec(f"{_TASKSETS}.{module.lower()}") is not None:
        return importlib.import_module(f"{_TASKSETS}.{module.lower()}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise EnvironmentLoadError(
                f'verifiers::{name} needs "{error.name}", which is not installed for this interpreter'
            ) from error
        raise EnvironmentLoadError(
            f'verifiers::{name}: there is no module "{module}"; install the environment\'s package '
            "into the interpreter that serves it"
        ) from None


def _requires_verifiers(distribution: importlib.metadata.Distribution) -> bool:
    return any(re.match(r"verifiers\b(?!-)", requirement) for requirement in distribution.requires or ())


def _modules(distribution: importlib.metadata.Distribution) -> set[str]:
    """Top-level modules of an installed distribution."""
    tops = {file.parts[0].removesuffix(".py") for file in distribution.files or () if file.suffix == ".py"}
    return {top for top in tops if top.isidentifier()}
