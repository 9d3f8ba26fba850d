"""Datasets of reasoning-gym: `reasoning_gym::<dataset>[@split]`, composite ones included.

Generating a task and scoring an answer may take seconds, so both run on threads, never on the loop: a thread for each
dataset that generates (`envs.adapters.reasoning_gym_tasks`), a few that score. Answers are scored by the dataset's
own `score_answer`; where that works out what the policy wrote, in helper processes that are ended when it takes too long.
"""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envs.adapters.reasoning_gym_tasks import (
    COMPUTED,
    LazyTask,
    Problem,
    ProceduralTasks,
    SizedTasks,
    build_sources,
    datasets,
    library,
)
from envs.dataset.aside import Aside
from envs.environment import Environment, Task
from envs.errors import EnvironmentLoadError
from envs.importing import nearest
from envs.model import Model
from envs.rollout import Rollout

_SCORING_THREADS = 4
_LONGEST_SCORE_S = 10.0


class ReasoningGym(Environment):
    """One dataset. `args` are fields of its config; `instructions` and `answer_tag` are the adapter's own.

    `instructions` is the name of one of the library's system prompts or a text; "" leaves the prompt to the
    configured system prompt. The answer is what stands in the last pair of `answer_tag`s, else the whole reply.
    """

    def __init__(
        self,
        name: str,
        *,
        instructions: str = "default",
        answer_tag: str = "answer",
        seed: int = 0,
        size: int | None = None,
        **config: Any,
    ) -> None:
        if size is not None and size < 1:
            raise EnvironmentLoadError(f"reasoning_gym::{name}: size must be positive, got {size}")
        if not isinstance(seed, int) or seed < 0:
            raise EnvironmentLoadError(
                f"reasoning_gym::{name}: seed must be a whole number from 0, got {seed!r}"
            )
        self._seed = seed
        self._size = size
        self._instructions = library("utils").SYSTEM_PROMPTS.get(instructions, instructions)
        tag = re.escape(answer_tag)
        self._closing = f"</{answer_tag}>"
        self._answer = re.compile(rf"<{tag}>\s?(.*?)\s?</{tag}>", re.DOTALL)
        self._sources, self._weights = build_sources(name, config)
        self._scoring = ThreadPoolExecutor(_SCORING_THREADS, thread_name_prefix="reasoning-gym-score")
        self._aside = Aside(
            "envs.adapters.reasoning_gym_tasks:score_packed",
            most=_SCORING_THREADS,
            timeout_s=_LONGEST_SCORE_S,
        )

    def tasks(self, split: str) -> ProceduralTasks:
        if self._size is None:
            return ProceduralTasks(self._sources, self._weights, split=split, seed=self._seed)
        return SizedTasks(self._sources, self._weights, split=split, seed=self._seed, size=self._size)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        assert isinstance(task, LazyTask)
        loop = asyncio.get_running_loop()
        problem = await loop.run_in_executor(task.source.thread, task.problem)
        messages = [{"role": "user", "content": problem.entry["question"]}]
        if self._instructions:
            messages.insert(0, {"role": "system", "content": self._instructions})
        reply = await model.chat(messages)
        answer = self.answer(reply.text)
        reward, readable = await self._score(problem, answer)
        return model.rollout(
            reward, metrics={"answered": float(answer is not None), "readable": float(readable)}
        )

    def identity(self, task: Task) -> object:
        """The question alone: the stored answer is one of several in some datasets, and not the same in every process."""
        return task["question"]

    def answer(self, text: str) -> str | None:
        """The answer in a reply, None for an empty one."""
        # Behind the last closing tag nothing is found, and a search from every opening one would take long.
        found = self._answer.findall(text[: text.rfind(self._closing) + len(self._closing)])
        return (found[-1].strip() if found else text.strip()) or None

    async def _score(self, problem: Problem, answer: str | None) -> tuple[float, bool]:
        """What an answer is worth, and whether it could be read; one that cannot be worked out in time could not."""
        if problem.made_of[0] not in COMPUTED:
            return await asyncio.get_running_loop().run_in_executor(self._scoring, problem.score, answer)
        try:
            reward, readable = await self._aside.call(*problem.packed(), answer)
        except TimeoutError:
            return 0.0, False
        return reward, readable

    async def close(self) -> None:
        await self._aside.aclose()
        # A task or a score that never returns must not keep the server from ending.
        for threads in (self._scoring, *(source.thread for source in self._sources)):
            threads.shutdown(wait=False, cancel_futures=True)


class ReasoningGymLoader:
    """All datasets of the installed library."""

    def names(self) -> list[str]:
        return sorted(datasets())

    def about(self, name: str) -> str:
        """What kind of problems a dataset has."""
        module: str = datasets()[name][0].__module__
        return module.split(".")[1] if module.count(".") > 1 else ""

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        if name not in datasets():
            raise EnvironmentLoadError(f'reasoning-gym has no dataset "{name}"; {nearest(name, datasets())}')
        return ReasoningGym(name, **args)


LOADER = ReasoningGymLoader()
