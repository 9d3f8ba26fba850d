"""Keeps a pool's engines busy with rollouts, booked by the versions that may have sampled them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from envs.errors import RolloutFailure
from envs.inference_client import InferenceClient, RetryPolicy
from envs.model import Model, ModelSettings
from envs.rollout import Rollout
from orchestrator.discovery import Membership, look_up
from orchestrator.inference import (
    AdaptiveConcurrency,
    Beginning,
    Endpoint,
    FixedConcurrency,
    HealthPolicy,
    InferencePool,
    build_weight_update,
)
from tests.vllm.engine import MODEL, START_TIMEOUT_S, VllmEngine

SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 48, "ignore_eos": True}


def build_pool(
    engine: VllmEngine, concurrency: FixedConcurrency | AdaptiveConcurrency, health: HealthPolicy
) -> InferencePool:
    """A pool of one engine whose weights can be updated."""
    return InferencePool(
        [engine.base_url],
        membership=Membership([], of="inference", listed=(), look=look_up),
        model=MODEL,
        update=build_weight_update("vllm"),
        sampling=None,
        concurrency=concurrency,
        api_key_env=None,
        version=0,
        weights_path=None,
        beginning=Beginning.ANY,
        check_weights=True,
        health=health,
        update_timeout_s=60.0,
        straggler_grace_s=30.0,
    )


@dataclass(frozen=True)
class Booked:
    """A finished rollout and the span of versions from its dispatch to its end."""

    rollout: Rollout
    version: int
    version_end: int


@dataclass(eq=False)
class Load:
    """As many single-turn rollouts as the pool allows, until `stopping`."""

    pool: InferencePool
    client: InferenceClient
    settings: ModelSettings
    finished: list[Booked] = field(default_factory=list)
    failures: list[RolloutFailure] = field(default_factory=list)
    stopping: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _count: int = 0

    async def run(self) -> None:
        self.pool.on_change = self._changed.set
        async with asyncio.TaskGroup() as group:
            while not self.stopping:
                self._changed.clear()
                while self.pool.inflight < self.pool.limit:
                    endpoint = self.pool.acquire(1)
                    assert endpoint is not None
                    group.create_task(self._one(endpoint, self._count))
                    self._count += 1
                await self._changed.wait()

    def stop(self) -> None:
        self.stopping = True
        self._changed.set()

    async def until(self, condition: Callable[[], bool], *, seconds: float = 240) -> None:
        """Wait until a condition holds that finished rollouts or the pool's watching bring about."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # conditions on a real engine have no event
                await asyncio.sleep(0.02)

    async def _one(self, endpoint: Endpoint, number: int) -> None:
        version = endpoint.version
        model = Model(
            self.settings,
            client=self.client,
            base_url=endpoint.url,
            session=f"task-{number}",
            cache_salt=f"v{version}",
        )
        try:
            await model.chat([{"role": "user", "content": f"question {number}: what is {number} plus 7?"}])
            rollout = model.rollout(reward=0.0)
            self.finished.append(Booked(rollout, version, endpoint.version_newest))
            self.pool.note_success(endpoint)
        except RolloutFailure as failure:
            self.failures.append(failure)
            self.pool.note_failure(endpoint, failure.kind)
        finally:
            self.pool.release(endpoint, 1)
            self._changed.set()


@asynccontextmanager
async def loaded(pool: InferencePool, *, limit: int, **sampling: Any) -> AsyncIterator[Load]:
    """A ready pool under load and watched; ends when the body does, after what is in flight has finished."""
    settings = ModelSettings(model=MODEL, sampling={**SAMPLING, **sampling})
    async with pool, InferenceClient(limit=limit, retry=RetryPolicy(max_attempts=1)) as client:
        await pool.wait_ready(START_TIMEOUT_S)
        load = Load(pool=pool, client=client, settings=settings)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pool.run())
            work = group.create_task(load.run())
            yield load
            load.stop()
            await work
            watching.cancel()
