"""Answers requests: looks the task up, gives the environment a model, checks what comes back.

Foreign code runs here and nowhere else in the server, and this is the one place where whatever it raises
becomes a `Failure`: an exception of any kind (also exit() and a cancellation of its own), a NaN reward, arrays
that do not fit, the wrong type, a result too large to be sent. A request gets exactly one answer, as frames ready
to be sent. Cancellation by the caller passes through.
A group's rollouts run side by side and are scored together; the first that fails fails the group and
stops the others.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from envs import wire
from envs.environment import Environment, Task, Tasks, is_group_scored
from envs.errors import EnvironmentLoadError, EnvironmentRaisedError, RolloutFailure
from envs.model import ChatClient, Model, ModelSettings
from envs.places import find_place, package_of, place_of, readable_traceback
from envs.places import text_of as _text
from envs.rollout import InvalidRolloutError, Rollout, fits_float32

log = structlog.get_logger()

T = TypeVar("T")

_DETAIL_CHARS = 8000
_MESSAGE_CHARS = 2000
_WHERE_CHARS = 300
_LOGGED_IN_FULL = 20
_LOGGED_EVERY = 100


class _NoException(Exception):  # noqa: N818  its cause is the error
    """Stands for what an environment raised that is no Exception: SystemExit, KeyboardInterrupt, …"""


class Responder:
    """Answers the requests for one environment with one HTTP client."""

    def __init__(
        self, environment: Environment, *, client: ChatClient, env: str, log_failures: bool = True
    ) -> None:
        self._environment = environment
        self._client = client
        self._env = env
        self._splits: dict[str, Tasks] = {}
        self._failures: Counter[str] = Counter()
        self._log_failures = log_failures
        self._package = package_of(environment)
        self._rollout = place_of(environment.rollout)
        self.group_scored = is_group_scored(environment)

    async def prepare(self, splits: Iterable[str]) -> dict[str, int | None]:
        """Set the environment up and count the tasks of each split; EnvironmentLoadError says what of it failed."""
        step = "setup"
        try:
            await self._environment.setup()
            step = "tasks"
            return {split: self.tasks_in(split) for split in splits}
        except EnvironmentLoadError:
            raise
        # The environment's own code, which may raise anything, exit() included.
        except BaseException as error:
            if _by_caller(error):
                raise
            raise EnvironmentRaisedError(f'{step} of "{self._env}"', error, self._package) from error

    def tasks_in(self, split: str) -> int | None:
        """Number of tasks in a split, None when unbounded; whatever the environment raises passes through."""
        return _length(self._tasks(split))

    def task(self, split: str, index: int) -> Task:
        """One task; whatever the environment raises passes through."""
        return self._tasks(split)[index]

    async def answer(self, request: wire.Request, settings: ModelSettings) -> list[bytes]:
        """Do what is asked and return the message that answers it."""
        frames = await self._ended(
            request, settings, lambda rollouts: wire.encode_result(request.id, rollouts)
        )
        return [wire.encode(frames)] if isinstance(frames, wire.Failure) else frames

    async def rollouts(self, request: wire.Request, settings: ModelSettings) -> list[Rollout] | wire.Failure:
        """The same for a caller in this process: the rollouts themselves, or how the request failed."""
        return await self._ended(request, settings, lambda rollouts: rollouts)

    async def _ended(
        self, request: wire.Request, settings: ModelSettings, finish: Callable[[list[Rollout]], T]
    ) -> T | wire.Failure:
        try:
            async with asyncio.timeout(request.timeout_s or None) as deadline:
                rollouts = await self._rollouts(request, settings)
            return finish(rollouts)
        # Anything an environment raises is the rollout's outcome; the server and its other requests go on.
        except BaseException as error:
            if _by_caller(error):
                raise
            failure = _failure(
                request,
                error,
                timed_out=isinstance(error, TimeoutError) and deadline.expired(),
                package=self._package,
                rollout=self._rollout,
            )
            if self._log_failures:
                self._log(request, failure)
            return failure

    async def _rollouts(self, request: wire.Request, settings: ModelSettings) -> list[Rollout]:
        if self.group_scored and request.kind != "group":
            raise RolloutFailure(
                "not_a_group", "the environment scores whole groups; run a group", retryable=False
            )
        task = self._task(request)
        if request.kind == "rollout":
            return [await self._attempt(request, settings, task)]
        async with asyncio.TaskGroup() as members:
            name = _running_name()
            attempts = [
                members.create_task(self._attempt(request, settings, task), name=f"{name} #{member}")
                for member in range(request.count)
            ]
        rollouts = [attempt.result() for attempt in attempts]
        rewards = await self._environment.score_group(task, rollouts)
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(rollouts):
            shown = (
                f"{len(rewards)} rewards" if isinstance(rewards, (list, tuple)) else type(rewards).__name__
            )
            raise InvalidRolloutError(f"score_group must return {len(rollouts)} rewards, got {shown}")
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = _finite(reward, "reward")
        return rollouts

    async def _attempt(self, request: wire.Request, settings: ModelSettings, task: Task) -> Rollout:
        model = Model(
            settings,
            client=self._client,
            base_url=request.base_url,
            session=request.session,
            cache_salt=request.cache_salt,
        )
        try:
            rollout = await self._environment.rollout(task, model)
            return _checked(rollout, train=settings.train)
        except Exception:
            raise
        # In a task of its own, as a group's members are, a SystemExit would end the event loop.
        except BaseException as error:
            if _by_caller(error):
                raise
            raise _NoException from error

    def _tasks(self, split: str) -> Tasks:
        tasks = self._splits.get(split)
        if tasks is None:
            tasks = self._environment.tasks(split)
            if not hasattr(tasks, "__getitem__"):
                raise EnvironmentLoadError(
                    f'"{self._env}": tasks("{split}") ({place_of(self._environment.tasks)}) returned '
                    f"a {type(tasks).__name__}; return a list of tasks, or anything that has them by index"
                )
            self._splits[split] = tasks
        return tasks

    def _task(self, request: wire.Request) -> Task:
        tasks = self._tasks(request.split)
        count = _length(tasks)
        if count is not None and request.index >= count:
            raise RolloutFailure(
                "no_such_task",
                f'split "{request.split}" has {count} tasks, asked for {request.index}',
                retryable=False,
            )
        return tasks[request.index]

    def _log(self, request: wire.Request, failure: wire.Failure) -> None:
        """Say how a request failed; a kind that keeps happening is thinned out so that it cannot fill the disk."""
        self._failures[failure.kind] += 1
        seen = self._failures[failure.kind]
        if seen > _LOGGED_IN_FULL and seen % _LOGGED_EVERY:
            return
        log.warning(
            "rollout.failed",
            kind=failure.kind,
            task=f"{self._env}/{request.split}/{request.index}",
            message=failure.message,
            where=failure.where or None,
            retryable=failure.retryable,
            seen=seen,
            traceback=failure.detail,
        )


def _failure(
    request: wire.Request, error: BaseException, *, timed_out: bool, package: str, rollout: str
) -> wire.Failure:
    """What an exception means for the request; `package` is the environment's own code, `rollout` where that begins."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, _NoException) and error.__cause__ is not None:
        error = error.__cause__
    kind, retryable, detail = "error", isinstance(error, OSError), readable_traceback(error, package)
    message, where = f"{type(error).__name__}: {_text(error)}", find_place(error, package)
    if isinstance(error, asyncio.CancelledError):
        retryable, message, detail = True, "the environment cancelled its own rollout", ""
    if timed_out:
        kind, retryable, detail, where = "timed_out", True, "", ""
        message = f"not done in {request.timeout_s:g} s"
    elif isinstance(error, RolloutFailure):
        kind, retryable, message, detail = error.kind, bool(error.retryable), _text(error.message), ""
        where = ""
    elif isinstance(error, InvalidRolloutError):
        # What it returned was found wrong only after its own code had ended.
        kind, message, where = "invalid_rollout", str(error), where or rollout
    return wire.Failure(
        request.id,
        _text(kind)[:100],
        message[:_MESSAGE_CHARS],
        retryable,
        _text(detail[-_DETAIL_CHARS:]),
        where=_text(where[-_WHERE_CHARS:]),
    )


def _by_caller(error: BaseException) -> bool:
    """Whether it is the cancellation that the server itself asked for."""
    current = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling() > 0


def _checked(rollout: object, *, train: bool) -> Rollout:
    """What an environment returned, if it is a rollout that can be sent and trained on."""
    if not isinstance(rollout, Rollout):
        raise InvalidRolloutError(f"rollout must return a Rollout, got {type(rollout).__name__}")
    rollout.reward = _finite(rollout.reward, "reward")
    for what, numbers_by_name in (("metric", rollout.metrics), ("timing", rollout.timings)):
        if not isinstance(numbers_by_name, dict):
            raise InvalidRolloutError(f"{what}s must be a dict, got {type(numbers_by_name).__name__}")
        for name, value in numbers_by_name.items():
            if not isinstance(name, str):
                raise InvalidRolloutError(f"the name of a {what} must be text, got {name!r}")
            numbers_by_name[name] = _finite(value, f'{what} "{name}"')
    if not isinstance(rollout.stop_reason, str):
        raise InvalidRolloutError(f"stop_reason must be text, got {rollout.stop_reason!r}")
    # Evaluations ask for no token ids, so they carry no sequences.
    if train or rollout.sequences:
        rollout.check()
    return rollout


def _finite(value: object, what: str) -> float:
    """A number of any library as a float; NaN, infinity, what a float32 cannot hold and everything else is an invalid rollout."""
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if fits_float32(number):
            return number
    raise InvalidRolloutError(f"{what} must be a finite number, got {value!r}"[:_MESSAGE_CHARS])


def _length(tasks: Tasks) -> int | None:
    """Number of tasks, None when there is no end to them."""
    try:
        return len(tasks)  # type: ignore[arg-type]  # generated tasks need not have a length
    except TypeError:
        return None


def _running_name() -> str:
    current = asyncio.current_task()
    return current.get_name() if current is not None else "request"
