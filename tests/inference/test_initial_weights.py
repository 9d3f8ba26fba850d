"""What engines serve before anything was published: their own weights, a named folder, or the trainer's version 0."""

from pathlib import Path

import pytest
import structlog

from orchestrator.errors import ConfigError
from orchestrator.inference import Beginning, EndpointState, EngineRefusedError
from tests.support.inference_engine import ScriptedEngine, folder_of_weights
from tests.support.inference_pool import build_pool, running, until, watched


@pytest.mark.parametrize("recipe", ["vllm", "sglang"])
async def test_weights_that_another_run_left_behind_are_refused(recipe: str) -> None:
    """A run that starts with version 0 on an engine with another run's weights would learn from the wrong policy."""
    async with ScriptedEngine(label="41") as engine, build_pool(engine, update=recipe) as pool:
        with pytest.raises(
            EngineRefusedError, match='has the weights "41" of another run; restart it'
        ) as caught:
            await pool.wait_ready(1000)
    assert caught.value.exit_code == ConfigError.exit_code
    assert "inference.initial_weights" in str(caught.value)


async def test_an_engine_with_foreign_weights_is_not_mixed_in() -> None:
    """The others do the work; it enters when it was restarted."""
    async with (
        ScriptedEngine() as own,
        ScriptedEngine(label="41", weights="foreign") as foreign,
        build_pool(own, foreign, update="vllm") as pool,
        watched(pool),
    ):
        await pool.wait_ready(1000)
        assert [pool.acquire(1), pool.acquire(1)] == [pool.endpoints[0]] * 2
        assert "of another run" in pool.endpoints[1].error
        foreign.restart()
        await until(lambda: pool.endpoints[1].healthy)


async def test_an_engine_that_joins_later_with_foreign_weights_stays_out() -> None:
    """It may have been lent to another run meanwhile."""
    async with ScriptedEngine() as engine, build_pool(engine, update="vllm") as pool:
        await pool.wait_ready(10)
        [endpoint] = pool.endpoints
        engine.label = "7"
        pool.lose(endpoint, "gone")
        async with watched(pool):
            await until(lambda: "of another run" in endpoint.error)
            assert not pool.ready


async def test_an_engine_without_labels_is_warned_of() -> None:
    """Nobody can know; the log says what would make it certain."""
    engine = ScriptedEngine(broken={"/weight_info": 404})
    with structlog.testing.capture_logs() as logs:
        async with engine, build_pool(engine, update="vllm") as pool:
            await pool.wait_ready(10)
    [warning] = [entry for entry in logs if entry["event"] == "endpoint.unlabelled_weights"]
    assert "inference.initial_weights" in warning["remedy"]


async def test_an_evaluation_takes_the_weights_that_are_there() -> None:
    """Those of a run that has just ended, perhaps."""
    async with (
        ScriptedEngine(label="500") as engine,
        build_pool(engine, update="vllm", beginning=Beginning.ANY) as pool,
    ):
        await pool.wait_ready(10)
        assert engine.label == "500"


async def test_initial_weights_are_loaded_into_every_engine(tmp_path: Path) -> None:
    """Whatever an engine had before, it serves the named folder as version 0 before it gets work."""
    folder = folder_of_weights(tmp_path)
    async with (
        ScriptedEngine() as own,
        ScriptedEngine(label="41", weights="foreign") as foreign,
        running(build_pool(own, foreign, update="vllm", weights_path=str(folder))) as wait,
    ):
        assert {(engine.weights, engine.label) for engine in (own, foreign)} == {(str(folder), "0")}
        own.restart()
        await wait(lambda: (own.weights, own.label) == (str(folder), "0"))


async def test_the_trainers_version_0_is_waited_for_and_loaded_into_every_engine(tmp_path: Path) -> None:
    """No engine gets work before, whatever it has; afterwards all serve it."""
    folder = folder_of_weights(tmp_path)
    async with ScriptedEngine() as own, ScriptedEngine(label="41") as foreign:
        pool = build_pool(own, foreign, update="vllm", beginning=Beginning.TRAINER)
        async with pool, watched(pool):
            await pool.wait_ready(1000)
            assert pool.awaits_initial
            assert not pool.ready
            assert "waits for the trainer to publish version 0" in pool.explain()
            await pool.update_weights(0, str(folder))
            await until(lambda: len(pool.ready) == 2)
            assert not pool.awaits_initial
            assert {(engine.weights, engine.label) for engine in (own, foreign)} == {(str(folder), "0")}
            assert (pool.loaded.version, pool.loaded.path) == (0, str(folder))


async def test_a_version_0_that_no_engine_loads_is_waited_for_again(tmp_path: Path) -> None:
    """The engines have no weights to go back to."""
    bad, good = folder_of_weights(tmp_path, "bad"), folder_of_weights(tmp_path, "good")
    async with ScriptedEngine(refused={str(bad)}) as engine:
        pool = build_pool(engine, update="vllm", beginning=Beginning.TRAINER)
        async with pool, watched(pool):
            await pool.wait_ready(1000)
            await pool.update_weights(0, str(bad))
            await until(lambda: pool.awaits_initial)
            assert pool.endpoints[0].state is EndpointState.STARTING
            await pool.update_weights(0, str(good))
            await until(lambda: pool.ready)
            assert engine.weights == str(good)
