"""Published versions: looked at before they count, loaded one after the other, and what comes of it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.inference import InferencePool, Weights, WeightUpdateError
from orchestrator.run.run import Run
from orchestrator.service.driver import Driver
from orchestrator.service.weights import VersionChecks, WeightLoader
from tests.support.waiting import until


class FakePool:
    """Inference servers that load when they are told to; `refuse` says why they do not."""

    def __init__(self) -> None:
        self.loaded = Weights(0, 0, None)
        self.version = 0
        self.asked: list[int] = []
        self.refuse: dict[int, str] = {}
        self.in_service = True
        self.awaits_initial = False
        self.refusal = ""
        self.go = asyncio.Event()
        self.go.set()

    async def check_version(self, version: int, path: str | None) -> None:
        if version in self.refuse:
            raise WeightUpdateError(self.refuse[version])

    async def update_weights(self, version: int, path: str | None) -> None:
        self.asked.append(version)
        await self.go.wait()
        if version in self.refuse:
            raise WeightUpdateError(self.refuse[version])
        self.version = version
        if self.in_service:
            self.load(version, path)

    def load(self, version: int, path: str | None) -> None:
        self.loaded = Weights(version, version, path)

    @property
    def settled(self) -> bool:
        return self.loaded.version == self.version and not self.awaits_initial


class FakeRun:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.version = 0
        self.weights = SimpleNamespace(loaded_path=None, newest=0, refused="")
        self.told: list[tuple[Any, ...]] = []

    def on_loaded(self, version: int, path: str | None, now: float) -> None:
        self.version, self.weights.loaded_path = version, path
        self.told.append(("loaded", version, path))

    def on_refused(self, version: int, why: str, now: float) -> None:
        self.told.append(("refused", version, why))


class Parts:
    """A loader between a pool and a run."""

    def __init__(self) -> None:
        self.pool, self.run = FakePool(), FakeRun()
        self.loader = WeightLoader(cast("InferencePool", self.pool))
        self.driver: Driver[Run] = Driver(
            cast("Run", self.run),
            train={},
            evals={},
            on_weights=self.loader.load,
            on_evaluation=lambda result: None,
            clock=lambda: 0.0,
        )


@asynccontextmanager
async def loading() -> AsyncIterator[Parts]:
    """The loader at work."""
    parts = Parts()
    task = asyncio.create_task(parts.loader.run(parts.driver))
    try:
        yield parts
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_version_is_loaded_and_told() -> None:
    """With where it lies, so that a later process finds it again."""
    async with loading() as parts:
        parts.loader.load(1, "step_1")
        await until(lambda: bool(parts.run.told))
    assert parts.run.told == [("loaded", 1, "step_1")]


async def test_versions_that_come_during_a_load_coalesce_to_the_newest() -> None:
    """Nobody samples from a version that is old before it is loaded."""
    async with loading() as parts:
        parts.pool.go.clear()
        parts.loader.load(1, "one")
        await until(lambda: parts.pool.asked == [1])
        parts.loader.load(2, "two")
        parts.loader.load(3, "three")
        parts.pool.go.set()
        await until(lambda: len(parts.run.told) == 2)
    assert parts.pool.asked == [1, 3]
    assert parts.run.told == [("loaded", 1, "one"), ("loaded", 3, "three")]


async def test_a_version_that_cannot_be_loaded_is_refused_and_the_next_one_loaded() -> None:
    """The loader goes on after a refusal."""
    async with loading() as parts:
        parts.pool.refuse[1] = "size mismatch"
        parts.loader.load(1, "bad")
        await until(lambda: bool(parts.run.told))
        parts.loader.load(2, "good")
        await until(lambda: len(parts.run.told) == 2)
    assert parts.run.told == [("refused", 1, "size mismatch"), ("loaded", 2, "good")]


async def test_a_server_that_comes_back_brings_the_version() -> None:
    """Published while none was in service: nothing is told before one has it."""
    async with loading() as parts:
        parts.pool.in_service = False
        parts.loader.load(1, "one")
        await until(lambda: parts.pool.version == 1)
        parts.loader.look(parts.driver)
        assert parts.run.told == []
        parts.pool.load(1, "one")
        parts.loader.look(parts.driver)
        parts.loader.look(parts.driver)
    assert parts.run.told == [("loaded", 1, "one")]


async def test_a_version_that_a_returning_server_refuses_is_refused_once() -> None:
    """The pool went back to what was loaded before; a run that waited for the version would wait for ever."""
    async with loading() as parts:
        parts.pool.in_service = False
        parts.loader.load(1, "one")
        await until(lambda: parts.pool.version == 1)
        await asyncio.sleep(0)
        parts.pool.version = 0
        parts.loader.look(parts.driver)
        parts.loader.look(parts.driver)
    assert parts.run.told == [("refused", 1, "no inference server could load it; version 0 stays")]


async def test_a_version_0_of_the_trainer_is_told_when_it_is_loaded_or_refused() -> None:
    """Its number is nothing new; the path is. A refused one leaves nothing to go back to."""
    async with loading() as parts:
        parts.pool.in_service, parts.pool.awaits_initial = False, True
        parts.loader.load(0, "bad")
        await until(lambda: bool(parts.run.told))
        parts.pool.awaits_initial = False
        parts.pool.load(0, "initial")
        parts.loader.look(parts.driver)
        parts.loader.look(parts.driver)
    refused = ("refused", 0, "no inference server could load it; another is waited for")
    assert parts.run.told == [refused, ("loaded", 0, "initial")]


async def test_versions_are_looked_at_one_after_the_other_and_each_is_answered() -> None:
    """An empty answer is a good one."""
    pool = FakePool()
    pool.refuse[2] = "it is not a folder"
    checks = VersionChecks(cast("InferencePool", pool), local=False)
    answers: list[tuple[int, str]] = []
    for version in (1, 2, 3):
        checks.ask(version, "somewhere", lambda why, version=version: answers.append((version, why)))  # type: ignore[misc]
    task = asyncio.create_task(checks.run())
    await until(lambda: len(answers) == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answers == [(1, ""), (2, "it is not a folder"), (3, "")]
