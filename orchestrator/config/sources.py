"""Where settings come from: a file, environment variables, the command line; and which of these said what.

The command line wins over variables (`ORCHESTRATOR__BATCH__SIZE=64`), which win over the file. What a variable or a flag
set is noted by its TOML path, so that a problem can name what has to be mended. Values stay as they were given:
nothing is validated here.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource

from envs.importing import nearest
from orchestrator.config.shapes import Problem
from orchestrator.errors import ConfigError

ENV_PREFIX = "ORCHESTRATOR__"


class Sources:
    """What a file said, with the rest laid over it; `problems` are those of reading the rest."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.problems: list[Problem] = []
        self._origins: dict[str, str] = {}

    def add_environment(self, settings: type[BaseSettings]) -> None:
        """What ORCHESTRATOR__* variables set; pydantic-settings would silently ignore unknown ones."""
        names = [name for name in os.environ if name.upper().startswith(ENV_PREFIX)]
        # A variable for a single setting wins over one that holds its whole table.
        for name in sorted(names, key=lambda name: (name.count("__"), name)):
            section = name[len(ENV_PREFIX) :].split("__")[0].lower()
            if section not in settings.model_fields:
                hint = nearest(section, settings.model_fields)
                self.problems.append((name, f'no such setting "{section}"; {hint}'))
                continue
            source = EnvSettingsSource(settings)
            source.env_vars = {name.lower(): os.environ[name]}
            try:
                found = source()
            except RecursionError:
                self.problems.append((name, "tables and lists are nested too deep"))
            except (ValueError, TypeError, AttributeError) as error:
                # Whatever values of a wrong shape lead to inside it.
                why = error.__cause__ or error
                self.problems.append((name, f"{section} is a table, given as JSON: {why}"))
            else:
                _merge(self.data, found)
                self._origins.update(dict.fromkeys(_leaves(found), name))

    def add_overrides(self, words: Sequence[str]) -> None:
        """`--batch.size 64` or `--batch.size=64`; list items by index or by env name (`--train.env.math.ratio 0.5`)."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            key, equals, text = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                self.problems.append((word, "expected an override such as --batch.size 64"))
                continue
            if not equals:
                if not rest:
                    self.problems.append((word, "has no value"))
                    return
                text = rest.pop(0)
            try:
                self._origins[_set(self.data, key.split("."), _value(text))] = f"--{key}"
            except LookupError as error:
                self._origins[key] = f"--{key}"
                self.problems.append((key, str(error.args[0])))

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """What a program gave, by dotted name."""
        for key, value in settings.items():
            try:
                _set(self.data, key.split("."), value)
            except LookupError as error:
                self.problems.append((key, str(error.args[0])))

    def origin(self, path: str) -> str | None:
        """The variable or flag that a value at a TOML path, or the table around it, came from; None for the file."""
        found = [
            (len(where), source)
            for where, source in self._origins.items()
            if path == where or path.startswith((f"{where}.", f"{where}["))
        ]
        return max(found)[1] if found else None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; ConfigError if it is not one."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: tables and lists are nested too deep") from None
    except ValueError as error:  # a syntax error, or a number with more digits than Python reads
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all that is not a table with something in it."""
    for key, inner in value.items():
        where = f"{path}.{key}" if path else key
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, where)
        else:
            yield where


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(target: Any, keys: list[str], value: Any) -> str:
    """Set a value in nested tables, and return its TOML path."""
    *above, last = keys
    path = ""
    for key in above:
        if isinstance(target, list):
            position = _position(target, key)
            target, path = target[position], f"{path}[{position}]"
        else:
            name = key.replace("-", "_")
            target, path = _inside(target).setdefault(name, {}), f"{path}.{name}"
    name = last.replace("-", "_")
    _inside(target)[name] = value
    return f"{path}.{name}".removeprefix(".")


def _inside(target: Any) -> dict[str, Any]:
    if not isinstance(target, dict):
        raise LookupError("cannot be set: it is not inside a table")
    return target


def _position(items: list[Any], key: str) -> int:
    names = []
    for position, item in enumerate(items):
        name = (item.get("name") or item.get("id")) if isinstance(item, dict) else None
        if key in (str(position), name):
            return position
        names += [name] if isinstance(name, str) else []
    raise LookupError(f'there is no item "{key}"; {nearest(key, names)}')
