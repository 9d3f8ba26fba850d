"""Datasets of reasoning-gym: `reasoning_gym::<dataset>[@split]`, composite ones included.

Tasks are generated, without end unless `size` is given, and a pure function of (args, split, index): each
split draws from a range of seeds of its own, so splits never share a seed. The library's seeds have 32 bits,
so a split repeats itself after 268 million tasks. Datasets that prepare all their items when made are met by
making them in blocks. Generating and scoring may take a second, so both run on threads, never on the loop.
Answers are scored by the dataset's own `score_answer`.
"""

import asyncio
import dataclasses
import importlib
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from envs.environment import Environment, Task
from envs.errors import EnvironmentLoadError
from envs.importing import nearest
from envs.model import Model
from envs.rollout import Rollout
from envs.seeding import seeded

INSTALL = "pip install 'rollout-orchestrator[reasoning-gym]'"

_REGION = 2**28
_MARGIN = 2**16  # a composite gives its parts the seeds right behind its own
_REGIONS = {"train": 0, "eval": 1, "test": 2, "validation": 3}
_SPREAD = 0x9E3779B1  # far apart for neighbouring seeds: 2**32 over the golden ratio
_BLOCK = 256
_BLOCKS_KEPT = 4
_ENTRIES_KEPT = 256
_THREADS = 4


class LazyTask(Mapping[str, Any]):
    """A task that is generated when it is first looked into."""

    def __init__(self, tasks: "ProceduralTasks", index: int) -> None:
        self._tasks = tasks
        self.index = index

    @property
    def tasks(self) -> "ProceduralTasks":
        """The split that the task belongs to."""
        return self._tasks

    def __getitem__(self, key: str) -> Any:
        return self._tasks.entry(self.index)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks.entry(self.index))

    def __len__(self) -> int:
        return len(self._tasks.entry(self.index))


class ProceduralTasks:
    """The tasks of one split. Safe to use from several threads; they generate one at a time.

    Some datasets draw from the global `random`, beside the seed that they are given, so that is seeded too.
    """

    repeatable = True

    def __init__(self, name: str, config: Mapping[str, Any], *, split: str, seed: int) -> None:
        self._name = name
        self._config = dict(config)
        region = _REGIONS.get(split, 4 + zlib.crc32(split.encode()) % 12)
        self._start = region * _REGION
        self._offset = seed * _SPREAD
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Any] = OrderedDict()
        self._entries: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __getitem__(self, index: int) -> LazyTask:
        if index < 0:
            raise IndexError(index)
        return LazyTask(self, index)

    def entry(self, index: int) -> dict[str, Any]:
        """The generated problem; the rollouts of a group share one."""
        with self._lock:
            entry = self._entries.get(index)
            if entry is None:
                dataset, place = self._locate(index)
                with seeded(self._start, index):
                    entry = self._entries[index] = dataset[place]
                _trim(self._entries, _ENTRIES_KEPT)
        return entry

    def score(self, index: int, answer: str | None) -> tuple[float, bool]:
        """What the dataset says an answer is worth, and whether it could read it.

        Some datasets raise at an answer that is not of their form. That is a wrong answer, as long as they
        can score their own; one that cannot is broken, and what it raises passes through.
        """
        entry = self.entry(index)
        with self._lock:
            dataset, _ = self._locate(index)
        try:
            return float(dataset.score_answer(answer=answer, entry=entry)), True
        except Exception:  # noqa: BLE001  foreign code, which raises anything at an answer that it does not expect
            dataset.score_answer(answer=entry["answer"], entry=entry)
            return 0.0, False

    def _locate(self, index: int) -> tuple[Any, int]:
        """The dataset that holds an index, and the place in it."""
        number, place = divmod((index + self._offset) % (_REGION - _MARGIN), _BLOCK)
        block = self._blocks.get(number)
        if block is None:
            seed = self._start + number * _BLOCK
            with seeded(seed):
                block = make_dataset(self._name, {**self._config, "seed": seed, "size": _BLOCK})
            self._blocks[number] = block
            _trim(self._blocks, _BLOCKS_KEPT)
        self._blocks.move_to_end(number)
        return block, place


class SizedTasks(ProceduralTasks):
    """The first `size` tasks of a split."""

    def __init__(self, name: str, config: Mapping[str, Any], *, split: str, seed: int, size: int) -> None:
        super().__init__(name, config, split=split, seed=seed)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> LazyTask:
        if index >= self._size:
            raise IndexError(index)
        return super().__getitem__(index)


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
        self._name = name
        self._config = _prepared(name, config)
        self._seed = seed
        self._size = size
        self._instructions = _library("utils").SYSTEM_PROMPTS.get(instructions, instructions)
        tag = re.escape(answer_tag)
        self._answer = re.compile(rf"<{tag}>\s?(.*?)\s?</{tag}>", re.DOTALL)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="reasoning-gym")
        # A config that does not fit is a mistake of the user, best reported before anything runs.
        make_dataset(name, {**self._config, "seed": 0, "size": 1})

    def tasks(self, split: str) -> ProceduralTasks:
        if self._size is None:
            return ProceduralTasks(self._name, self._config, split=split, seed=self._seed)
        return SizedTasks(self._name, self._config, split=split, seed=self._seed, size=self._size)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        assert isinstance(task, LazyTask)
        loop = asyncio.get_running_loop()
        entry = await loop.run_in_executor(self._threads, task.tasks.entry, task.index)
        messages = [{"role": "user", "content": entry["question"]}]
        if self._instructions:
            messages.insert(0, {"role": "system", "content": self._instructions})
        reply = await model.chat(messages)
        answer = self.answer(reply.text)
        reward, readable = await loop.run_in_executor(self._threads, task.tasks.score, task.index, answer)
        return model.rollout(
            reward, metrics={"answered": float(answer is not None), "readable": float(readable)}
        )

    def answer(self, text: str) -> str | None:
        """The answer in a reply, None for an empty one."""
        found = self._answer.findall(text)
        return (found[-1].strip() if found else text.strip()) or None

    async def close(self) -> None:
        # A score that never returns must not keep the server from ending.
        self._threads.shutdown(wait=False, cancel_futures=True)


def make_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """A dataset of the library, or an EnvironmentLoadError that says what does not fit."""
    dataset_class, config_class = _datasets()[name]
    fields = [field.name for field in dataclasses.fields(config_class)]
    unknown = [key for key in config if key not in fields]
    if unknown:
        raise EnvironmentLoadError(
            f'reasoning_gym::{name} has no option "{unknown[0]}"; {nearest(unknown[0], fields)}'
        )
    try:
        made = config_class(**config)
        if hasattr(made, "validate"):
            made.validate()
        return dataset_class(config=made)
    except (AssertionError, TypeError, ValueError) as error:
        raise EnvironmentLoadError(f"reasoning_gym::{name}: args do not fit: {error}") from error


class ReasoningGymLoader:
    """All datasets of the installed library."""

    def names(self) -> list[str]:
        return sorted(_datasets())

    def about(self, name: str) -> str:
        """What kind of problems a dataset has."""
        module: str = _datasets()[name][0].__module__
        return module.split(".")[1] if module.count(".") > 1 else ""

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        if name not in _datasets():
            raise EnvironmentLoadError(f'reasoning-gym has no dataset "{name}"; {nearest(name, _datasets())}')
        return ReasoningGym(name, **args)


LOADER = ReasoningGymLoader()


def _prepared(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the library wants it: the parts of a composite are objects of its own."""
    prepared = dict(config)
    if name == "composite" and "datasets" in prepared:
        spec = _library("composite").DatasetSpec
        parts = []
        for part in prepared["datasets"]:
            table = {"weight": 1.0, "config": {}, **part}
            if table.get("name") not in _datasets():
                shown = str(table.get("name", ""))
                raise EnvironmentLoadError(
                    f'reasoning_gym::composite: no dataset "{shown}"; {nearest(shown, _datasets())}'
                )
            try:
                parts.append(spec(**table))
            except TypeError as error:
                raise EnvironmentLoadError(
                    f"reasoning_gym::composite: a part does not fit: {error}"
                ) from None
        prepared["datasets"] = parts
    return prepared


def _datasets() -> Mapping[str, Any]:
    _library()
    datasets: Mapping[str, Any] = _library("factory").DATASETS
    return datasets


def _library(module: str = "") -> Any:
    try:
        return importlib.import_module(f"reasoning_gym.{module}" if module else "reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise EnvironmentLoadError(
            f"reasoning-gym is not installed for this interpreter; {INSTALL}, or set `python` to one that has it"
        ) from None


def _trim(kept: OrderedDict[int, Any], limit: int) -> None:
    while len(kept) > limit:
        kept.popitem(last=False)
