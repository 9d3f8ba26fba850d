"""Several datasets as one environment: their tasks one after the other, each rollout done by its own dataset.

`id = ["math::gsm", "math::aime@2024"]` makes a domain one unit of the mix, whatever its datasets are. `join` rewrites
such a list, in the service, into one id that an env server can load by itself. A task says its `domain` and `dataset`
beside what the dataset itself put there; the dataset's environment gets the task as it made it. All datasets must
have an end, because positions are counted through. If one of them is scored as a group, all rollouts run as groups.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError
from envs.loader import load_environment, parse_id
from envs.model import Model
from envs.rollout import Rollout

_LOADER = "envs.adapters.concatenated:LOADER"


def join(names: Sequence[str], parts: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """One id and its args, from the ids as the user wrote them and what an env server loads in place of each."""
    described = []
    for name, (target, args) in zip(names, parts, strict=True):
        identity = parse_id(name)
        dataset = identity.name if identity.split is None else f"{identity.name}@{identity.split}"
        described.append(
            {
                "id": target,
                "args": dict(args),
                "split": identity.split,
                "domain": identity.loader or identity.name,
                "dataset": dataset,
            }
        )
    shown = "+".join(names).replace("@", "~")  # an "@" would name a split of the whole
    return f"{_LOADER}::{shown}", {"parts": described}


@dataclass(frozen=True, slots=True)
class _Part:
    """One dataset."""

    environment: Environment
    split: str | None
    domain: str
    dataset: str


class PartTask(Mapping[str, Any]):
    """A task of one of the datasets: what the dataset made, and where it comes from."""

    def __init__(self, part: _Part, task: Task) -> None:
        self.part = part
        self.task = task
        self._origin = {"domain": part.domain, "dataset": part.dataset}

    def __getitem__(self, key: str) -> Any:
        return self._origin[key] if key in self._origin else self.task[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._origin
        yield from (key for key in self.task if key not in self._origin)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ConcatenatedTasks:
    """The tasks of all datasets, in their order."""

    def __init__(self, parts: Sequence[_Part], split: str) -> None:
        self._parts = parts
        self._tasks = [part.environment.tasks(part.split or split) for part in parts]
        self._ends = list(accumulate(map(_length, parts, self._tasks)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> PartTask:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = bisect_right(self._ends, index)
        start = self._ends[at - 1] if at else 0
        return PartTask(self._parts[at], self._tasks[at][index - start])


def _length(part: _Part, tasks: Tasks) -> int:
    try:
        return len(tasks)  # type: ignore[arg-type]  # generated tasks need not have a length
    except TypeError:
        raise EnvironmentLoadError(
            f'dataset "{part.domain}::{part.dataset}" has tasks without end, so that nothing can come after it; '
            "limit it with its args, or make it an env of its own"
        ) from None


class Concatenated(Environment):
    """The datasets of a list of ids."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._parts = [
            _Part(load_environment(part["id"], part["args"]), part["split"], part["domain"], part["dataset"])
            for part in parts
        ]
        self._opened = AsyncExitStack()

    @property
    def group_scored(self) -> bool:
        return any(part.environment.group_scored for part in self._parts)

    @property
    def capacity(self) -> int | None:
        return min(
            (part.environment.capacity for part in self._parts if part.environment.capacity), default=None
        )

    def tasks(self, split: str) -> ConcatenatedTasks:
        return ConcatenatedTasks(self._parts, split)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        assert isinstance(task, PartTask)  # the tasks of `tasks`, and no others
        return await task.part.environment.rollout(task.task, model)

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        assert isinstance(task, PartTask)  # same
        return await task.part.environment.rollout_group(task.task, model, count)

    def identity(self, task: Task) -> object:
        assert isinstance(task, PartTask)  # same
        return [task.part.domain, task.part.dataset, task.part.environment.identity(task.task)]

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        assert isinstance(task, PartTask)  # same
        return await task.part.environment.score_group(task.task, rollouts)

    async def setup(self) -> None:
        for part in self._parts:
            self._opened.push_async_callback(part.environment.close)
            await part.environment.setup()

    async def close(self) -> None:
        await self._opened.aclose()


class ConcatenatingLoader:
    """Loads what `join` made; the lists live in configurations, so there are no names to list."""

    def names(self) -> list[str]:
        return []

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        return Concatenated(args["parts"])


LOADER = ConcatenatingLoader()
