"""Tasks that are nothing but a seed, for environments that make their own problems. Pure.

Each split draws from a range of its own, so that splits share no seed; a split repeats itself after 268 million
tasks, because libraries take seeds of 32 bits.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from envs.environment import Task, Tasks
from envs.errors import EnvironmentLoadError

_REGION = 2**28
_REGIONS = {"train": 0, "eval": 1, "test": 2, "validation": 3}
_SPREAD = 0x9E3779B1  # far apart for neighbouring seeds: 2**32 over the golden ratio


class SeededTasks:
    """The tasks of one split, without end: `{"seed": number}` and what all of them have in common."""

    def __init__(self, split: str, *, seed: int, common: Mapping[str, Any]) -> None:
        region = _REGIONS.get(split, 4 + zlib.crc32(split.encode()) % 12)
        self._start = region * _REGION
        self._offset = seed * _SPREAD
        self._common = dict(common)

    def __getitem__(self, index: int) -> Task:
        if index < 0:
            raise IndexError(index)
        return {**self._common, "seed": self._start + (index + self._offset) % _REGION}


class SizedSeededTasks(SeededTasks):
    """The first `size` of them."""

    def __init__(self, split: str, *, seed: int, common: Mapping[str, Any], size: int) -> None:
        super().__init__(split, seed=seed, common=common)
        self._size = size

    def __len__(self) -> int:
        return self._size


def seeded_tasks(split: str, *, seed: int, size: int | None, common: Mapping[str, Any]) -> Tasks:
    """The tasks of a split, as many as `size` says or without end."""
    if size is None:
        return SeededTasks(split, seed=seed, common=common)
    return SizedSeededTasks(split, seed=seed, common=common, size=size)


def check_seed_and_size(env: str, seed: object, size: object) -> None:
    """Raise EnvironmentLoadError, which names the environment, unless both are what `seeded_tasks` takes."""
    if not isinstance(seed, int) or seed < 0:
        raise EnvironmentLoadError(f"{env}: seed must be a whole number from 0, got {seed!r}")
    if size is not None and (not isinstance(size, int) or size < 1):
        raise EnvironmentLoadError(f"{env}: size must be a positive whole number, got {size!r}")
