"""Does runs: looks the task up, gives the environment a model, checks what comes back.

Foreign code runs here and nowhere else in the server, and this is the one place where whatever it raises
becomes a `Failure`: an exception, a NaN reward, arrays that do not fit, the wrong type. A run yields exactly
one answer, as frames ready to be sent. Cancellation by the caller passes through.
A group's rollouts run side by side and are scored together; the first that fails fails the group and
stops the others.
"""

import asyncio
import math
import traceback
from collections import Counter

import structlog

from envs import wire
from envs.environment import Environment, Task, Tasks, is_group_scored
from envs.errors import RolloutFailure
from envs.model import ChatClient, Model, ModelSettings
from envs.rollout import InvalidRolloutError, Rollout

log = structlog.get_logger()

_DETAIL_CHARS = 8000
_MESSAGE_CHARS = 2000
_LOGGED_IN_FULL = 20
_LOGGED_EVERY = 100


class Runner:
    """Executes runs of one environment with one HTTP client."""

    def __init__(self, environment: Environment, *, client: ChatClient, env: str) -> None:
        self._environment = environment
        self._client = client
        self._env = env
        self._splits: dict[str, Tasks] = {}
        self._failures: Counter[str] = Counter()
        self.group_scored = is_group_scored(environment)

    def tasks_in(self, split: str) -> int | None:
        """Number of tasks in a split, None when unbounded; whatever the environment raises passes through."""
        return _length(self._tasks(split))

    async def answer(self, run: wire.Run, settings: ModelSettings) -> list[bytes]:
        """Do a run and return the message that answers it."""
        try:
            async with asyncio.timeout(run.timeout_s or None) as deadline:
                rollouts = await self._rollouts(run, settings)
            return wire.encode_result(run.id, rollouts)
        # Anything an environment raises is the rollout's outcome; the server and its other runs go on.
        # SystemExit is among it: an exit() in a rollout must not end the server.
        except (Exception, SystemExit) as error:  # noqa: BLE001  see above
            failure = _failure(run, error, timed_out=isinstance(error, TimeoutError) and deadline.expired())
            self._log(run, failure)
            return [wire.encode(failure)]

    async def _rollouts(self, run: wire.Run, settings: ModelSettings) -> list[Rollout]:
        if self.group_scored and run.kind != "group":
            raise RolloutFailure(
                "not_a_group", "the environment scores whole groups; run a group", retryable=False
            )
        task = self._task(run)
        if run.kind == "rollout":
            return [await self._attempt(run, settings, task)]
        async with asyncio.TaskGroup() as members:
            name = _running_name()
            attempts = [
                members.create_task(self._attempt(run, settings, task), name=f"{name} #{member}")
                for member in range(run.count)
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

    async def _attempt(self, run: wire.Run, settings: ModelSettings, task: Task) -> Rollout:
        model = Model(
            settings,
            client=self._client,
            base_url=run.base_url,
            session=run.session,
            cache_salt=run.cache_salt,
        )
        try:
            rollout = await self._environment.rollout(task, model)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise RolloutFailure(
                "error", "the environment cancelled its own rollout", retryable=True
            ) from None
        return _checked(rollout, train=settings.train)

    def _tasks(self, split: str) -> Tasks:
        tasks = self._splits.get(split)
        if tasks is None:
            tasks = self._splits[split] = self._environment.tasks(split)
        return tasks

    def _task(self, run: wire.Run) -> Task:
        tasks = self._tasks(run.split)
        count = _length(tasks)
        if count is not None and run.index >= count:
            raise RolloutFailure(
                "no_such_task",
                f'split "{run.split}" has {count} tasks, asked for {run.index}',
                retryable=False,
            )
        return tasks[run.index]

    def _log(self, run: wire.Run, failure: wire.Failure) -> None:
        """Say how a run failed; a kind that keeps happening is thinned out so that it cannot fill the disk."""
        self._failures[failure.kind] += 1
        seen = self._failures[failure.kind]
        if seen > _LOGGED_IN_FULL and seen % _LOGGED_EVERY:
            return
        log.warning(
            "rollout.failed",
            kind=failure.kind,
            task=f"{self._env}/{run.split}/{run.index}",
            message=failure.message,
            retryable=failure.retryable,
            seen=seen,
            traceback=failure.detail,
        )


def _failure(run: wire.Run, error: BaseException, *, timed_out: bool) -> wire.Failure:
    """What an exception means for the run."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    kind, retryable, detail = "error", isinstance(error, OSError), "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    if timed_out:
        kind, retryable, detail = "timed_out", True, ""
        message = f"not done in {run.timeout_s:g} s"
    elif isinstance(error, RolloutFailure):
        kind, retryable, message, detail = error.kind, error.retryable, error.message, ""
    elif isinstance(error, InvalidRolloutError):
        kind, message = "invalid_rollout", str(error)
    return wire.Failure(run.id, kind[:100], message[:_MESSAGE_CHARS], retryable, detail[-_DETAIL_CHARS:])


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
    """A number of any library as a float; NaN, infinity and everything else is an invalid rollout."""
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
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
    return current.get_name() if current is not None else "run"
