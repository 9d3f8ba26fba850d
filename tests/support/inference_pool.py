"""Pools of inference servers for tests: built with quick checks, watched for as long as a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.discovery import Membership, look_up
from orchestrator.inference import (
    Beginning,
    FixedConcurrency,
    HealthPolicy,
    InferencePool,
    WeightUpdate,
    build_weight_update,
)
from tests.support.inference_engine import ScriptedEngine

QUICK = HealthPolicy(interval_s=0.01, progress_timeout_s=120.0, check_timeout_s=5.0, probe_timeout_s=10.0)

Until = Callable[[Callable[[], object]], Awaitable[None]]


def build_pool(
    *engines: ScriptedEngine,
    urls: Sequence[str] = (),
    update: WeightUpdate | str = "none",
    limit: int = 12,
    **options: Any,
) -> InferencePool:
    """A pool of the engines, or of the URLs, with everything that a test does not name."""
    named: dict[str, Any] = {
        "membership": Membership([], of="inference", listed=(), look=look_up),
        "model": "tiny",
        "sampling": None,
        "concurrency": FixedConcurrency(limit),
        "api_key_env": None,
        "version": 0,
        "weights_path": None,
        "beginning": Beginning.OWN,
        "check_weights": True,
        "health": QUICK,
        "update_timeout_s": 60.0,
        "straggler_grace_s": 30.0,
    }
    recipe = build_weight_update(update) if isinstance(update, str) else update
    base_urls = urls or [engine.base_url for engine in engines]
    return InferencePool(base_urls, update=recipe, **(named | options))


async def until(condition: Callable[[], object]) -> None:
    """Return when a condition holds that watching brings about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # conditions on an engine and on the clock have no event
            await asyncio.sleep(0.002)


@asynccontextmanager
async def watched(pool: InferencePool) -> AsyncIterator[Until]:
    """A pool that is open already, watched; yields a way to wait for a condition on it."""
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(pool.run())
        try:
            yield until
        finally:
            watching.cancel()


@asynccontextmanager
async def running(pool: InferencePool) -> AsyncIterator[Until]:
    """The pool opened, ready and watched; yields a way to wait for a condition on it."""
    async with pool:
        await pool.wait_ready(10)
        async with watched(pool) as wait:
            yield wait


async def rounds(engine: ScriptedEngine, count: int = 1) -> None:
    """Return when an endpoint in service was checked this many times from beginning to end."""
    wanted = engine.calls.count("GET /health") + count + 1  # the first of them may have begun before
    await until(lambda: engine.calls.count("GET /health") >= wanted)
