"""What a server says about its environment to `check --deep`: whether its args fit, and what its first tasks are like.

Written to a file before the server is ready, by the process that a run would start too. Tasks are told by digests, so
that two splits can be compared without sending them.
"""

import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, Union

import msgspec

from envs.digests import digest_of
from envs.environment import Task
from envs.errors import EnvironmentRaisedError
from envs.loader import find_factory
from envs.server_spec import ServerSpec

FIRST_TASKS = 8
_PLAIN = {str, int, float, bool, type(None), Any, list, dict, tuple, Mapping, Sequence, Union, UnionType}


class Surveyed(Protocol):
    """What is asked of a loaded environment."""

    def tasks_in(self, split: str) -> int | None: ...

    def task(self, split: str, index: int) -> Task: ...


class SplitReport(msgspec.Struct, frozen=True):
    """The number of tasks, None when unbounded, the digests of the first ones, and what is wrong with them."""

    count: int | None
    digests: list[int]
    problems: list[str]


class EnvReport(msgspec.Struct, frozen=True):
    """What a server found out about its environment."""

    args: list[str]
    """What does not fit the types that its constructor declares."""
    splits: dict[str, SplitReport]


def write_report(spec: ServerSpec, environment: Surveyed) -> None:
    """Look at the environment and write down what it is like; EnvironmentRaisedError if its tasks cannot be made."""
    factory = find_factory(spec.id)
    report = EnvReport(
        args=unfit_args(factory, spec.args) if factory is not None else [],
        splits={split: _raising(spec.id, environment, split) for split in spec.splits},
    )
    Path(spec.report).write_bytes(msgspec.json.encode(report))


def read_report(path: Path) -> EnvReport | None:
    """What a server wrote, None if it wrote nothing: it runs elsewhere."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EnvReport)
    except FileNotFoundError:
        return None


def unfit_args(factory: Callable[..., Any], args: Mapping[str, Any]) -> list[str]:
    """Args whose values are not of the declared types, one line each; types that say nothing to JSON are let through."""
    try:
        hints = typing.get_type_hints(getattr(factory, "__init__") if isinstance(factory, type) else factory)  # noqa: B009  mypy
    except Exception:  # noqa: BLE001  annotations are somebody else's code, and only a help here
        return []
    found = []
    for name, value in args.items():
        hint = hints.get(name)
        if not _is_plain(hint):
            continue
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            declared = hint.__name__ if type(hint) is type else str(hint)
            found.append(f"{name} = {value!r} is not what its constructor declares, {declared}")
    return found


def _is_plain(hint: Any) -> bool:
    """Whether a type is made of what TOML and JSON can express."""
    if typing.get_origin(hint) is typing.Literal:
        return True
    inner = [part for part in typing.get_args(hint) if part is not ...]
    outer = typing.get_origin(hint) or hint
    return outer in _PLAIN and all(map(_is_plain, inner))


def _raising(shown: str, environment: Surveyed, split: str) -> SplitReport:
    try:
        return _survey(environment, split)
    # The environment's own code, which may raise anything.
    except Exception as error:
        raise EnvironmentRaisedError(f'tasks("{split}") of "{shown}"', error) from error


def _survey(environment: Surveyed, split: str) -> SplitReport:
    count = environment.tasks_in(split)
    number = FIRST_TASKS if count is None else min(count, FIRST_TASKS)
    tasks = [environment.task(split, index) for index in range(number)]
    problems = [
        f"task {index} is a {type(task).__name__}, not a mapping"
        for index, task in enumerate(tasks)
        if not isinstance(task, Mapping)
    ]
    if count == 0:
        problems.append("there are no tasks")
    return SplitReport(count, [digest_of(task) for task in tasks], problems)
