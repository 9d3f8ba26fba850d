"""Environments of classic verifiers (`load_environment`, `rollout`, rubrics; releases up to 0.3).

The library runs its own turns, tools and rubrics; its model calls go through `Model` by a client of its own
kind, so that token ids and log-probabilities are recorded as in native environments. A rubric with group
rewards makes the environment group-scored. The library keeps errors in its state and scores a reward function
that raises as zero; here both end the rollout as a failure that keeps the error's type as its kind.
Imported only where the library is installed.
"""

import asyncio
import re
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import verifiers as vf  # type: ignore[import-not-found]  # only in a virtualenv of its own

from envs.adapters.policy import turn_options
from envs.adapters.reward_errors import RewardError, rubrics_of, watch, watching
from envs.adapters.verifiers_classic_client import PolicyClient
from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError, RolloutFailure
from envs.model import Model
from envs.rollout import Rollout

_RETRYABLE = (vf.InfraError, vf.InvalidModelResponseError)
_THREADS = 256

_unscored: ContextVar[list[Any]] = ContextVar("unscored_states")
"""States of a group's rollouts that have ended; the rubric has yet to score them, and to clean up after them."""


@dataclass(slots=True)
class ScoredLater(Rollout):
    """A rollout with the library's state, which the group's rubric needs."""

    state: Any = None


class Rows:
    """Rows of one of the library's datasets."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Task:
        row: Task = self._dataset[index]
        return row


class ClassicEnvironment(Environment):
    """One environment of classic verifiers. `args` go to its `load_environment`."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name = name
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._env = vf.load_environment(name, **args)
        except (ValueError, RuntimeError) as error:
            # The library wraps whatever happened; the cause says more.
            raise EnvironmentLoadError(f"verifiers::{name}: {_one_line(error.__cause__ or error)}") from error
        finally:
            # Its environments install handlers that end the process; stopping is the server's affair.
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._rubrics = list(rubrics_of(self._env.rubric))
        watch(self._env.rubric, is_group=_is_group_reward)

    async def setup(self) -> None:
        # Sizes the pools that environments registered; the library does it in its own server.
        if hasattr(self._env, "set_concurrency"):
            self._env.set_concurrency(_THREADS)
        # Every reply, and many an environment's tools, go through the loop's threads. The library's own pool
        # for them is one per process and would end with the first loop that used it.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))

    @property
    def group_scored(self) -> bool:
        return any(rubric.has_group_rewards for rubric in self._rubrics)

    def tasks(self, split: str) -> Tasks:
        dataset = self._env.get_dataset if split == "train" else self._env.get_eval_dataset
        try:
            return Rows(dataset())
        except ValueError as error:
            raise EnvironmentLoadError(
                f'verifiers::{self.name}: no tasks for split "{split}": {error}'
            ) from error

    async def rollout(self, task: Task, model: Model) -> Rollout:
        client = PolicyClient(model)
        state = await self._env.rollout(dict(task), client, model.name, self._sampling(model))
        if self.group_scored:
            # Scored with its group, which also fills in the metrics.
            _unscored.get().append(state)
            self._raise_failure(state, client)
            client.finish(state.get("trajectory") or [])
            return self._handed_in(state, model, reward=0.0)
        try:
            self._raise_failure(state, client)
            client.finish(state.get("trajectory") or [])
            await self._score([state])
        finally:
            await self._env.rubric.cleanup(state)
        return self._handed_in(state, model, reward=state["reward"])

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        """Scored in here, because what waits for its rubric is to be cleaned up also where a member fails."""
        states: list[Any] = []
        token = _unscored.set(states)
        try:
            rollouts = await super().rollout_group(task, model, count)
            members = [rollout for rollout in rollouts if isinstance(rollout, ScoredLater)]
            if members:
                await self._score([member.state for member in members], group=True)
            for member in members:
                member.reward, member.metrics = member.state["reward"], _metrics(member.state)
            return rollouts
        finally:
            _unscored.reset(token)
            for state in states:
                await self._env.rubric.cleanup(state)

    async def close(self) -> None:
        # What the library's own server calls; it has no public name.
        await self._env._teardown()

    def _sampling(self, model: Model) -> dict[str, Any]:
        """What the environment's author set, where the configuration says nothing."""
        return turn_options(model, self._env.sampling_args or {})

    async def _score(self, states: list[Any], *, group: bool = False) -> None:
        rubric = self._env.rubric
        watch(rubric, is_group=_is_group_reward)
        with watching() as errors:
            if not getattr(self._env, "score_rollouts", True):
                await rubric.dummy_score_group(states)
            elif group:
                await rubric.score_group(states)
            else:
                await rubric.score_rollout(states[0])
        _raise_reward_errors(errors)
        for error in errors:
            for state in states:
                state["metrics"].pop(error.name, None)

    def _raise_failure(self, state: Any, client: PolicyClient) -> None:
        """A rollout that the library ended with an error, or before the policy said anything."""
        error = state.get("error")
        if error is not None:
            raise _failure(error)
        if client.turns:
            return
        if client.overlong is not None:
            raise client.overlong
        stopped = state.get("stop_condition") or "unknown"
        timed_out = bool(state.get("timed_out")) or "timeout" in stopped
        raise RolloutFailure(
            "timed_out" if timed_out else "no_model_call",
            f"verifiers::{self.name} ended before the policy was asked (stop condition: {stopped})",
            retryable=timed_out,
        )

    def _handed_in(self, state: Any, model: Model, *, reward: float) -> Rollout:
        rollout = model.rollout(
            reward,
            metrics=_metrics(state),
            stop_reason=state.get("stop_condition"),
            truncated=bool(state.get("is_truncated")) or None,
        )
        if not self.group_scored:
            return rollout
        values = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
        return ScoredLater(**values, state=state)


def _raise_reward_errors(errors: list[RewardError]) -> None:
    """Fail for the first function that counts."""
    for noted in errors:
        if noted.weight:
            raise RolloutFailure(
                "reward_error",
                f'reward function "{noted.name}" raised {_one_line(noted.error)}',
                retryable=isinstance(noted.error, (OSError, *_RETRYABLE)),
            ) from noted.error


def _failure(error: Any) -> RolloutFailure:
    """The library's error as ours: what the model raised comes back as it was, anything else keeps its type."""
    cause = error
    while isinstance(cause, BaseException):
        if isinstance(cause, RolloutFailure):
            return cause
        cause = cause.__cause__
    if not isinstance(error, BaseException):
        return RolloutFailure("error", str(error), retryable=False)
    message = _one_line(error)
    if error.__cause__ is not None:
        message += f" (caused by {_one_line(error.__cause__)})"
    failure = RolloutFailure(
        _snake_case(type(error).__name__), message, retryable=isinstance(error, _RETRYABLE)
    )
    failure.__cause__ = error
    return failure


def _metrics(state: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (state.get("metrics") or {}).items() if value is not None}


def _is_group_reward(function: Any) -> bool:
    return bool(vf.Rubric(funcs=[function]).has_group_rewards)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
