"""What an environment author writes: tasks, a rollout, and optionally a score for, or the doing of, the whole group.

An environment is built once per server process, on that process' main thread, with the `args` of the
configuration. It holds no model: every rollout receives one that already knows the system prompt and the
sampling parameters.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from envs.errors import NoExceptionError, stopped_by_caller
from envs.model import Model
from envs.rollout import Rollout

Task = Mapping[str, Any]
"""One problem of an environment, as the environment's own `tasks` made it."""


class Tasks(Protocol):
    """Tasks of a split, by index. Finite ones also have `__len__`; generated ones need not.

    An index must be the same task in every process. While it is looked up the global random generators are seeded;
    tasks that see to that themselves say so with `repeatable = True`.
    """

    def __getitem__(self, index: int, /) -> Task: ...


class Environment(ABC):
    """One environment. The constructor receives the config's `args` as keyword arguments."""

    @abstractmethod
    def tasks(self, split: str) -> Tasks:
        """The tasks of a split ("train" or "eval"); called once per split and kept."""

    @abstractmethod
    async def rollout(self, task: Task, model: Model) -> Rollout:
        """One attempt at a task. An exception is a failed rollout, never a reward of zero."""

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        """Rewards of a whole group, in order. Overriding this is what makes an environment group-scored."""
        return [rollout.reward for rollout in rollouts]

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        """`count` attempts at a task, side by side; the first that fails stops the others.

        An environment that does its groups by itself overrides this, and is asked for whole groups only. Each
        attempt gets a model of its own, `model.sibling()`, whose `rollout` hands it in.
        """
        running = asyncio.current_task()
        name = running.get_name() if running is not None else "request"
        async with asyncio.TaskGroup() as members:
            attempts = [
                members.create_task(self._attempt(task, model.sibling()), name=f"{name} #{member}")
                for member in range(count)
            ]
        return [attempt.result() for attempt in attempts]

    def identity(self, task: Task) -> object:
        """What makes a task this problem and no other; the rollouts of a group must agree on it.

        The whole task, unless parts of it differ from process to process and mean nothing.
        """
        return task

    @property
    def group_scored(self) -> bool:
        """Whether whole groups are needed; an environment that only learns it when loaded overrides this."""
        kind = type(self)
        return (
            kind.score_group is not Environment.score_group
            or kind.rollout_group is not Environment.rollout_group
        )

    @property
    def capacity(self) -> int | None:
        """Rollouts that it can run at once, asked when `setup` has returned; None leaves it to the configuration."""
        return None

    async def setup(self) -> None:  # noqa: B027  most environments have nothing to load
        """Load what rollouts need; the server is ready only afterwards."""

    async def close(self) -> None:  # noqa: B027  nor to give back
        """Give back what `setup` took."""

    async def _attempt(self, task: Task, model: Model) -> Rollout:
        try:
            return await self.rollout(task, model)
        except Exception:
            raise
        # In a task of its own, as a group's members are, a SystemExit would end the event loop.
        except BaseException as error:
            if stopped_by_caller(error):
                raise
            raise NoExceptionError from error


def is_group_scored(environment: Environment) -> bool:
    """Whether rewards of this environment need the whole group."""
    return environment.group_scored
