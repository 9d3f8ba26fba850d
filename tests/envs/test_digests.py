"""Digests of tasks, and the random generators while tasks are made: equal wherever the task is."""

import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.digests import digest_of
from envs.seeding import seeded

ROOT = Path(__file__).parents[2]


class Wrapped(Mapping[str, Any]):
    """A task that is a mapping and no dict, as generated ones are."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class Shown:
    """An object that shows itself with its address, as most do."""


class Holding:
    """An object that does not show what it holds."""

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": Holding({"q": 1})}, {"a": Holding({"q": 1})}),
        ({"a": 1, "b": [2, "x"]}, {"b": [2, "x"], "a": 1}),
        ({"a": 1}, Wrapped({"a": 1})),
        ({"a": np.float32(0.5)}, {"a": 0.5}),
        ({"a": Shown()}, {"a": Shown()}),
        ({"a": {1, 2, 3}}, {"a": {3, 2, 1}}),
        ({1: "x", "a": Shown()}, {1: "x", "a": Shown()}),
        ({"a": 2**70}, {"a": 2**70}),
        ({"a": np.arange(3)}, {"a": np.arange(3)}),
    ],
    ids=[
        "object",
        "order",
        "mapping",
        "numpy",
        "address",
        "set",
        "keys of two types",
        "large number",
        "array",
    ],
)
def test_the_same_task_has_the_same_digest(one: object, other: object) -> None:
    """However its content is held."""
    assert digest_of(one) == digest_of(other)
    assert 0 < digest_of(one) < 2**63


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"question": "2+2"}, {"question": "2+3"}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": np.arange(3)}, {"a": np.arange(3) + 1}),
        ({"a": "1"}, {"a": 1}),
        ({"a": Holding("x")}, {"a": Holding("y")}),
    ],
)
def test_another_task_has_another_digest(one: object, other: object) -> None:
    """Also where little is different."""
    assert digest_of(one) != digest_of(other)


def test_a_digest_does_not_depend_on_the_process() -> None:
    """Nor on its hash seed: that is what digests are for."""
    script = "from envs.digests import digest_of; print(digest_of({'a': {'x', 'y', 'z'}, 'b': object()}))"
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_generators_are_seeded_inside_and_go_their_own_way_outside() -> None:
    """Tasks are drawn the same every time, and what a rollout draws stays its own: it follows from what was drawn before."""
    drawn, after = [], []
    for start in (3, 3, 4):
        random.seed(start)
        np.random.seed(start)
        for index in (5, 5, 6):
            with seeded(7, "train", index):
                drawn.append((random.random(), np.random.random()))
            after.append((random.random(), np.random.random()))
    assert len(set(drawn)) == 2
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[:3] == drawn[3:6] == drawn[6:]
    assert after[:3] == after[3:6]
    assert len(set(after)) == 6
