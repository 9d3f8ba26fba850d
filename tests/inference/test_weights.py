"""Weight updates: the calls that each recipe makes, and what becomes of engines that fail."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import structlog

from orchestrator.errors import ConfigError
from orchestrator.inference import (
    EndpointState,
    EngineApi,
    InferencePool,
    UpdateRequest,
    WeightUpdate,
    WeightUpdateError,
    build_weight_update,
)
from tests.support import inference_pool
from tests.support.inference_engine import ScriptedEngine, folder_of_weights, safetensors
from tests.support.inference_pool import rounds, running, watched

seen: list[UpdateRequest] = []


async def custom_update(request: UpdateRequest) -> None:
    """A user's own recipe, named by "module:attr"."""
    seen.append(request)
    await request.engine.post("/pause", query={"mode": "wait"})


async def failing_update(request: UpdateRequest) -> None:
    """A user's own recipe with a bug."""
    raise KeyError("rank 3")


puzzling: set[str] = set()
"""Engines, and folders, that the recipe below does not know what to make of."""


async def admit_careless(engine: EngineApi) -> None:
    assert engine.url not in puzzling


async def read_careless(engine: EngineApi) -> str | None:
    label: str = (await engine.get("/weight_info"))[
        "no such key" if engine.url in puzzling else "weight_version"
    ]
    return label


def look_careless(folder: Path) -> str:
    return {name: "" for name in [str(folder)] if name not in puzzling}[str(folder)]


careless = WeightUpdate(
    name="careless",
    apply=build_weight_update("vllm").apply,
    needs_path=True,
    admit=admit_careless,
    read_label=read_careless,
    find_problem=look_careless,
)
"""A user's own recipe with a bug in every other part."""


not_callable = 3


def build_pool(
    *engines: ScriptedEngine, update: WeightUpdate | str = "vllm", **options: Any
) -> InferencePool:
    return inference_pool.build_pool(*engines, update=update, **options)


def administrative(engine: ScriptedEngine) -> list[str]:
    """The calls that change an engine."""
    return [call for call in engine.calls if call.startswith("POST") and "chat" not in call]


async def test_vllm_freezes_reloads_labels_and_goes_on_in_this_order(tmp_path: Path) -> None:
    """Requests in flight are kept, caches are cleared, and the label changes while nothing is sampled."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        report = await pool.update_weights(1, str(weights))
        assert administrative(engine) == [
            "POST /pause keep",
            "POST /collective_rpc",
            "POST /update_weight_version",
            "POST /resume",
        ]
        assert (engine.weights, engine.label, engine.weights_while_paused) == (str(weights), "1", [True])
        assert (report.version, report.updated, report.failed) == (1, (engine.base_url,), {})
        assert not report.superseded
        assert (pool.version, pool.endpoints[0].version) == (1, 1)


async def test_a_version_of_another_model_is_refused_and_the_last_one_stays(tmp_path: Path) -> None:
    """Engines may take one whose tensors have other names or shapes, and sample from something that nobody has trained."""
    first, other = folder_of_weights(tmp_path, "first"), folder_of_weights(tmp_path, "other")
    (other / "model.safetensors").write_bytes(safetensors(32))
    async with ScriptedEngine() as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        await pool.update_weights(1, str(first))
        with pytest.raises(WeightUpdateError, match=r"version 2: .*other is of another model: its \"w\" is"):
            await pool.check_version(2, str(other))
        assert (engine.weights, pool.version) == (str(first), 1)


async def test_a_bug_in_a_recipe_of_the_users_own_costs_an_engine_or_a_version_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in its `apply` does: what it raises is said of the engine, or of the folder."""
    monkeypatch.setattr(f"{__name__}.puzzling", set())
    folder = str(folder_of_weights(tmp_path))
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        pool = build_pool(one, other, update=f"{__name__}:careless")
        async with running(pool) as wait:
            await pool.update_weights(1, folder)
            puzzling.add(one.base_url)
            await wait(lambda: [endpoint.url for endpoint in pool.ready] == [other.base_url])
            await wait(
                lambda: "admit of weight update careless raised AssertionError" in pool.endpoints[0].error
            )
            puzzling.add(folder)
            with pytest.raises(
                WeightUpdateError, match=r"find_problem of weight update careless raised KeyError"
            ):
                await pool.check_version(2, folder)
            puzzling.clear()
            await wait(lambda: len(pool.ready) == 2)


async def test_sglang_aborts_loads_with_a_flushed_cache_and_goes_on(tmp_path: Path) -> None:
    """The same in SGLang's words; its cache can be flushed only when it has no request, waiting ones included."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine, build_pool(engine, update="sglang") as pool:
        await pool.wait_ready(10)
        engine.calls.clear()
        await pool.update_weights(1, str(weights))
        assert administrative(engine) == [
            "POST /pause_generation abort",
            "POST /update_weights_from_disk",
            "POST /continue_generation",
        ]
        assert (engine.weights, engine.label, engine.paused) == (str(weights), "1", False)


async def test_an_sglang_that_refuses_weights_is_resumed_and_taken_out(tmp_path: Path) -> None:
    """What SGLang says about the failure is reported; requests in flight do not go on with unknown weights."""
    weights = folder_of_weights(tmp_path, "bad")
    async with ScriptedEngine() as engine, build_pool(engine, update="sglang") as pool:
        await pool.wait_ready(10)
        with pytest.raises(WeightUpdateError, match="shapes differ"):
            await pool.update_weights(1, str(weights))
        assert (engine.aborted, engine.paused) == (2, False)
        assert not pool.ready


async def test_a_restarted_sglang_is_known_by_its_label(tmp_path: Path) -> None:
    """SGLang's label is read back like vLLM's."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine:
        pool = build_pool(engine, update="sglang")
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            await pool.update_weights(1, str(weights))
            await rounds(engine)
            assert endpoint.losses == 0
            engine.restart()
            await until(lambda: endpoint.losses == 1)
            await until(lambda: endpoint.healthy)
            assert engine.weights == str(weights)


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "none"])
async def test_weights_that_cannot_be_loaded_touch_no_engine(tmp_path: Path, kind: str) -> None:
    """Asking vLLM to load what is not there ends the engine, so it is not asked; the old version stays in service."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    async with ScriptedEngine() as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        with pytest.raises(WeightUpdateError, match="version 4"):
            await pool.update_weights(4, None if kind == "none" else str(tmp_path / kind))
        assert administrative(engine) == []
        assert pool.version == 0
        assert pool.acquire(1) is pool.endpoints[0]


async def test_a_path_that_only_engines_see_is_passed_on_unchecked() -> None:
    """Engines on other machines may have folders that this one has not."""
    async with ScriptedEngine() as engine, build_pool(engine, check_weights=False) as pool:
        await pool.wait_ready(10)
        await pool.update_weights(1, "/only/there")
        assert engine.weights == "/only/there"


async def test_a_relative_path_reaches_the_engine_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's working directory is not ours."""
    folder_of_weights(tmp_path, "step_1")
    monkeypatch.chdir(tmp_path)
    async with ScriptedEngine() as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        await pool.update_weights(1, "step_1")
        assert engine.weights == str(tmp_path / "step_1")


async def test_a_failed_load_resumes_the_engine_after_aborting_and_takes_it_out(tmp_path: Path) -> None:
    """Nothing is left paused, nothing goes on with unknown weights, and the others are not affected."""
    weights = folder_of_weights(tmp_path)
    async with (
        ScriptedEngine() as good,
        ScriptedEngine(broken={"/collective_rpc": 500}) as bad,
        build_pool(good, bad) as pool,
    ):
        await pool.wait_ready(10)
        lost: list[str] = []
        pool.on_lost = lambda endpoint: lost.append(endpoint.url)
        with structlog.testing.capture_logs() as logs:
            report = await pool.update_weights(1, str(weights))
        assert administrative(bad)[-3:] == ["POST /collective_rpc", "POST /pause abort", "POST /resume"]
        assert (bad.paused, good.weights) == (False, str(weights))
        assert report.updated == (good.base_url,)
        assert "/collective_rpc is broken" in report.failed[bad.base_url]
        assert lost == [bad.base_url]
        assert [endpoint.url for endpoint in pool.ready] == [good.base_url]
        assert [entry["event"] for entry in logs] == [
            "weights.failed",
            "endpoint.lost",
            "weights.updated",
        ]


async def test_one_stuck_server_wedges_neither_the_others_nor_the_run(tmp_path: Path) -> None:
    """A server that never answers is given up after its time and catches up when it can."""
    weights = folder_of_weights(tmp_path)
    async with (
        ScriptedEngine() as good,
        ScriptedEngine(stuck={"/collective_rpc"}) as bad,
        build_pool(good, bad, update_timeout_s=2.0) as pool,
        asyncio.TaskGroup() as group,
    ):
        await pool.wait_ready(10)
        update = group.create_task(pool.update_weights(1, str(weights)))
        await good.wait_for(lambda: "POST /resume" in good.calls)
        report = await update
        assert report.updated == (good.base_url,)
        assert "within 2 s" in report.failed[bad.base_url]
        assert [endpoint.url for endpoint in pool.ready] == [good.base_url]
        assert not bad.paused
        bad.unstick()
        async with watched(pool) as until:
            await until(lambda: len(pool.ready) == 2)
        assert bad.weights == str(weights)


async def test_stragglers_are_not_waited_for_once_the_others_are_done(tmp_path: Path) -> None:
    """An update that most engines finished quickly ends soon after, however long a load may take in principle."""
    weights = folder_of_weights(tmp_path)
    async with (
        ScriptedEngine() as first,
        ScriptedEngine() as second,
        ScriptedEngine(stuck={"/collective_rpc"}) as slow,
        build_pool(first, second, slow, update_timeout_s=10_000, straggler_grace_s=0.1) as pool,
    ):
        await pool.wait_ready(10)
        report = await pool.update_weights(1, str(weights))
        assert report.updated == (first.base_url, second.base_url)
        assert list(report.failed) == [slow.base_url]
        assert not slow.paused
        assert len(pool.ready) == 2
        slow.unstick()
        async with watched(pool) as until:
            await until(lambda: len(pool.ready) == 3)
        assert slow.weights == str(weights)


async def test_a_stuck_pause_is_undone_and_says_nothing_against_the_weights(tmp_path: Path) -> None:
    """A pause that was not confirmed may still come into effect, so it is resumed; the engine loads the version later."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine(stuck={"/pause"}) as engine:
        # Long enough for the client to round its own limits up to whole seconds, as it does with those of a real run.
        pool = build_pool(engine, update_timeout_s=5.5)
        async with running(pool) as until:
            update = asyncio.create_task(pool.update_weights(1, str(weights)))
            # The first pause hangs until its time is up; the clean-up's own is let through.
            await engine.wait_for(lambda: engine.calls.count("POST /pause") == 2)
            engine.unstick()
            report = await update
            assert list(report.failed) == [pool.endpoints[0].name]
            assert report.updated == ()
            assert pool.version == 1, "an engine that did not even pause was never asked to load it"
            await until(lambda: pool.endpoints[0].healthy and pool.endpoints[0].version == 1)
            assert engine.weights == str(weights)
            assert not engine.paused
            assert pool.refusal == ""


async def test_versions_published_during_an_update_coalesce_to_the_newest(tmp_path: Path) -> None:
    """Of the versions that wait, only the newest is loaded; the callers of the others learn that they were overtaken."""
    folders = [folder_of_weights(tmp_path, f"step_{step}") for step in range(1, 5)]
    loaded: list[int] = []
    first_started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: UpdateRequest) -> None:
        loaded.append(request.version)
        first_started.set()
        await go_on.wait()

    async with ScriptedEngine() as engine, build_pool(engine, update=WeightUpdate("slow", slow)) as pool:
        await pool.wait_ready(10)
        async with asyncio.TaskGroup() as group:
            updates = [group.create_task(pool.update_weights(1, str(folders[0])))]
            await first_started.wait()
            updates += [
                group.create_task(pool.update_weights(version, str(folders[version - 1])))
                for version in (2, 3, 4)
            ]
            await asyncio.sleep(0)  # all three have been published now
            endpoint = pool.endpoints[0]
            assert (endpoint.version, endpoint.version_newest, endpoint.updating) == (0, 1, True)
            go_on.set()
        assert loaded == [1, 4]
        assert [update.result().superseded for update in updates] == [True, True, True, False]
        assert (endpoint.version, endpoint.version_newest, endpoint.updating) == (4, 4, False)


async def test_the_same_version_published_again_is_loaded_again(tmp_path: Path) -> None:
    """A trainer that fell back to a checkpoint publishes a number again with other weights."""
    first, second = folder_of_weights(tmp_path, "first"), folder_of_weights(tmp_path, "second")
    async with ScriptedEngine() as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        await pool.update_weights(1, str(first))
        await pool.update_weights(1, str(second))
        assert engine.weights == str(second)


async def test_a_cancelled_update_leaves_no_engine_paused_nor_in_service(tmp_path: Path) -> None:
    """After a cancellation half-way nobody knows the engine's weights, so it is out until it has caught up."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine(stuck={"/collective_rpc"}) as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        update = asyncio.create_task(pool.update_weights(1, str(weights)))
        await engine.wait_for(lambda: "POST /collective_rpc" in engine.calls)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert not engine.paused
        assert pool.endpoints[0].state is EndpointState.LOST
        engine.unstick()
        async with watched(pool) as until:
            await until(lambda: pool.endpoints[0].healthy)
        assert engine.weights == str(weights)


async def test_health_is_not_judged_during_an_update(tmp_path: Path) -> None:
    """An engine that is mute while it loads is not lost for it."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine(stuck={"/collective_rpc"}) as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        async with asyncio.TaskGroup() as group:
            update = group.create_task(pool.update_weights(1, str(weights)))
            await engine.wait_for(lambda: "POST /collective_rpc" in engine.calls)
            checks = engine.calls.count("GET /health")
            watching = group.create_task(pool.run())
            await asyncio.sleep(0.1)  # ten intervals, in each of which a check could be seen
            assert engine.calls.count("GET /health") == checks
            engine.unstick()
            assert (await update).updated == (engine.base_url,)
            watching.cancel()


async def test_an_engine_without_labels_can_be_updated(tmp_path: Path) -> None:
    """Engines older than the label load weights all the same."""
    weights = folder_of_weights(tmp_path)
    async with (
        ScriptedEngine(broken={"/update_weight_version": 404, "/weight_info": 404}) as engine,
        build_pool(engine) as pool,
    ):
        await pool.wait_ready(10)
        report = await pool.update_weights(1, str(weights))
        assert report.failed == {}
        async with watched(pool):
            await rounds(engine)
        assert (pool.endpoints[0].healthy, pool.endpoints[0].losses) == (True, 0)


async def test_a_folder_that_is_gone_is_not_given_to_an_engine_that_returns(tmp_path: Path) -> None:
    """Trainers delete old checkpoints; an engine that needs one stays out, with the reason, instead of being killed."""
    weights = folder_of_weights(tmp_path)
    async with ScriptedEngine() as engine, build_pool(engine) as pool:
        await pool.wait_ready(10)
        await pool.update_weights(1, str(weights))
        shutil.rmtree(weights)
        engine.restart()
        engine.calls.clear()
        [endpoint] = pool.endpoints
        async with watched(pool) as until:
            await until(lambda: endpoint.retries >= 3)
            assert "is not a folder" in endpoint.error
            assert "is not a folder" in pool.missing_weights
            assert administrative(engine) == []
            await pool.update_weights(2, str(folder_of_weights(tmp_path, "newer")))
            await until(lambda: endpoint.healthy)
            assert (endpoint.version, pool.loaded.version, pool.missing_weights) == (2, 2, "")


async def test_none_only_counts_versions() -> None:
    """Where the trainer updates the engines itself, nothing is asked of them."""
    async with ScriptedEngine() as engine, build_pool(engine, update="none") as pool:
        await pool.wait_ready(10)
        await pool.update_weights(5, None)
        assert administrative(engine) == []
        assert pool.endpoints[0].version == 5


async def test_a_recipe_of_ones_own_is_an_async_function() -> None:
    """It gets the engine, the version and the path."""
    seen.clear()
    async with (
        ScriptedEngine() as engine,
        build_pool(engine, update="tests.inference.test_weights:custom_update") as pool,
    ):
        await pool.wait_ready(10)
        await pool.update_weights(2, "anything")
        [request] = seen
        assert (request.version, request.path, request.model) == (2, "anything", "tiny")
        assert isinstance(request.engine, EngineApi)
        assert administrative(engine) == ["POST /pause wait"]


async def test_a_recipe_that_raises_costs_the_endpoint_and_not_the_run() -> None:
    """A bug in foreign code is reported with the recipe's name and what it raised."""
    name = "tests.inference.test_weights:failing_update"
    async with ScriptedEngine() as engine, build_pool(engine, update=name) as pool:
        await pool.wait_ready(10)
        with pytest.raises(WeightUpdateError, match=f"weight update {name} raised KeyError: 'rank 3'"):
            await pool.update_weights(1, None)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("vlm", '"vlm" is not one of none, vllm, vllm_lora, trainer, sglang nor "module:attr"'),
        ("no_such_module:f", "there is no module no_such_module"),
        ("tests.inference.test_weights:no_such", "no_such"),
        ("tests.inference.test_weights:not_callable", "is of type int"),
    ],
)
def test_a_recipe_that_cannot_be_had_is_an_error_of_the_config(spec: str, said: str) -> None:
    """The message says what was asked for and what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        build_weight_update(spec)
    assert said in str(caught.value)
    assert "inference.weight_update" in str(caught.value)
