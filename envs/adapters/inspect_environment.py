"""An Inspect task as an environment: its samples are tasks, its solver is the rollout, its scorer the reward.

Inspect allows one eval per process, so one long eval runs from `setup` to `close` and is fed the samples that are asked for, side by
side. Its log is Inspect's own and opens with `inspect view`. Tools, limits, sandboxes and scorers are Inspect's; epochs are ours.
Imported only where inspect-ai is installed.
"""

import asyncio
import contextlib
import contextvars
import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

from inspect_ai import (  # type: ignore[import-not-found]  # only in a virtualenv of its own
    SampleSource,
    enqueue_sample,
    eval_async,
    task_with,
)
from inspect_ai import (
    Task as InspectTask,
)
from inspect_ai.log._samples import active_samples  # type: ignore[import-not-found]  # as above
from inspect_ai.model import GenerateConfig, get_model  # type: ignore[import-not-found]  # as above
from inspect_ai.scorer import (  # type: ignore[import-not-found]  # as above
    CORRECT,
    INCORRECT,
    NOANSWER,
    PARTIAL,
    value_to_float,
)

from envs.adapters.inspect_policy import PROVIDER, Sampled, not_recorded, running
from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError, RolloutFailure
from envs.importing import ImportReferenceError, import_attribute
from envs.model import Model
from envs.rollout import Rollout

_AT_ONCE = 4096
_LOGGED_AT_ONCE = 500
"""Samples between writes of the log. Each write reads its whole directory again, on the event loop, and the default is every sample."""

_LETTERS = (CORRECT, PARTIAL, INCORRECT, NOANSWER)
_WORDS = ("yes", "true", "no", "false")


class Samples:
    """Samples of the task's dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Task:
        return {"sample": self._dataset[index]}


class Feed(SampleSource):  # type: ignore[misc]  # the library has no types for us
    """Brings samples to the eval that runs and their results back."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[list[Any] | None] | None = None
        self._inside: contextvars.Context | None = None
        self._results: dict[str, asyncio.Future[Any]] = {}
        self.idle = asyncio.Event()
        self._closed = False

    async def next_samples(self) -> list[Any] | None:
        """Called when nothing runs: wait for somebody to ask."""
        if self._closed:
            return None
        self._inside = contextvars.copy_context()
        self._waiting = asyncio.get_running_loop().create_future()
        self.idle.set()
        return await self._waiting

    async def sample_complete(self, sample: Any) -> None:
        result = self._results.get(str(sample.id))
        if result is not None and not result.done():
            result.set_result(sample)

    async def run(self, sample: Any) -> Any:
        """The sample as it ended. One that nobody waits for any more is cancelled."""
        result = self._results[sample.id] = asyncio.get_running_loop().create_future()
        try:
            self._start(sample)
            return await result
        except asyncio.CancelledError:
            for active in active_samples():
                if str(active.sample.id) == sample.id:
                    active.interrupt("cancel")
            raise
        finally:
            del self._results[sample.id]

    def fail(self, error: BaseException) -> None:
        """The eval ended by itself, so that nothing will come of what runs."""
        self._closed = True
        for result in self._results.values():
            if not result.done():
                result.set_exception(
                    RolloutFailure("inspect_ended", f"the eval ended: {error!r}", retryable=True)
                )

    def close(self) -> None:
        self._closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _start(self, sample: Any) -> None:
        """No await in here: whether the eval waits is still so when it is told."""
        if self._closed:
            raise RolloutFailure("inspect_ended", "the eval has ended", retryable=True)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result([sample])
        else:
            assert self._inside is not None, "setup comes first"
            self._inside.run(enqueue_sample, sample)


class InspectEnvironment(Environment):
    """One task. `task` are its parameters, `score` names the scorer that is the reward where there are several."""

    def __init__(
        self,
        module: str,
        name: str,
        *,
        task: Mapping[str, Any] | None = None,
        score: str | None = None,
        log_dir: str | None = None,
        model_roles: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"inspect::{module}/{name}"
        os.environ.setdefault("INSPECT_DISPLAY", "none")
        try:
            made = import_attribute(f"{module}:{name}", what="Inspect task")(**(task or {}))
        except ImportReferenceError as error:
            raise EnvironmentLoadError(str(error)) from error.__cause__
        except TypeError as error:
            raise EnvironmentLoadError(f"{self.name}: its parameters do not fit: {error}") from error
        if not isinstance(made, InspectTask):
            raise EnvironmentLoadError(f"{self.name} returned a {type(made).__name__}, not a task of Inspect")
        if not made.scorer:
            raise EnvironmentLoadError(f"{self.name} has no scorer, so that there is no reward")
        self._dataset = made.dataset
        self._task = made
        self._score = score
        self._log_dir = log_dir
        self._roles = dict(model_roles or {})
        self._numbers = itertools.count()
        self._to_float = value_to_float()
        self._feed = Feed()
        self._eval: asyncio.Task[None] | None = None

    def tasks(self, split: str) -> Tasks:
        return Samples(self._dataset)

    def identity(self, task: Task) -> object:
        sample = task["sample"]
        asked = sample.input
        if not isinstance(asked, str):
            # Inspect gives every message an id of its own, another one in every process.
            asked = [message.model_dump(mode="json", exclude={"id"}) for message in asked]
        return [str(sample.id), asked, str(sample.target)]

    async def setup(self) -> None:
        # One task enters and leaves what the library opens, as its cancel scopes demand; `close` ends it.
        self._eval = asyncio.create_task(self._run(), name="inspect-eval")  # noqa: TID251  see above
        idle = asyncio.create_task(self._feed.idle.wait())  # noqa: TID251  awaited here
        await asyncio.wait({self._eval, idle}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if self._eval.done():
            await self._eval
            raise RuntimeError(f"{self.name}: the eval ended before any sample was asked for")

    async def close(self) -> None:
        self._feed.close()
        if self._eval is not None:
            # What ended it was told to the rollouts that it took along.
            with contextlib.suppress(Exception):
                await self._eval

    async def rollout(self, task: Task, model: Model) -> Rollout:
        sampled = Sampled(model)
        sample_id = f"{task['sample'].id}-{next(self._numbers)}"
        running[sample_id] = sampled
        try:
            ended = await self._feed.run(task["sample"].model_copy(deep=True, update={"id": sample_id}))
        finally:
            del running[sample_id]
        if ended.error is not None:
            raise sampled.failure or RolloutFailure(
                "sample_error", f"{self.name}: {ended.error.message}", retryable=False
            )
        if not sampled.turns:
            raise RolloutFailure(
                "no_model_call", f"{self.name}: the solver never asked the policy", retryable=False
            )
        metrics, reward = self._scores(ended)
        return model.rollout(
            reward,
            metrics=metrics,
            stop_reason=ended.limit.type if ended.limit is not None else None,
            truncated=True if ended.limit is not None else None,
        )

    def _scores(self, ended: Any) -> tuple[dict[str, float], float]:
        """Every score as a number by name, and the one that is the reward. A score of several values has `name.key`."""
        found: dict[str, Any] = {}
        for name, score in (ended.scores or {}).items():
            values = score.value if isinstance(score.value, dict) else {"": score.value}
            for key, value in values.items():
                if not isinstance(value, (dict, list)):
                    found[f"{name}.{key}" if key else name] = value
        wanted = self._score if self._score is not None else next(iter(found), None)
        if wanted not in found or (self._score is None and len(found) > 1):
            raise RolloutFailure(
                "no_score",
                f"{self.name}: which score is the reward? args.score is {self._score!r}, there are {sorted(found)}",
                retryable=False,
            )
        assert wanted is not None
        metrics = {name: self._to_float(value) for name, value in found.items() if _is_number(value)}
        if wanted not in metrics:
            raise RolloutFailure(
                "no_score", f'{self.name}: score "{wanted}" is {found[wanted]!r}, no number', retryable=False
            )
        return metrics, metrics[wanted]

    async def _run(self) -> None:
        """The eval, from the first sample to the last."""
        scorers = self._task.scorer if isinstance(self._task.scorer, list) else [self._task.scorer]
        fed = task_with(
            self._task, dataset=self._feed, scorer=[not_recorded(scorer) for scorer in scorers], epochs=1
        )
        model = get_model(
            f"{PROVIDER}/policy", memoize=False, config=GenerateConfig(max_connections=_AT_ONCE)
        )
        error: BaseException = RuntimeError("it was finished")
        try:
            await eval_async(
                fed,
                model=model,
                model_roles=self._roles or None,
                log_dir=self._log_dir,
                fail_on_error=False,
                max_samples=_AT_ONCE,
                score_display=False,
                log_buffer=_LOGGED_AT_ONCE,
                log_realtime=False,
            )
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._feed.fail(error)


def _is_number(value: object) -> bool:
    """Whether Inspect can make a number of a score; of anything else it makes 0 and a warning."""
    if isinstance(value, str):
        if value in _LETTERS or value.lower() in _WORDS:
            return True
        try:
            value = float(value)
        except ValueError:
            return False
    return isinstance(value, (int, float)) and math.isfinite(value)
