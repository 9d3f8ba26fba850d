"""Answers requests: looks the task up, gives the environment a model, checks what comes back.

Foreign code runs here and nowhere else in the server, and this is the one place where whatever it raises
becomes a `Failure`: an exception of any kind (also exit() and a cancellation of its own), a NaN reward, arrays
that do not fit, the wrong type, a result too large to be sent. A request gets exactly one answer, as frames ready
to be sent. Cancellation by the caller passes through.
A group's rollouts run side by side and are scored together; the first that fails fails the group and
stops the others. While tasks are listed or looked up, the global random generators are seeded, so that an index is
the same task in every process; each result carries the task's digest, by which that is checked.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import structlog

from envs import wire
from envs.digests import digest_of
from envs.environment import Environment, Task, Tasks, is_group_scored
from envs.errors import (
    EnvironmentLoadError,
    EnvironmentRaisedError,
    NoExceptionError,
    RolloutFailure,
    stopped_by_caller,
)
from envs.model import ChatClient, Model, ModelSettings
from envs.places import find_place, package_of, place_of, readable_traceback
from envs.places import text_of as _text
from envs.rollout import InvalidRolloutError, Rollout, fits_float32
from envs.seeding import seeded

log = structlog.get_logger()

T = TypeVar("T")

_DETAIL_CHARS = 8000
_MESSAGE_CHARS = 2000
_WHERE_CHARS = 300
_LOGGED_IN_FULL = 20
_LOGGED_EVERY = 100
_NO_DEADLINE = contextlib.nullcontext()
_DIGESTS_KEPT = 1 << 16
SAMPLED = 2
"""Tasks of a split whose digests a server declares when it is ready: the first ones."""


class Responder:
    """Answers the requests for one environment with one HTTP client."""

    def __init__(
        self,
        environment: Environment,
        *,
        client: ChatClient,
        env: str,
        seed: int = 0,
        log_failures: bool = True,
    ) -> None:
        self._environment = environment
        self._client = client
        self._env = env
        self._seed = seed
        self._digests: dict[tuple[str, int], int] = {}
        self._splits: dict[str, Tasks] = {}
        self._failures: Counter[str] = Counter()
        self._log_failures = log_failures
        self._package = package_of(environment)
        self._rollout = place_of(environment.rollout)
        self.group_scored = is_group_scored(environment)
        self.capacity: int | None = None
        """Rollouts that the environment can run at once, if it has a limit of its own."""

    async def prepare(self, splits: Iterable[str]) -> dict[str, int | None]:
        """Set the environment up and count the tasks of each split; EnvironmentLoadError says what of it failed."""
        step = "setup"
        try:
            with seeded(self._seed, step):
                await self._environment.setup()
            self.capacity = self._environment.capacity
            step = "tasks"
            counts = {split: self.tasks_in(split) for split in splits}
            for split in counts:
                # Before anybody waits for them: a task may take seconds to be made.
                self.samples_of(split)
            return counts
        except EnvironmentLoadError:
            raise
        # The environment's own code, which may raise anything, exit() included.
        except BaseException as error:
            if stopped_by_caller(error):
                raise
            raise EnvironmentRaisedError(f'{step} of "{self._env}"', error, self._package) from error

    def tasks_in(self, split: str) -> int | None:
        """Number of tasks in a split, None when unbounded; whatever the environment raises passes through."""
        return _length(self._tasks(split))

    def samples_of(self, split: str, wanted: int = SAMPLED) -> dict[int, int]:
        """Digests of the first tasks of a split, by index; a task that cannot be made has none."""
        count = _length(self._tasks(split))
        digests = {}
        for index in range(wanted if count is None else min(count, wanted)):
            # The environment's own code; whoever asks for the task learns what it raises.
            with contextlib.suppress(Exception):
                digests[index] = self._digest(split, index, self.task(split, index))
        return digests

    def task(self, split: str, index: int) -> Task:
        """A task, drawn the same in every process; whatever the environment raises passes through."""
        tasks = self._tasks(split)
        kind: type = type(tasks)
        if kind in (list, tuple) or getattr(tasks, "repeatable", False):
            return tasks[index]
        with seeded(self._seed, split, index):
            return tasks[index]

    async def answer(
        self, request: wire.Request, settings: ModelSettings, *, protocol: int = wire.PROTOCOL
    ) -> list[bytes]:
        """Do what is asked and return the message that answers it."""
        frames = await self._ended(
            request,
            settings,
            lambda rollouts, digest: wire.encode_result(
                request.id, rollouts, digest=digest, protocol=protocol
            ),
        )
        return [wire.encode(frames)] if isinstance(frames, wire.Failure) else frames

    async def rollouts(self, request: wire.Request, settings: ModelSettings) -> list[Rollout] | wire.Failure:
        """The same for a caller in this process: the rollouts themselves, or how the request failed."""
        return await self._ended(request, settings, lambda rollouts, _: rollouts)

    async def _ended(
        self, request: wire.Request, settings: ModelSettings, finish: Callable[[list[Rollout], int], T]
    ) -> T | wire.Failure:
        # The service watches the time itself and asks for no timeout, so that most rollouts do without its machinery.
        deadline = asyncio.timeout(request.timeout_s) if request.timeout_s else None
        try:
            async with deadline or _NO_DEADLINE:
                task = self._task(request)
                rollouts = await self._rollouts(request, settings, task)
            # Only now: a task that is made when it is looked into was made by its rollout, where that takes no time.
            return finish(rollouts, self._digest(request.split, request.index, task))
        # Anything an environment raises is the rollout's outcome; the server and its other requests go on.
        except BaseException as error:
            if stopped_by_caller(error):
                raise
            failure = _failure(
                request,
                error,
                timed_out=isinstance(error, TimeoutError) and deadline is not None and deadline.expired(),
                package=self._package,
                rollout=self._rollout,
            )
            if self._log_failures:
                self._log(request, failure)
            return failure

    async def _rollouts(self, request: wire.Request, settings: ModelSettings, task: Task) -> list[Rollout]:
        if self.group_scored and request.kind != "group":
            raise RolloutFailure(
                "not_a_group", "the environment scores whole groups; run a group", retryable=False
            )
        environment, model = self._environment, self._model(request, settings)
        if request.kind == "rollout":
            return [_checked(await environment.rollout(task, model), train=settings.train)]
        rollouts = await environment.rollout_group(task, model, request.count)
        if not isinstance(rollouts, (list, tuple)) or len(rollouts) != request.count:
            raise InvalidRolloutError(
                f"rollout_group must return {request.count} rollouts, got {_counted(rollouts)}"
            )
        rollouts = [_checked(rollout, train=settings.train) for rollout in rollouts]
        rewards = await environment.score_group(task, rollouts)
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(rollouts):
            raise InvalidRolloutError(
                f"score_group must return {len(rollouts)} rewards, got {_counted(rewards, 'rewards')}"
            )
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = _finite(reward, "reward")
        return rollouts

    def _model(self, request: wire.Request, settings: ModelSettings) -> Model:
        if request.model:
            settings = replace(settings, model=request.model)
        return Model(
            settings,
            client=self._client,
            base_url=request.base_url,
            session=request.session,
            cache_salt=request.cache_salt,
        )

    def _tasks(self, split: str) -> Tasks:
        tasks = self._splits.get(split)
        if tasks is None:
            with seeded(self._seed, split):
                tasks = self._environment.tasks(split)
            if not hasattr(tasks, "__getitem__") or _is_by_name(tasks):
                raise EnvironmentLoadError(
                    f'"{self._env}": tasks("{split}") ({place_of(self._environment.tasks)}) returned '
                    f"a {type(tasks).__name__}{_names_in(tasks)}; return a list of tasks, or anything that has them by index"
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
        return self.task(request.split, request.index)

    def _digest(self, split: str, index: int, task: Task) -> int:
        """The digest of a task, made once as long as it is remembered."""
        digest = self._digests.get((split, index))
        if digest is None:
            digest = digest_of(self._environment.identity(task))
            if len(self._digests) >= _DIGESTS_KEPT:
                self._digests.clear()
            self._digests[split, index] = digest
        return digest

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
    if isinstance(error, NoExceptionError) and error.__cause__ is not None:
        error = error.__cause__
    kind, retryable, detail = "error", isinstance(error, OSError), readable_traceback(error, package)
    message, where = f"{type(error).__name__}: {_text(error)}", find_place(error, package)
    if isinstance(error, asyncio.CancelledError):
        retryable, message, detail = True, "the environment cancelled its own rollout", ""
    if timed_out:
        kind, retryable, detail, where = "timed_out", True, "", ""
        message = f"not done in {request.timeout_s:g} s"
    elif isinstance(error, RolloutFailure):
        kind, retryable, message, detail = error.kind, bool(error.retryable), error.message, ""
        where = ""
    elif isinstance(error, InvalidRolloutError):
        # What it returned was found wrong only after its own code had ended.
        kind, message, where = "invalid_rollout", str(error), where or rollout
    return wire.Failure(
        request.id,
        _text(kind)[:100],
        _text(message)[:_MESSAGE_CHARS],
        retryable,
        _text(detail[-_DETAIL_CHARS:]),
        where=_text(where[-_WHERE_CHARS:]),
    )


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
    for sequence in rollout.sequences:
        if sequence.reward is not None:
            sequence.reward = _finite(sequence.reward, f'the reward of seat "{sequence.seat}"')
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


def _is_by_name(tasks: Tasks) -> bool:
    """Whether it is a dict of something else than tasks by index, such as one of datasets by split."""
    return (
        isinstance(tasks, dict) and bool(tasks) and 0 not in tasks and not hasattr(type(tasks), "__missing__")
    )


def _names_in(tasks: object) -> str:
    """The first keys of a dict, for an error."""
    if not isinstance(tasks, dict):
        return ""
    names = ", ".join(repr(key)[:40] for key in islice(tasks, 5))
    return f" with the keys {names}{', …' if len(tasks) > 5 else ''}"


def _length(tasks: Tasks) -> int | None:
    """Number of tasks, None when there is no end to them."""
    try:
        return len(tasks)  # type: ignore[arg-type]  # generated tasks need not have a length
    except TypeError:
        return None


def _counted(values: object, what: str = "") -> str:
    """How many there are, of what should be a list."""
    if isinstance(values, (list, tuple)):
        return f"{len(values)} {what}".strip()
    return type(values).__name__
