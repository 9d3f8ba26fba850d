"""Inference servers that come and go while a run goes on, and limits that change, against real HTTP servers."""

from pathlib import Path

from orchestrator.inference import AdaptiveConcurrency, Endpoint
from tests.support.inference_engine import ScriptedEngine, folder_of_weights
from tests.support.inference_pool import build_pool, rounds, running


async def test_an_added_server_joins_with_the_newest_weights(tmp_path: Path) -> None:
    """It is probed and loaded before it gets work, and the limit is shared anew."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        pool = build_pool(first, update="vllm", limit=12)
        async with running(pool) as wait:
            await pool.update_weights(3, str(weights))
            assert pool.refuse_add(second.base_url) == ""
            pool.add_endpoint(second.base_url)
            assert [endpoint.healthy for endpoint in pool.endpoints] == [True, False]
            assert pool.limit == 12, "who has not joined takes nothing away"
            await wait(lambda: len(pool.ready) == 2)
            assert (second.weights, pool.endpoints[1].version) == (str(weights), 3)
            assert [endpoint.limit for endpoint in pool.endpoints] == [6, 6]
            assert pool.limit == 12
            assert {pool.acquire(1), pool.acquire(1)} == set(pool.endpoints)
            await pool.update_weights(4, str(weights))
            assert {endpoint.version for endpoint in pool.endpoints} == {4}


async def test_a_removed_server_is_gone_with_its_last_rollout() -> None:
    """It gets no new work, not even of a group that is there, and is not asked for its health any more."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        pool = build_pool(first, second, limit=12)
        async with running(pool) as wait:
            kept, leaving = pool.endpoints
            assert {pool.acquire(2), pool.acquire(2)} == {kept, leaving}
            pool.remove_endpoint(leaving.url)
            assert pool.endpoints == [kept, leaving]
            assert "rollouts on it end" in leaving.error
            assert (pool.ready, pool.limit) == ([kept], 12)
            assert pool.acquire(1, leaving) is kept
            await rounds(second, 2)
            pool.release(leaving, 2)
            assert pool.endpoints == [kept]
            await rounds(first, 3)
            asked = second.calls.count("GET /health")
            await rounds(first, 3)
            assert second.calls.count("GET /health") == asked
            await wait(lambda: not pool._tasks.get(leaving))


async def test_a_removed_server_that_dies_gives_its_rollouts_back() -> None:
    """They are asked again elsewhere, and then it is gone."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        pool = build_pool(first, second)
        lost: list[Endpoint] = []

        def give_back(endpoint: Endpoint) -> None:
            lost.append(endpoint)
            pool.release(endpoint, endpoint.inflight)

        pool.on_lost = give_back
        async with running(pool) as wait:
            kept, leaving = pool.endpoints
            pool.acquire(1)
            pool.acquire(1)
            pool.remove_endpoint(leaving.url)
            await second.stop()
            await wait(lambda: pool.endpoints == [kept])
            assert lost == [leaving]


async def test_a_server_that_is_added_again_while_it_leaves_stays() -> None:
    """Its rollouts go on, and it gets new ones."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        pool = build_pool(first, second)
        async with running(pool):
            leaving = pool.endpoints[1]
            pool.acquire(1)
            pool.acquire(1)
            pool.remove_endpoint(leaving.url)
            assert pool.refuse_add(leaving.url) == ""
            pool.add_endpoint(leaving.url)
            assert (leaving.healthy, leaving.error) == (True, "")
            pool.release(leaving, 1)
            assert len(pool.endpoints) == 2


async def test_what_cannot_be_added_or_removed_is_refused_with_the_reason() -> None:
    """Neither the last one goes, nor the only one that works."""
    async with ScriptedEngine() as first, ScriptedEngine(model="another") as unfit:
        pool = build_pool(first)
        async with running(pool) as wait:
            assert "is one of the inference servers already" in pool.refuse_add(first.base_url)
            assert "is not an http:// or https:// address" in pool.refuse_add("ftp://x/v1")
            assert "did you mean" in pool.refuse_add("http://host:8000")
            assert "is the last inference server" in pool.refuse_remove(first.base_url)
            assert "there is no inference server http://x/v1" in pool.refuse_remove("http://x/v1")
            pool.add_endpoint(unfit.base_url)
            await wait(lambda: "another" in pool.endpoints[1].error)
            assert (pool.ready, pool.limit) == ([pool.endpoints[0]], 12)
            pool.set_max_inflight(10)
            assert pool.limit == 10
            assert "is the only inference server in service" in pool.refuse_remove(first.base_url)
            assert pool.refuse_remove(unfit.base_url) == ""
            pool.remove_endpoint(unfit.base_url)
            assert len(pool.endpoints) == 1


async def test_the_limit_of_all_servers_can_be_changed() -> None:
    """In even shares; an adaptive one stays within its new bounds."""
    urls = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]
    fixed = build_pool(urls=urls, limit=12)
    for endpoint in fixed.endpoints:
        fixed.enter(endpoint)
    assert "1 <= min <= max" in fixed.refuse_max_inflight(0)
    fixed.set_max_inflight(5)
    assert [endpoint.limit for endpoint in fixed.endpoints] == [3, 2]
    assert fixed.limit == 5
    bounds = AdaptiveConcurrency(min_inflight=8, max_inflight=64, start_inflight=40)
    adaptive = build_pool(urls=urls, concurrency=bounds)
    for endpoint in adaptive.endpoints:
        adaptive.enter(endpoint)
    assert "got 8 and 4" in adaptive.refuse_max_inflight(4)
    adaptive.set_max_inflight(20)
    assert adaptive.limit == 20
    adaptive.set_max_inflight(100)
    assert adaptive.limit == 20, "it grows by itself"
