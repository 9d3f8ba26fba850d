"""The inference pool: placement, readiness, loss and return, against real HTTP servers."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.discovery import Membership, look_up
from orchestrator.errors import ConfigError
from orchestrator.inference import (
    AdaptiveConcurrency,
    Beginning,
    Endpoint,
    EndpointState,
    EngineUnfitError,
    FixedConcurrency,
    InferenceError,
    InferencePool,
    build_weight_update,
)
from orchestrator.inference.blame import Blame
from tests.support.inference_engine import ScriptedEngine, folder_of_weights
from tests.support.inference_pool import QUICK, build_pool, rounds, running

METRICS = "vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total {tokens}\n"


def made_ready(count: int, limit: int = 12) -> InferencePool:
    """A pool whose endpoints are ready without servers behind them, for placement alone."""
    pool = build_pool(urls=[f"http://127.0.0.1:{port}/v1" for port in range(1, count + 1)], limit=limit)
    for endpoint in pool.endpoints:
        pool.enter(endpoint)
    return pool


async def test_groups_go_to_the_least_loaded_endpoint_and_ties_go_round() -> None:
    """Whole groups are placed where the least is in flight; equal ones take turns."""
    pool = made_ready(3)
    first, second, third = pool.endpoints
    assert [pool.acquire(2), pool.acquire(2), pool.acquire(2)] == [first, second, third]
    pool.release(second, 2)
    assert pool.acquire(4) is second
    assert pool.acquire(1) is third
    assert pool.acquire(1) is first
    assert pool.inflight == 2 + 4 + 2 + 1 + 1


async def test_the_share_of_the_limit_that_is_used_decides_not_the_number() -> None:
    """An endpoint that is allowed less is given less."""
    pool = made_ready(2)
    small, large = pool.endpoints
    pool.set_limit(small, 2)
    pool.set_limit(large, 8)
    for _ in range(10):
        pool.acquire(1)
    assert (small.inflight, large.inflight) == (2, 8)


async def test_nothing_is_placed_while_no_endpoint_is_ready() -> None:
    """An endpoint that is not ready gets no work, and the limit is zero without any."""
    pool = made_ready(1)
    pool.lose(pool.endpoints[0], "gone")
    assert pool.acquire(1) is None
    assert pool.limit == 0


async def test_releasing_more_than_is_in_flight_is_refused() -> None:
    """The count of rollouts in flight cannot go below zero unnoticed."""
    pool = made_ready(1)
    pool.acquire(2)
    with pytest.raises(ValueError, match="3 released, but only 2 in flight"):
        pool.release(pool.endpoints[0], 3)


@given(count=st.integers(1, 6), steps=st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=60))
def test_the_count_of_rollouts_in_flight_always_balances(count: int, steps: list[tuple[bool, int]]) -> None:
    """After any history the pool's count is the sum over its endpoints and equals acquired minus released."""
    pool = asyncio.run(_made_ready(count))
    held: list[tuple[Endpoint, int]] = []
    for take, n in steps:
        if take or not held:
            least = min(endpoint.inflight for endpoint in pool.endpoints)
            endpoint = pool.acquire(n)
            assert endpoint is not None
            assert endpoint.inflight - n == least
            held.append((endpoint, n))
        else:
            pool.release(*held.pop(len(held) // 2))
        assert (
            pool.inflight == sum(endpoint.inflight for endpoint in pool.endpoints) == sum(n for _, n in held)
        )


async def _made_ready(count: int) -> InferencePool:
    return made_ready(count, limit=6 * count)


async def test_an_endpoint_is_ready_only_once_it_is_well() -> None:
    """Readiness waits for a server that is still loading, without giving up at its first answers."""
    async with (
        ScriptedEngine(broken={"/health": 503}) as engine,
        build_pool(engine) as pool,
        asyncio.TaskGroup() as group,
    ):
        waiting = group.create_task(pool.wait_ready(20))
        await engine.wait_for(lambda: engine.calls.count("GET /health") >= 2)
        assert not waiting.done()
        assert pool.acquire(1) is None
        engine.broken.clear()
        await waiting
        assert pool.acquire(1) is pool.endpoints[0]
        assert pool.limit == 12


async def test_the_error_names_the_endpoint_and_what_it_said() -> None:
    """A wait that ends without any endpoint says which one, what was asked and what came back."""
    async with ScriptedEngine(broken={"/health": 503}) as engine, build_pool(engine) as pool:
        with pytest.raises(InferenceError) as caught:
            await pool.wait_ready(1.0)
    message = str(caught.value)
    assert engine.base_url in message
    assert 'GET /health answered 503: "/health is broken"' in message
    assert "inference.base_urls" in message


async def test_a_server_that_is_not_there_is_named_with_the_reason() -> None:
    """Nobody listening is said as such."""
    engine = ScriptedEngine()
    await engine.start()
    await engine.stop()
    async with build_pool(engine) as pool:
        with pytest.raises(InferenceError, match=f"{engine.port}.*cannot connect .Connection refused"):
            await pool.wait_ready(1.0)


async def test_a_server_of_another_model_is_an_error_at_once() -> None:
    """Waiting for a model that the server does not serve would be in vain; the message lists what it serves."""
    async with ScriptedEngine(model="other") as engine, build_pool(engine) as pool:
        with pytest.raises(EngineUnfitError, match='serves "other", not "tiny"'):
            await pool.wait_ready(1000)


async def test_a_vllm_without_its_administrative_endpoints_is_told_how_to_start() -> None:
    """The remedy is named before any rollout is made, not at the first published version."""
    async with ScriptedEngine(dev_mode=False) as engine, build_pool(engine, update="vllm") as pool:
        with pytest.raises(EngineUnfitError, match="VLLM_SERVER_DEV_MODE=1"):
            await pool.wait_ready(1000)


async def test_a_server_without_a_health_endpoint_is_asked_for_its_models() -> None:
    """Servers that only speak the OpenAI API can be used too."""
    async with ScriptedEngine(broken={"/health": 404}) as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        assert pool.ready == list(pool.endpoints)


async def test_the_ready_endpoints_are_enough_when_the_time_is_up() -> None:
    """One server that does not come up delays the start by the time limit and does not prevent it."""
    async with (
        ScriptedEngine() as good,
        ScriptedEngine(stuck={"/health"}) as bad,
        build_pool(good, bad) as pool,
    ):
        with structlog.testing.capture_logs() as logs:
            await pool.wait_ready(1.0)
        assert [endpoint.url for endpoint in pool.ready] == [good.base_url]
        assert pool.limit == 6
        assert [entry["endpoint"] for entry in logs if entry["event"] == "endpoint.missing"] == [bad.base_url]


async def test_a_late_endpoint_joins() -> None:
    """A server that was not there at the start gets work as soon as it is."""
    late = ScriptedEngine(broken={"/health": 503})
    async with ScriptedEngine() as good, late, build_pool(good, late) as pool, asyncio.TaskGroup() as group:
        await pool.wait_ready(1.0)
        watching = group.create_task(pool.run())
        joined = asyncio.Event()
        pool.on_change = lambda: joined.set() if len(pool.ready) == 2 else None
        late.broken.clear()
        async with asyncio.timeout(20):
            await joined.wait()
        watching.cancel()


async def test_an_endpoint_is_lost_after_several_failed_checks_and_returns() -> None:
    """Lost: no work, its share of the limit is gone, its rollouts are reported. Returned: all as before."""
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        pool = build_pool(first, second)
        lost: list[Endpoint] = []
        pool.on_lost = lost.append
        with structlog.testing.capture_logs() as logs:
            async with running(pool) as until:
                second.broken["/health"] = 500
                await until(lambda: len(pool.ready) == 1)
                assert second.calls.count("GET /health") >= QUICK.failures_allowed
                assert pool.limit == 6
                assert [pool.acquire(1), pool.acquire(1)] == [pool.endpoints[0]] * 2
                assert lost == [pool.endpoints[1]]
                assert "/health is broken" in pool.endpoints[1].error
                second.broken.clear()
                await until(lambda: len(pool.ready) == 2)
                assert pool.limit == 12
        events = [entry["event"] for entry in logs if entry["event"].startswith("endpoint.")]
        assert events == ["endpoint.lost", "endpoint.returned"]


async def test_a_few_failed_checks_are_no_loss() -> None:
    """A hiccup does not cost an engine its work, and what it complained about is forgotten once it is well."""
    async with ScriptedEngine() as engine:
        pool = build_pool(engine)
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            engine.upcoming["/health"] = [500, 500, 200, 500]
            await until(lambda: endpoint.error)
            assert endpoint.healthy
            await until(lambda: not engine.upcoming["/health"])
            await rounds(engine)
            assert (endpoint.healthy, endpoint.losses, endpoint.error) == (True, 0, "")


async def test_an_engine_that_was_restarted_has_the_current_weights_before_it_gets_work(
    tmp_path: Path,
) -> None:
    """A restarted engine serves its initial weights; it is brought to the published version first."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(3, str(weights))
            await engine.stop()
            await until(lambda: not pool.ready)
            engine.restart()
            engine.stuck.add("/collective_rpc")
            await engine.start()
            await engine.wait_for(lambda: "POST /collective_rpc" in engine.calls[-1:])
            assert pool.acquire(1) is None
            engine.unstick()
            await until(lambda: bool(pool.ready))
            assert (engine.weights, engine.label, pool.endpoints[0].version) == (str(weights), "3", 3)


async def test_a_restart_between_two_checks_is_noticed(tmp_path: Path) -> None:
    """An engine that comes back faster than a check would fail is known by the label that it lost."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="vllm")
        lost: list[str] = []
        pool.on_lost = lambda endpoint: lost.append(endpoint.error)
        async with running(pool) as until:
            await pool.update_weights(3, str(weights))
            engine.restart()
            await until(lambda: engine.weights == str(weights) and bool(pool.ready))
        assert len(lost) == 1
        assert "the engine was restarted" in lost[0]


async def test_a_version_published_while_an_engine_returns_reaches_it_too(tmp_path: Path) -> None:
    """An engine that is being admitted while a newer version is published enters with the newer one."""
    old, new = folder_of_weights(tmp_path, "old"), folder_of_weights(tmp_path, "new")
    async with ScriptedEngine(broken={"/health": 503}) as engine:
        pool = build_pool(engine, update="vllm", version=1, weights_path=str(old))
        async with pool, asyncio.TaskGroup() as group:
            engine.broken.clear()
            engine.stuck.add("/collective_rpc")
            ready = group.create_task(pool.wait_ready(20))
            await engine.wait_for(lambda: "POST /collective_rpc" in engine.calls[-1:])
            report = await pool.update_weights(2, str(new))
            assert report.updated == ()
            engine.unstick()
            await ready
            assert (engine.weights, pool.endpoints[0].version) == (str(new), 2)


async def test_a_resumed_run_brings_engines_to_its_version_before_they_are_ready(tmp_path: Path) -> None:
    """A service that continues at version 7 does not begin with whatever the engines have."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine(label="7", paused=True) as engine:
        async with build_pool(engine, update="vllm", version=7, weights_path=str(weights)) as pool:
            await pool.wait_ready(10)
        assert (engine.weights, engine.label, engine.paused) == (str(weights), "7", False)


async def test_an_engine_that_was_left_paused_is_resumed() -> None:
    """A service that was killed during an update leaves a paused engine, which would never answer a request."""
    async with ScriptedEngine(paused=True) as engine, build_pool(engine, update="vllm") as pool:
        await pool.wait_ready(10)
        assert not engine.paused


async def test_a_hung_engine_is_suspected_probed_and_lost_although_it_says_it_is_well() -> None:
    """Rollouts that fail in a row stop new work; a probe that does not come back makes it a loss."""
    async with ScriptedEngine(stuck={"/v1/chat/completions"}) as engine:
        pool = build_pool(engine, health=replace(QUICK, probe_timeout_s=0.2))
        async with running(pool) as until:
            endpoint = pool.endpoints[0]
            await until(lambda: pool.clock() >= endpoint.trusted_until)
            for _ in range(QUICK.suspect_after):
                pool.note_failure(endpoint, "timed_out")
            assert endpoint.state is EndpointState.SUSPECT
            assert pool.acquire(1) is None
            await until(lambda: endpoint.state is EndpointState.LOST)
            assert "finishes nothing" in endpoint.error
            engine.unstick()
            await until(lambda: endpoint.healthy)


async def test_a_suspect_that_finishes_a_request_is_cleared_without_a_loss() -> None:
    """Rollouts may fail for reasons of their own; an engine that answers a probe keeps its place."""
    async with ScriptedEngine() as engine:
        pool = build_pool(engine)
        async with running(pool) as until:
            endpoint = pool.endpoints[0]
            await until(lambda: pool.clock() >= endpoint.trusted_until)
            for _ in range(QUICK.suspect_after):
                pool.note_failure(endpoint, "timed_out")
            await until(lambda: endpoint.healthy)
            assert endpoint.losses == 0
            assert "POST /v1/chat/completions" in engine.calls


async def test_failures_between_successes_make_no_suspect() -> None:
    """Only failures in a row count."""
    pool = made_ready(1)
    [endpoint] = pool.endpoints
    endpoint.trusted_until = 0.0
    for _ in range(100):
        pool.note_failure(endpoint, "timed_out")
        pool.note_success(endpoint)
    assert endpoint.healthy


@pytest.mark.parametrize("gauge", [3, 0])
async def test_a_hung_engine_is_noticed_by_its_counters_before_any_rollout_times_out(gauge: int) -> None:
    """Tokens that are not made show it, whatever the engine's gauges last said."""
    now = [0.0]
    engine = ScriptedEngine(metrics=METRICS.format(running=gauge, tokens=50), stuck={"/v1/chat/completions"})
    async with engine:
        pool = build_pool(engine, clock=lambda: now[0])
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            pool.acquire(3)
            await rounds(engine)
            engine.metrics = METRICS.format(running=gauge, tokens=51)
            now[0] += QUICK.progress_timeout_s / 2
            await rounds(engine)
            now[0] += QUICK.progress_timeout_s
            await rounds(engine)
            assert endpoint.healthy
            now[0] += 1.0
            await until(lambda: endpoint.state is EndpointState.SUSPECT)
            assert "3 rollouts in flight, no progress for 121 s" in endpoint.error
            assert endpoint.out_since == now[0]


async def test_an_idle_engine_is_not_suspected() -> None:
    """No token is due where nothing of ours is in flight."""
    now = [0.0]
    engine = ScriptedEngine(metrics=METRICS.format(running=2, tokens=50))  # other clients' requests
    async with engine:
        pool = build_pool(engine, clock=lambda: now[0])
        async with running(pool):
            for _ in range(5):
                now[0] += QUICK.progress_timeout_s
                await rounds(engine)
                assert pool.endpoints[0].healthy


async def test_a_full_engine_that_makes_tokens_is_cleared_by_its_counters_alone() -> None:
    """An overloaded engine would not finish a probe in time, but its counters show that it works."""
    engine = ScriptedEngine(
        metrics=METRICS.format(running=3, tokens=50), broken={"/v1/chat/completions": 500}
    )
    async with engine:
        pool = build_pool(engine)
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            await until(lambda: endpoint.metrics is not None)
            engine.stuck.add("/health")
            await rounds_stand_still(engine)
            pool.suspect(endpoint, "test", Blame.NO_PROGRESS)
            engine.metrics = METRICS.format(running=3, tokens=60)
            engine.unstick()
            await until(lambda: endpoint.healthy)
            assert endpoint.losses == 0


async def rounds_stand_still(engine: ScriptedEngine) -> None:
    """Return when the next check waits for its first answer."""
    await engine.wait_for(lambda: engine.calls[-1] == "GET /health" and "/health" in engine.stuck)


def has_grown(limits: list[int], steps: int) -> bool:
    return len(limits) >= steps


async def test_the_limit_follows_the_engines_metrics() -> None:
    """Adaptive concurrency reads the engine, moves the limit and tells the dispatcher."""
    engine = ScriptedEngine(metrics=METRICS.format(running=4, tokens=0))
    async with engine:
        pool = build_pool(engine, concurrency=AdaptiveConcurrency(min_inflight=4, max_inflight=64))
        async with running(pool) as until:
            limits: list[int] = []
            pool.on_change = lambda: limits.append(pool.limit)
            for steps in (1, 2, 3):
                pool.acquire(pool.limit - pool.inflight)
                await until(partial(has_grown, limits, steps))
            assert limits == [6, 9, 13]
            engine.broken["/metrics"] = 500
            await rounds(engine)
            pool.acquire(pool.limit - pool.inflight)
            await rounds(engine)
            assert limits == [6, 9, 13]
            assert pool.endpoints[0].healthy
            assert "/metrics is broken" in pool.endpoints[0].error


async def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers behind a key are asked with it; it comes from an environment variable, not from the config."""
    monkeypatch.setenv("POOL_TEST_KEY", "sesame")
    async with (
        ScriptedEngine(token="sesame") as engine,
        build_pool(engine, api_key_env="POOL_TEST_KEY") as pool,
    ):
        await pool.wait_ready(10)
    monkeypatch.delenv("POOL_TEST_KEY")
    with pytest.raises(ConfigError, match="POOL_TEST_KEY, which is not set"):
        build_pool(engine, api_key_env="POOL_TEST_KEY")


@pytest.mark.parametrize("urls", [[], ["http://a/v1", "http://a/v1/"]], ids=["none", "twice"])
async def test_a_list_of_servers_that_cannot_be_meant_is_refused(urls: list[str]) -> None:
    """No server at all, or one named twice, is a mistake in the config."""
    with pytest.raises(ConfigError, match=r"inference\.base_urls"):
        InferencePool(
            urls,
            membership=Membership([], of="inference", listed=(), look=look_up),
            model="m",
            update=build_weight_update("none"),
            sampling=None,
            concurrency=FixedConcurrency(1),
            api_key_env=None,
            version=0,
            weights_path=None,
            beginning=Beginning.OWN,
            check_weights=True,
            health=QUICK,
            update_timeout_s=1.0,
            straggler_grace_s=1.0,
        )
