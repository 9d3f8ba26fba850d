"""Versions that no engine can load: the run goes on with the weights that were loaded last, and says what is missing."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog

from orchestrator.inference import EndpointState, WeightUpdateError
from tests.support.inference_engine import ScriptedEngine, folder_of_weights
from tests.support.inference_pool import build_pool, running, until, watched


@pytest.mark.parametrize("kind", ["missing", "short", "none", "nul", "nobody"])
async def test_a_published_path_is_looked_at_before_anything_is_counted(tmp_path: Path, kind: str) -> None:
    """The trainer is told what is wrong with its path; no engine was asked and nothing has changed."""
    short = folder_of_weights(tmp_path, "short") / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-1])
    paths = {"none": None, "nul": "/a\0b", "nobody": "~no-such-user/x"}
    async with ScriptedEngine() as engine, build_pool(engine, update="vllm") as pool:
        await pool.wait_ready(10)
        before = list(engine.calls)
        with pytest.raises(WeightUpdateError, match="version 4"):
            await pool.check_version(4, paths.get(kind, str(tmp_path / kind)))
        assert engine.calls == before
        assert (pool.version, pool.loaded.version) == (0, 0)
        await pool.check_version(4, str(folder_of_weights(tmp_path, "good")))


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_version_that_every_engine_refuses_is_given_up_for_the_last_loaded_one(
    tmp_path: Path, engines: int
) -> None:
    """The engines return to service with the weights before; the caller learns why the version was refused."""
    good, bad = folder_of_weights(tmp_path, "good"), folder_of_weights(tmp_path, "bad")
    newer = folder_of_weights(tmp_path, "newer")
    async with ScriptedEngine(refused={str(bad)}) as first, ScriptedEngine(refused={str(bad)}) as second:
        used = [first, second][:engines]
        pool = build_pool(*used, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(good))
            with pytest.raises(WeightUpdateError, match=r"version 2 .*version 1 stays .*size mismatch"):
                await pool.update_weights(2, str(bad))
            assert (pool.version, pool.loaded.version, pool.loaded.path) == (1, 1, str(good))
            await until(lambda: len(pool.ready) == engines)
            assert [engine.weights for engine in used] == [str(good)] * engines
            assert {(endpoint.version, endpoint.version_newest) for endpoint in pool.endpoints} == {(1, 1)}
            assert pool.missing_weights == ""
            await pool.update_weights(3, str(newer))
            assert (pool.version, pool.loaded.version) == (3, 3)
            assert [engine.weights for engine in used] == [str(newer)] * engines


async def test_a_version_is_refused_although_one_engine_tries_again_while_another_is_still_at_it(
    tmp_path: Path,
) -> None:
    """Engines fail one after the other, and the first is back before the last has failed: the caller is told."""
    good, bad = folder_of_weights(tmp_path, "good"), folder_of_weights(tmp_path, "bad")
    async with ScriptedEngine(refused={str(bad)}) as quick, ScriptedEngine(refused={str(bad)}) as slow:
        pool = build_pool(quick, slow, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(good))
            slow.stuck.add("/collective_rpc")
            update = asyncio.create_task(pool.update_weights(2, str(bad)))
            await until(lambda: pool.endpoints[0].retries >= 1)
            quick.stuck.add("/collective_rpc")
            await until(lambda: pool.endpoints[0].updating)
            slow.unstick()
            await until(lambda: pool.endpoints[1].state is EndpointState.LOST)
            quick.unstick()
            with pytest.raises(WeightUpdateError, match="version 1 stays"):
                await update
            await until(lambda: len(pool.ready) == 2)
            assert (quick.weights, slow.weights, pool.version) == (str(good), str(good), 1)


async def test_an_engine_goes_back_to_the_weights_it_was_started_with(tmp_path: Path) -> None:
    """Before anything was loaded there is no path to go back to: the engine's own weights are version 0."""
    bad = folder_of_weights(tmp_path, "bad")
    async with ScriptedEngine(refused={str(bad)}) as engine:
        pool = build_pool(engine, update="vllm")
        async with running(pool) as until:
            with pytest.raises(WeightUpdateError, match="version 0 stays"):
                await pool.update_weights(1, str(bad))
            await until(lambda: pool.ready)
            assert (engine.weights, pool.version, pool.endpoints[0].version) == ("initial", 0, 0)


async def test_a_version_that_vanishes_before_it_is_loaded_costs_no_engine_its_work(tmp_path: Path) -> None:
    """Engines that were not touched stay in service with the old weights."""
    good, gone = folder_of_weights(tmp_path, "good"), folder_of_weights(tmp_path, "gone")
    async with ScriptedEngine() as engine, build_pool(engine, update="vllm") as pool:
        await pool.wait_ready(10)
        await pool.update_weights(1, str(good))
        [endpoint] = pool.endpoints
        # The version is looked at when it is published, and again when the engine's turn comes.
        await endpoint.lock.acquire()
        update = asyncio.create_task(pool.update_weights(2, str(gone)))
        await until(lambda: pool.version == 2)
        shutil.rmtree(gone)
        endpoint.lock.release()
        with pytest.raises(WeightUpdateError, match="is not a folder"):
            await update
        assert (endpoint.healthy, endpoint.losses, pool.version) == (True, 0, 1)
        assert engine.weights == str(good)


async def test_a_version_that_a_returning_engine_refuses_is_given_up_too(tmp_path: Path) -> None:
    """Published while no engine was there, refused by the first that comes: it returns with the weights before."""
    good, bad = folder_of_weights(tmp_path, "good"), folder_of_weights(tmp_path, "bad")
    async with ScriptedEngine(refused={str(bad)}) as engine:
        pool = build_pool(engine, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(good))
            await engine.stop()
            await until(lambda: not pool.ready)
            engine.restart()
            report = await pool.update_weights(2, str(bad))
            assert report.updated == ()
            assert (pool.version, pool.loaded.version) == (2, 1)
            with structlog.testing.capture_logs() as logs:
                await engine.start()
                await until(lambda: pool.ready)
            assert (engine.weights, pool.version, pool.loaded.version) == (str(good), 1, 1)
        assert [entry["version"] for entry in logs if entry["event"] == "weights.refused"] == [2]


async def test_a_version_is_not_given_up_while_an_engine_is_on_its_way_to_it(tmp_path: Path) -> None:
    """The only engine in service fails, but another one that is coming back can load it: that one serves it."""
    old, new = folder_of_weights(tmp_path, "old"), folder_of_weights(tmp_path, "new")
    async with ScriptedEngine(refused={str(new)}) as first, ScriptedEngine() as second:
        pool = build_pool(first, second, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(old))
            second.restart()
            second.stuck.add("/collective_rpc")
            await until(lambda: pool.endpoints[1].updating)
            update = asyncio.create_task(pool.update_weights(2, str(new)))
            await until(lambda: pool.endpoints[0].state is EndpointState.LOST)
            assert (pool.version, pool.loaded.version) == (2, 1)
            second.unstick()
            report = await update
            assert (report.updated, list(report.failed)) == ((), [first.base_url])
            await until(lambda: pool.ready)
            assert [endpoint.url for endpoint in pool.ready] == [second.base_url]
            assert (second.weights, pool.version, pool.loaded.version) == (str(new), 2, 2)
            await until(lambda: "size mismatch" in pool.endpoints[0].error)
            assert pool.missing_weights == ""


async def test_a_version_is_not_given_up_while_its_folder_is_looked_at_for_an_engine(tmp_path: Path) -> None:
    """An engine on its way back counts from the beginning, however long the disk takes before it is told to load."""
    old, new = folder_of_weights(tmp_path, "old"), folder_of_weights(tmp_path, "new")
    disk, slow = ThreadPoolExecutor(1), threading.Event()
    asyncio.get_running_loop().set_default_executor(disk)
    async with ScriptedEngine(refused={str(new)}) as first, ScriptedEngine() as second:
        pool = build_pool(first, second, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(old))
            second.restart()
            second.broken["/health"] = 500
            await until(lambda: pool.endpoints[1].state is EndpointState.LOST)
            first.stuck.add("/collective_rpc")
            update = asyncio.create_task(pool.update_weights(2, str(new)))
            await until(lambda: pool.endpoints[0].updating)
            disk.submit(slow.wait)
            del second.broken["/health"]
            await until(pool.endpoints[1].lock.locked)
            first.unstick()
            await until(lambda: pool.endpoints[0].state is EndpointState.LOST)
            slow.set()
            report = await update
            assert (report.updated, list(report.failed)) == ((), [first.base_url])
            await until(lambda: pool.ready)
            assert (second.weights, pool.version, pool.loaded.version) == (str(new), 2, 2)


async def test_a_version_counts_as_loaded_only_once_an_engine_has_it(tmp_path: Path) -> None:
    """Published while no engine was there, it is asked for; it is loaded when the first has come back with it."""
    good, new = folder_of_weights(tmp_path, "good"), folder_of_weights(tmp_path, "new")
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(good))
            await engine.stop()
            await until(lambda: not pool.ready)
            await pool.update_weights(2, str(new))
            assert (pool.version, pool.loaded.version, pool.endpoints[0].version) == (2, 1, 1)
            await engine.start()
            await until(lambda: pool.ready)
            assert (pool.loaded.version, pool.loaded.path, engine.weights) == (2, str(new), str(new))


async def test_a_run_whose_checkpoint_was_deleted_starts_and_waits_for_a_better_version(
    tmp_path: Path,
) -> None:
    """The engines that answer and fit are waited for, stay out with the reason, and enter with the next version."""
    gone = tmp_path / "step_12"
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="vllm", version=12, weights_path=str(gone))
        async with pool:
            await pool.wait_ready(10)
            [endpoint] = pool.endpoints
            said = f"version 12: {gone} is not a folder; publish a newer version, or put it back"
            assert (endpoint.state, endpoint.error) == (EndpointState.STARTING, said)
            assert pool.missing_weights == said
            assert pool.explain() == f"no inference endpoint is in service: {engine.base_url}: {said}"
            async with watched(pool) as until:
                await until(lambda: endpoint.retries >= 3)
                assert (pool.acquire(1), engine.weights) == (None, "initial")
                await pool.update_weights(13, str(folder_of_weights(tmp_path, "step_13")))
                await until(lambda: pool.ready)
            assert (engine.label, endpoint.version, pool.loaded.version) == ("13", 13, 13)
            assert (pool.missing_weights, pool.explain(), endpoint.error) == ("", "", "")


async def test_a_deleted_checkpoint_that_is_put_back_is_enough(tmp_path: Path) -> None:
    """Nobody has to publish anything when the folder is there again."""
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="vllm", version=12, weights_path=str(tmp_path / "step_12"))
        async with pool:
            await pool.wait_ready(10)
            async with watched(pool) as until:
                folder_of_weights(tmp_path, "step_12")
                await until(lambda: pool.ready)
            assert (engine.label, pool.endpoints[0].version) == ("12", 12)


async def test_a_start_does_not_wait_for_ever_for_weights_that_the_engine_refuses() -> None:
    """Where only the engines see the folder, it is the engine that says that it is not there."""
    async with ScriptedEngine(refused={"/there/step_12"}) as engine:
        pool = build_pool(
            engine, update="vllm", version=12, weights_path="/there/step_12", check_weights=False
        )
        async with pool:
            await pool.wait_ready(1000)
            assert "version 12 was not loaded" in pool.missing_weights
            assert "size mismatch" in pool.endpoints[0].error
            async with watched(pool) as until:
                await pool.update_weights(13, "/there/step_13")
                await until(lambda: pool.ready)
            assert (pool.loaded.version, pool.missing_weights) == (13, "")


async def test_a_server_that_does_not_answer_is_still_waited_for_beside_one_without_weights(
    tmp_path: Path,
) -> None:
    """Missing weights end the wait for the engine that lacks them, not for one that is not there yet."""
    async with ScriptedEngine() as there, ScriptedEngine(broken={"/health": 503}) as late:
        pool = build_pool(there, late, update="vllm", version=12, weights_path=str(tmp_path / "gone"))
        async with pool, asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.wait_ready(1000))
            await late.wait_for(lambda: late.calls.count("GET /health") >= 4)
            assert not waiting.done()
            late.broken.clear()
            await waiting
            assert ["is not a folder" in endpoint.error for endpoint in pool.endpoints] == [True, True]


async def test_an_engine_that_restarts_while_it_is_out_loads_the_weights_again(tmp_path: Path) -> None:
    """Loaded, but not in service for want of an answer: by the time that it answers it may be another process."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="vllm")
        async with running(pool) as until:
            await pool.update_weights(1, str(weights))
            engine.broken["/v1/chat/completions"] = 500
            pool.lose(pool.endpoints[0], "test")
            await until(lambda: pool.endpoints[0].retries >= 1)
            assert "is broken" in pool.endpoints[0].error
            engine.restart()
            engine.broken.clear()
            await until(lambda: pool.ready)
            assert (engine.weights, engine.label) == (str(weights), "1")
