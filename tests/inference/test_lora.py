"""Versions as LoRA adapters: loaded beside the engine's own weights, each under its name, and never in place."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.inference import (
    Beginning,
    EndpointState,
    EngineRefusedError,
    EngineUnfitError,
    WeightUpdateError,
)
from orchestrator.inference.checkpoint import find_adapter_problem, find_base_problem
from tests.support.inference_engine import ScriptedEngine, folder_of_adapter, folder_of_weights
from tests.support.inference_pool import build_pool, rounds, running


async def test_each_version_is_an_adapter_that_rollouts_ask_for_by_name(tmp_path: Path) -> None:
    """Before the first it is the model itself; an older version stays loaded for rollouts that began with it."""
    paths = [str(folder_of_adapter(tmp_path, f"step_{version}")) for version in (1, 2)]
    async with ScriptedEngine(lora=True) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool):
            [endpoint] = pool.endpoints
            assert endpoint.adapter == ""
            names = []
            for version, path in enumerate(paths, start=1):
                report = await pool.update_weights(version, path)
                assert (report.failed, endpoint.version) == ({}, version)
                names.append(endpoint.adapter)
        assert engine.adapters == dict(zip(names, paths, strict=True))
        assert names[0].startswith("tiny-v1-")
        assert "POST /pause" not in " ".join(engine.calls), "nothing has to stand still"


async def test_names_of_adapters_that_nobody_can_want_any_more_are_forgotten(tmp_path: Path) -> None:
    """A run of many versions does not leave a list of all of them in the engine."""
    path = str(folder_of_adapter(tmp_path))
    async with ScriptedEngine(lora=True) as engine:
        engine.adapters["somebody-elses"] = "/elsewhere"
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool):
            for version in range(1, 41):
                await pool.update_weights(version, path)
        ours = [name for name in engine.adapters if name != "somebody-elses"]
        assert len(ours) == 32
        assert ours[-1] == pool.endpoints[0].adapter
        assert len(engine.adapters) == 33


async def test_an_engine_that_was_restarted_gets_the_newest_adapter_before_any_work(tmp_path: Path) -> None:
    """It is noticed between two health checks, by the adapter that is not listed any more."""
    path = str(folder_of_adapter(tmp_path))
    async with ScriptedEngine(lora=True) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            await pool.update_weights(1, path)
            before = endpoint.adapter
            engine.restart()
            await until(lambda: endpoint.losses == 1)
            await until(lambda: endpoint.healthy)
            assert endpoint.adapter != before
            assert engine.adapters == {endpoint.adapter: path}
            await rounds(engine, 2)
            assert endpoint.losses == 1


async def test_a_run_that_goes_on_loads_its_adapter_again(tmp_path: Path) -> None:
    """Also where the engine still has it from before: nobody knows what is behind the old name."""
    path = str(folder_of_adapter(tmp_path))
    async with ScriptedEngine(lora=True) as engine:
        engine.adapters["tiny-v12-00000000"] = path
        pool = build_pool(engine, update="vllm_lora", version=12, weights_path=path)
        async with running(pool):
            [endpoint] = pool.endpoints
            assert endpoint.adapter.startswith("tiny-v12-")
            assert endpoint.adapter != "tiny-v12-00000000"


async def test_another_runs_adapters_do_not_matter_to_a_fresh_run(tmp_path: Path) -> None:
    """They are not asked for; version 0 is the model that the engine was started with."""
    async with ScriptedEngine(lora=True) as engine:
        engine.adapters["tiny-v12-00000000"] = "/of/another/run"
        pool = build_pool(engine, update="vllm_lora", beginning=Beginning.OWN)
        async with running(pool):
            assert pool.endpoints[0].adapter == ""


async def test_an_engine_whose_own_weights_were_replaced_is_refused() -> None:
    """An adapter is for the weights that it was trained on."""
    async with (
        ScriptedEngine(lora=True, label="12") as engine,
        build_pool(engine, update="vllm_lora") as pool,
    ):
        with pytest.raises(EngineRefusedError, match='has the weights "12" of another run'):
            await pool.wait_ready(10)


async def test_an_engine_without_the_flags_is_unfit_with_the_flags_named() -> None:
    """At the start, not at the first version."""
    async with ScriptedEngine(lora=False) as engine, build_pool(engine, update="vllm_lora") as pool:
        with pytest.raises(EngineUnfitError, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*--enable-lora"):
            await pool.wait_ready(10)


async def test_an_engine_without_administrative_calls_will_do(tmp_path: Path) -> None:
    """Adapters are loaded through the API that everybody has."""
    path = str(folder_of_adapter(tmp_path))
    async with ScriptedEngine(lora=True, dev_mode=False) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool):
            assert (await pool.update_weights(1, path)).failed == {}


async def test_an_adapter_that_the_engine_refuses_leaves_the_last_one(tmp_path: Path) -> None:
    """With what the engine said; the engine returns with the adapter that it had."""
    good, bad = (folder_of_adapter(tmp_path, name) for name in ("good", "bad"))
    async with ScriptedEngine(lora=True, refused={str(bad)}) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            await pool.update_weights(1, str(good))
            with pytest.raises(WeightUpdateError, match="LoRA rank 64 is greater than max_lora_rank 16"):
                await pool.update_weights(2, str(bad))
            await until(lambda: endpoint.healthy)
            assert (pool.version, endpoint.version) == (1, 1)
            assert engine.adapters[endpoint.adapter] == str(good)
            assert "max_lora_rank" in pool.refusal


async def test_a_first_adapter_that_is_refused_leaves_the_model_itself(tmp_path: Path) -> None:
    """Version 0 has no adapter."""
    bad = folder_of_adapter(tmp_path)
    async with ScriptedEngine(lora=True, refused={str(bad)}) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool) as until:
            [endpoint] = pool.endpoints
            with pytest.raises(WeightUpdateError):
                await pool.update_weights(1, str(bad))
            await until(lambda: endpoint.state is EndpointState.READY)
            assert (endpoint.version, endpoint.adapter) == (0, "")


async def test_an_adapter_of_another_model_is_refused_where_the_models_folder_can_be_seen(
    tmp_path: Path,
) -> None:
    """An engine may take one of smaller layers without a word."""
    adapter, base = folder_of_adapter(tmp_path), tmp_path / "base"
    base.mkdir()
    name = "model.layers.0.self_attn.q_proj.weight"

    def write(high: int) -> None:
        header = json.dumps(
            {name: {"dtype": "U8", "shape": [high, 2], "data_offsets": [0, 2 * high]}}
        ).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(2 * high)
        (base / "model.safetensors").write_bytes(content)

    async with ScriptedEngine(lora=True, root=str(base)) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool) as until:
            write(high=3)
            with pytest.raises(WeightUpdateError, match=r"is for another model: .* is 2 x 2, .* 3 x 2"):
                await pool.update_weights(1, str(adapter))
            await until(lambda: pool.endpoints[0].healthy)
            assert engine.adapters == {}
            write(high=2)
            assert (await pool.update_weights(2, str(adapter))).failed == {}


@pytest.mark.parametrize("says", ["config.json", "hf_quant_config.json"])
def test_an_adapter_fits_a_quantised_model_whatever_the_size_of_its_packed_weights(
    tmp_path: Path, says: str
) -> None:
    """Two numbers are in a byte there, and all of them in one column."""
    adapter, base = folder_of_adapter(tmp_path), tmp_path / "base"
    base.mkdir()
    name = "model.layers.0.self_attn.q_proj.weight"
    header = json.dumps({name: {"dtype": "U8", "shape": [2, 1], "data_offsets": [0, 2]}}).encode()
    (base / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    assert "is for another model" in find_base_problem(adapter, base)
    (base / says).write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    assert find_base_problem(adapter, base) == ""


def _no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[1]")


def _other_kind(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "r": 4}))


def _other_rank(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))


def _no_tensors(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _cut_short(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _half(folder: Path) -> None:
    header = json.dumps(
        {"q.lora_A.weight": {"dtype": "U8", "shape": [4, 1], "data_offsets": [0, 4]}}
    ).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _full_weights(folder: Path) -> None:
    other = folder_of_weights(folder.parent)
    (folder / "adapter_model.safetensors").write_bytes((other / "model.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_config, "no LoRA adapter: it has no adapter_config.json"),
        (_bad_config, "is not the configuration of an adapter"),
        (_other_kind, "peft_type 'IA3'"),
        (_other_rank, "of rank 4 where adapter_config.json says 8"),
        (_no_tensors, "holds no adapter"),
        (_cut_short, "bytes where its header says"),
        (_half, "only one half"),
        (_full_weights, "holds no tensor of a LoRA adapter"),
    ],
)
async def test_a_folder_that_is_no_adapter_does_not_reach_the_engine(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """It is refused when it is published, with what is wrong."""
    folder = folder_of_adapter(tmp_path)
    assert find_adapter_problem(folder) == ""
    spoil(folder)
    async with ScriptedEngine(lora=True) as engine:
        pool = build_pool(engine, update="vllm_lora")
        async with running(pool):
            with pytest.raises(WeightUpdateError, match=said):
                await pool.check_version(1, str(folder))
            with pytest.raises(WeightUpdateError, match="is not a folder"):
                await pool.check_version(1, str(folder) + "_gone")
        assert engine.adapters == {}
