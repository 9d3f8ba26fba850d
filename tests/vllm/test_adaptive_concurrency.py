"""Adaptive concurrency against a real vLLM whose cache is too small for what it is given."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from orchestrator.inference import AdaptiveConcurrency, FixedConcurrency, HealthPolicy
from tests.vllm.engine import VllmEngine
from tests.vllm.load import Load, build_pool, loaded

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MOST = 24
MAX_TOKENS = 400  # one cache block at the start, four at the end: 24 blocks hold six to ten rollouts
HEALTH = HealthPolicy(interval_s=0.25, progress_timeout_s=120.0, check_timeout_s=20.0)


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    log = tmp_path_factory.mktemp("vllm") / "small.log"
    engine = VllmEngine(log=log, options=["--num-gpu-blocks-override", "24"])
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@dataclass(frozen=True)
class Window:
    """What happened while a number of rollouts finished."""

    preemptions_per_rollout: float
    limits: list[int]


async def observe(load: Load, rollouts: int) -> Window:
    [endpoint] = load.pool.endpoints
    await load.until(lambda: endpoint.metrics is not None)
    assert endpoint.metrics is not None
    before, start = endpoint.metrics.preemptions, len(load.finished)
    limits: list[int] = []

    def enough() -> bool:
        limits.append(load.pool.limit)
        return len(load.finished) >= start + rollouts

    await load.until(enough)
    return Window((endpoint.metrics.preemptions - before) / rollouts, limits)


async def test_the_limit_settles_where_the_engine_hardly_preempts(small_engine: VllmEngine) -> None:
    """With all slots used the engine throws work away; steered by its metrics it stops doing so and keeps busy."""

    sampling = {"max_tokens": MAX_TOKENS}
    async with loaded(
        build_pool(small_engine, FixedConcurrency(MOST), HEALTH), limit=MOST, **sampling
    ) as load:
        await observe(load, MOST)
        fixed = await observe(load, MOST)
        assert load.failures == []
    steered = AdaptiveConcurrency(min_inflight=1, max_inflight=MOST, start_inflight=MOST, probe_s=20.0)
    async with loaded(build_pool(small_engine, steered, HEALTH), limit=MOST, **sampling) as load:
        await observe(load, 3 * MOST)
        settled = await observe(load, 3 * MOST)
        assert load.failures == []
    print(f"fixed: {fixed.preemptions_per_rollout:.2f} preemptions a rollout at {MOST}")
    print(
        f"adaptive: {settled.preemptions_per_rollout:.2f} a rollout at {min(settled.limits)}–{max(settled.limits)}"
    )
    assert fixed.preemptions_per_rollout > 0.3, "the load must provoke preemptions for this to say anything"
    assert settled.preemptions_per_rollout < 0.25 * fixed.preemptions_per_rollout
    assert min(settled.limits) >= 2
    assert max(settled.limits) <= 14
    assert max(settled.limits) - min(settled.limits) <= 6
