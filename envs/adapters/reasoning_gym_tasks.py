"""Tasks of reasoning-gym: generated when they are looked into, the same in every process, without end unless told.

A task is a pure function of (args, split, index): each split draws from a range of seeds of its own, so splits never
share a seed. The library's seeds have 32 bits, so a split repeats itself after 268 million tasks. Datasets that
prepare all their items when made are met by making them in blocks.
A task may take seconds to generate. Every dataset has one thread and one lock of its own for that, the parts of a
composite too, so that a slow one holds up neither a quick one nor the loop; what was generated is kept for a while.
"""

import base64
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import pickle
import random
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from envs.errors import EnvironmentLoadError
from envs.importing import nearest

INSTALL = "pip install 'rollout-orchestrator[reasoning-gym]'"

_SINCE = (0, 1, 24)

_REGION = 2**28
_MARGIN = 2**16  # a composite gives its parts the seeds right behind its own
_REGIONS = {"train": 0, "eval": 1, "test": 2, "validation": 3}
_SPREAD = 0x9E3779B1  # far apart for neighbouring seeds: 2**32 over the golden ratio
_BLOCK = 256
_BLOCKS_KEPT = 4
_PROBLEMS_KEPT = 256

_EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Where datasets that store no answer, because many are right, keep an example of one."""

COMPUTED = frozenset(
    {
        "binary_matrix",
        "coin_flip",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Datasets whose score works out what stands in the answer; `9**9**9` takes for ever, and lets no other thread run."""

_LIST_FUNCTIONS = threading.Lock()
"""Held while `list_functions` generates: it draws from a generator that all its objects share."""


class Problem(NamedTuple):
    """What was generated, the dataset that scores it, and of what that was made: its name, its config, its seed."""

    entry: dict[str, Any]
    dataset: Any
    made_of: tuple[str, Mapping[str, Any], int]

    def score(self, answer: str | None) -> tuple[float, bool]:
        """What the dataset says an answer is worth, and whether it could read it.

        Some datasets raise at an answer that is not of their form. That is a wrong answer, as long as they
        can score a right one; one that cannot is broken, and what it raises passes through.
        """
        try:
            return float(self.dataset.score_answer(answer=answer, entry=self.entry)), True
        except Exception:  # noqa: BLE001  foreign code, which raises anything at an answer that it does not expect
            self.dataset.score_answer(answer=right_answer(self.entry), entry=self.entry)
            return 0.0, False

    def packed(self) -> list[Any]:
        """What another process needs to score an answer, as JSON."""
        name, config, seed = self.made_of
        return [name, json.dumps(config), seed, base64.b64encode(pickle.dumps(self.entry)).decode()]


def score_packed(name: str, config: str, seed: int, entry: str, answer: str | None) -> tuple[float, bool]:
    """The score of an answer to a problem that another process has packed."""
    dataset = _source(name, config).block(seed)
    unpacked = pickle.loads(base64.b64decode(entry))  # noqa: S301  the env server packed it
    return Problem(unpacked, dataset, (name, {}, seed)).score(answer)


@functools.cache
def _source(name: str, config: str) -> "Source":
    return Source(name, json.loads(config))


def right_answer(entry: Mapping[str, Any]) -> str | None:
    """An answer that is right: the stored one, else the example that some datasets have instead; None where there is none."""
    if entry["answer"] is not None:
        answer: str = entry["answer"]
        return answer
    example = entry["metadata"].get(_EXAMPLES.get(entry["metadata"].get("source_dataset", ""), ""))
    return json.dumps(example) if isinstance(example, dict) else example


class Source:
    """One dataset of the library, in blocks of seeds. Safe to use from several threads; it generates one at a time."""

    def __init__(self, name: str, config: Mapping[str, Any], *, shift: int = 0) -> None:
        self._name = name
        self._config = dict(config)
        self._shift = shift
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Any] = OrderedDict()
        self._problems: OrderedDict[tuple[int, int], Problem] = OrderedDict()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"reasoning-gym-{name}")

    def problem(self, seed: int, place: int) -> Problem:
        """The problem at a place of the block with that seed; the rollouts of a group share one."""
        known = self._problems.get(
            (seed, place)
        )  # without the lock, which is held while another is generated
        if known is not None:
            return known
        with self._lock:
            known = self._problems.get((seed, place))
            if known is None:
                dataset = self.block(seed + self._shift)
                made_of = (self._name, self._config, seed + self._shift)
                known = self._problems[seed, place] = Problem(
                    self._generate(dataset, place), dataset, made_of
                )
                _trim(self._problems, _PROBLEMS_KEPT)
        return known

    def block(self, seed: int) -> Any:
        """The dataset of a block; its last few are kept."""
        block = self._blocks.get(seed)
        if block is None:
            block = self._blocks[seed] = make_dataset(
                self._name, {**self._config, "seed": seed, "size": _BLOCK}
            )
            _trim(self._blocks, _BLOCKS_KEPT)
        self._blocks.move_to_end(seed)
        return block

    def _generate(self, dataset: Any, place: int) -> dict[str, Any]:
        entry: dict[str, Any]
        if self._name == "list_functions":
            # The one dataset that also draws from the global `random`: the same task would differ between processes.
            with _LIST_FUNCTIONS:
                library("induction.list_functions.generators").random = random.Random(dataset.seed + place)
                entry = dataset[place]
        else:
            entry = dataset[place]
        return entry


class LazyTask(Mapping[str, Any]):
    """A task that is generated when it is first looked into."""

    def __init__(self, tasks: "ProceduralTasks", index: int) -> None:
        self._tasks = tasks
        self._made: Problem | None = None
        self.index = index

    @property
    def source(self) -> Source:
        """The dataset that the task comes from."""
        return self._tasks.locate(self.index)[0]

    def problem(self) -> Problem:
        """What was generated; may take seconds the first time."""
        if self._made is None:
            source, seed, place = self._tasks.locate(self.index)
            self._made = source.problem(seed, place)
        return self._made

    def __getitem__(self, key: str) -> Any:
        return self.problem().entry[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.problem().entry)

    def __len__(self) -> int:
        return len(self.problem().entry)


class ProceduralTasks:
    """The tasks of one split, of one dataset or of a composite of several with weights."""

    repeatable = True

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], *, split: str, seed: int) -> None:
        self._sources = sources
        self._weights = weights
        region = _REGIONS.get(split, 4 + zlib.crc32(split.encode()) % 12)
        self._start = region * _REGION
        self._offset = seed * _SPREAD

    def __getitem__(self, index: int) -> LazyTask:
        if index < 0:
            raise IndexError(index)
        return LazyTask(self, index)

    def locate(self, index: int) -> tuple[Source, int, int]:
        """The dataset of a task, the seed of its block, and its place there."""
        number, place = divmod((index + self._offset) % (_REGION - _MARGIN), _BLOCK)
        seed = self._start + number * _BLOCK
        if len(self._sources) == 1:
            return self._sources[0], seed, place
        # As the library's composite draws, so that the tasks are those that it would have.
        (part,) = random.Random(seed + place).choices(range(len(self._sources)), weights=self._weights, k=1)
        return self._sources[part], seed, place


class SizedTasks(ProceduralTasks):
    """The first `size` tasks of a split."""

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float], *, split: str, seed: int, size: int
    ) -> None:
        super().__init__(sources, weights, split=split, seed=seed)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> LazyTask:
        if index >= self._size:
            raise IndexError(index)
        return super().__getitem__(index)


def build_sources(name: str, config: Mapping[str, Any]) -> tuple[list[Source], list[float]]:
    """The dataset of a name, or the parts of a composite, with their weights; EnvironmentLoadError for what does not fit."""
    if name != "composite":
        # A config that does not fit is a mistake of the user, best reported before anything runs.
        make_dataset(name, {**config, "seed": 0, "size": 1})
        return [Source(name, config)], [1.0]
    parts = config.get("datasets")
    unknown = next((key for key in config if key != "datasets"), None)
    if unknown is not None:
        raise EnvironmentLoadError(
            f'reasoning_gym::composite has no option "{unknown}"; options of a part are in its config'
        )
    if not isinstance(parts, list) or not parts:
        raise EnvironmentLoadError(
            "reasoning_gym::composite: args do not fit: Must specify at least one dataset, "
            'for instance datasets = [{ name = "chain_sum", weight = 2.0, config = { min_terms = 3 } }]'
        )
    read = [_part(part) for part in parts]
    names = [part_name for part_name, _, _ in read]
    if len(set(names)) != len(names):
        raise EnvironmentLoadError("reasoning_gym::composite: a dataset is named twice")
    # The library gives the parts the seeds right behind the composite's own.
    sources = [Source(part, config, shift=place + 1) for place, (part, _, config) in enumerate(read)]
    return sources, [weight for _, weight, _ in read]


def _part(part: Any) -> tuple[str, float, dict[str, Any]]:
    """One part of a composite, checked: its name, its weight, its config."""
    table = {"weight": 1.0, "config": {}, **part} if isinstance(part, Mapping) else {}
    name, weight, config = table.get("name"), table.get("weight"), table.get("config")
    unknown = next((key for key in table if key not in ("name", "weight", "config")), None)
    if unknown is not None:
        raise EnvironmentLoadError(
            f'reasoning_gym::composite: a part does not fit: it has no "{unknown}", but name, weight and config'
        )
    if not isinstance(name, str) or name not in datasets() or name == "composite":
        shown = str(name or "")
        raise EnvironmentLoadError(
            f'reasoning_gym::composite: no dataset "{shown}"; {nearest(shown, datasets())}'
        )
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight > 0:
        raise EnvironmentLoadError(
            f"reasoning_gym::composite: {name}: weight must be positive, got {weight!r}"
        )
    if not isinstance(config, Mapping) or {"seed", "size"} & set(config):
        raise EnvironmentLoadError(
            f"reasoning_gym::composite: {name}: config is a table of the dataset's options, without seed and size,"
            " which are the composite's"
        )
    make_dataset(name, {**config, "seed": 0, "size": 1})
    return name, float(weight), dict(config)


def make_dataset(name: str, config: Mapping[str, Any]) -> Any:
    """A dataset of the library, or an EnvironmentLoadError that says what does not fit."""
    dataset_class, config_class = datasets()[name]
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


def datasets() -> Mapping[str, Any]:
    """All datasets of the installed library."""
    library()
    refuse_older_releases(importlib.metadata.version("reasoning-gym"))
    found: Mapping[str, Any] = library("factory").DATASETS
    return found


def library(module: str = "") -> Any:
    """The library, or a module of it; EnvironmentLoadError where it is not installed."""
    try:
        return importlib.import_module(f"reasoning_gym.{module}" if module else "reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise EnvironmentLoadError(
            f"reasoning-gym is not installed for this interpreter; {INSTALL}, or set `python` to one that has it"
        ) from None


def refuse_older_releases(version: str) -> None:
    """Raise EnvironmentLoadError unless the adapter fits the release."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < _SINCE:
        raise EnvironmentLoadError(
            f"reasoning-gym {version} is too old, {'.'.join(map(str, _SINCE))} and later work; {INSTALL}"
        )


def _trim(kept: OrderedDict[Any, Any], limit: int) -> None:
    while len(kept) > limit:
        kept.popitem(last=False)
