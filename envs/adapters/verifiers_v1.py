"""Environments of verifiers v1 (tasksets, harnesses, episodes; release 0.4).

`args` is the library's own `[env]` table; roles for which neither it nor the author chose otherwise run in
the local subprocess runtime, never in a paid remote one. The library runs harnesses, tools and scores; model
calls of the roles that play the policy are answered by a `Model`, one per trace, so that token ids and
log-probabilities are recorded as in native environments and only trainable roles are handed in, each with its own reward.
An episode that is not ok is a failed rollout that keeps the error's type as its kind.
Imported only where the library is installed.
"""

import asyncio
import itertools
import os
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import structlog
import verifiers.v1 as vf  # type: ignore[import-not-found]  # only in a virtualenv of its own
from verifiers.v1.runtimes import runtime_is_local  # type: ignore[import-not-found]  # as above

from envs.adapters.verifiers_v1_seats import (
    PolicyInterception,
    RolloutSeats,
    client_config,
    current_rollout,
)
from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError, RolloutFailure
from envs.model import Model
from envs.rollout import Rollout
from envs.seeding import seeded

log = structlog.get_logger()

_RETRYABLE = frozenset({"SandboxError", "InterceptionError", "TunnelError"})
_INDEX_AWAY = "failed to prepare uv script"
"""What the library says where `uv` could not get what a program of it needs, from an index that may be back soon."""
_ENDLESS_TASKS = 10_000


class TasksetTasks:
    """The tasks of a taskset, read as far as they are asked for."""

    repeatable = True

    def __init__(self, taskset: Any, count: int | None) -> None:
        self._tasks: list[Any] = []
        self._rest: Iterator[Any] = iter(taskset)
        self._count = count
        self._lock = threading.Lock()
        if count is None:
            self._tasks.extend(self._rest)

    def __len__(self) -> int:
        return len(self._tasks) if self._count is None else self._count

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(index)
        with self._lock:
            for number in range(len(self._tasks), index + 1):
                # One by one, so that a task does not depend on which ones were asked for before it.
                with seeded(number):
                    self._tasks.extend(itertools.islice(self._rest, 1))
        return {"task": self._tasks[index]}


class TasksetEnvironment(Environment):
    """One environment of verifiers v1: a taskset, or `<environment>+<taskset>`.

    `args` is the library's `[env]` table (`taskset`, `agent` or the environment's roles, `timeout`, …).
    `tasks` says how many tasks an endless taskset counts as.
    """

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name = name
        table = dict(args)
        self._endless_tasks = int(table.pop("tasks", _ENDLESS_TASKS))
        _find_uv()
        try:
            self._config = _env_config(name, table)
            self._env = vf.load_environment(self._config)
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            raise EnvironmentLoadError(f"verifiers::{name}: {_one_line(error)}") from error
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def setup(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # One task enters and leaves what the library serves, as its cancel scopes demand; `close` ends it.
        self._serving = asyncio.create_task(self._serve(ready), name="verifiers-serving")  # noqa: TID251  see above
        await ready

    async def close(self) -> None:
        self._stop.set()
        if self._serving is not None:
            await self._serving

    def tasks(self, split: str) -> Tasks:
        taskset = self._env.taskset
        if split != "train":
            if "split" in type(taskset.config).model_fields:
                taskset = type(taskset)(taskset.config.model_copy(update={"split": split}))
            elif split == "eval":
                log.warning(
                    "taskset.has_no_splits", env=self.name, effect="eval uses the same tasks as train"
                )
            else:
                raise EnvironmentLoadError(f'verifiers::{self.name}: its taskset has no split "{split}"')
        return TasksetTasks(taskset, None if taskset.bounded else self._endless_tasks)

    def identity(self, task: Task) -> object:
        return getattr(task["task"], "data", task["task"])

    async def rollout(self, task: Task, model: Model) -> Rollout:
        seats = RolloutSeats(model)
        token = current_rollout.set(seats)
        try:
            context = vf.ModelContext(model=model.name, client=client_config(model))
            episode = await self._env.run_episode(task["task"], context)
        finally:
            current_rollout.reset(token)
        if not episode.ok:
            raise _failure(episode, seats)
        return self._handed_in(episode, seats)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            serving: AbstractAsyncContextManager[None] = self._env.serving()
            async with serving:
                # The library offers no other place to bring a client of one's own.
                self._env._interception = PolicyInterception(self._env._interception)
                if not ready.done():  # nobody waits any more when the server was stopped while it loaded
                    ready.set_result(None)
                await self._stop.wait()
        # Whatever the library raises while starting belongs to whoever waits in `setup`.
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def _handed_in(self, episode: Any, rollout: RolloutSeats) -> Rollout:
        """The trainable traces as one rollout, whose reward is their mean; with several, each is a seat of its own."""
        traces = [trace for trace in episode.traces if trace.agent.trainable and trace.id in rollout.seats]
        if not traces:
            raise RolloutFailure(
                "no_model_call",
                f"verifiers::{self.name}: no trainable role asked the policy (stop conditions: "
                f"{[trace.stop_condition for trace in episode.traces]})",
                retryable=False,
            )
        for trace in traces:
            _check_scored(trace)
        parts = [rollout.seats[trace.id].model.rollout(trace.reward) for trace in traces]
        seats = _seat_names(traces) if len(traces) > 1 else [""]
        for part, seat in zip(parts, seats, strict=True):
            for sequence in part.sequences:
                sequence.seat, sequence.reward = seat, part.reward
        last = traces[-1]
        return Rollout(
            sequences=[sequence for part in parts for sequence in part.sequences],
            reward=sum(part.reward for part in parts) / len(parts),
            metrics=_metrics(traces),
            messages=[
                {**message, "seat": seat} if seat else message
                for part, seat in zip(parts, seats, strict=True)
                for message in part.messages
            ],
            stop_reason=last.stop_condition or parts[-1].stop_reason,
            truncated=any(trace.is_truncated for trace in traces),
            timings={
                "total": rollout.model.rollout(0.0).timings["total"],
                "inference": sum(part.timings["inference"] for part in parts),
            },
        )


def _seat_names(traces: list[Any]) -> list[str]:
    """The role of each trace; a role that is played several times counts them: "solver", "solver#2", …"""
    played: Counter[str] = Counter()
    names = []
    for trace in traces:
        role = str(trace.agent.name)
        played[role] += 1
        names.append(role if played[role] == 1 else f"{role}#{played[role]}")
    return names


def _env_config(name: str, table: Mapping[str, Any]) -> Any:
    """The library's config of an environment, with local runtimes where nobody chose one."""
    paired, _, taskset = name.rpartition("+")
    config_class = vf.env_config_type(taskset, paired)
    data = {**table, "taskset": {**table.get("taskset", {}), "id": taskset}}
    if paired:
        data["id"] = paired
    for role, declared in config_class.model_fields.items():
        if not isinstance(declared.default, vf.AgentConfig):
            continue
        given = dict(data.get(role) or {})
        if "runtime" not in given and not runtime_is_local(declared.default.runtime):
            given["runtime"] = {"type": "subprocess"}
        data[role] = given
    return vf.resolve_env_config(data)


def _find_uv() -> None:
    """Let the library's local programs find the `uv` of this virtualenv; they would download one otherwise."""
    beside = Path(sys.executable).parent
    if shutil.which("uv") is None and (beside / "uv").exists():
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"


def _failure(episode: Any, rollout: RolloutSeats) -> RolloutFailure:
    """Why an episode is not ok: what the model raised comes back as it was, anything else keeps its type."""
    for trace in episode.traces:
        seat = rollout.seats.get(trace.id)
        if not trace.ok and seat is not None and seat.failure is not None:
            return seat.failure
    errors = [error for trace in episode.traces if not trace.ok for error in trace.errors] + list(
        episode.errors
    )
    if not errors:
        return RolloutFailure("error", "the episode is not ok and names no error", retryable=False)
    error = errors[0]
    if error.type == "TimeoutError":
        return RolloutFailure("timed_out", error.message, retryable=True)
    status = error.status_code or 0
    return RolloutFailure(
        _snake_case(error.type),
        f"{error.type}: {error.message}",
        retryable=error.type in _RETRYABLE
        or _INDEX_AWAY in error.message
        or (error.type == "ProviderError" and (status == 429 or status >= 500)),
    )


def _check_scored(trace: Any) -> None:
    """A reward that was never given, because scoring ran out of time, is not a zero."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        timed_out = trace.is_timeout
        raise RolloutFailure(
            "timed_out" if timed_out else "reward_error",
            f"reward {', '.join(missing)} was never given (stop condition: {trace.stop_condition})",
            retryable=timed_out,
        )


def _metrics(traces: list[Any]) -> dict[str, float]:
    """Metrics and the parts of the reward by name; with several roles, by role and name."""
    roles = {trace.agent.name for trace in traces}
    metrics: dict[str, float] = {}
    for trace in traces:
        prefix = f"{trace.agent.name}." if len(roles) > 1 else ""
        values = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        values |= {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"{prefix}{name}": float(value) for name, value in values.items()}
        metrics[f"{prefix}num_turns"] = float(trace.num_turns)
    return metrics


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
