"""Versions as LoRA adapters on a real vLLM: every token is of the adapter that its rollout is booked under.

The log-probabilities are recomputed from the model's weights with the adapter merged into them.
"""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.service_fixture import make_config
from tests.support.waiting import until
from tests.vllm.engine import HOME, MODEL, START_TIMEOUT_S, WEIGHTS, VllmEngine, running_engine
from tests.vllm.serving import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PYTHON = HOME / "venv" / "bin" / "python"
TOLERANCE = 5e-3  # the engine adds adapters to activations, here they are added to weights
VERSIONS = 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    options = ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        with running_engine(tmp_path_factory.mktemp("vllm") / "lora.log", options) as engine:
            yield engine


def make_adapter(folder: Path, seed: int, *options: str) -> str:
    command = [str(PYTHON), str(HERE / "make_adapter.py"), str(folder), "--seed", str(seed), *options]
    subprocess.run(command, check=True, capture_output=True)
    return str(folder)


def recompute(sequences: Sequence[Any], adapter: str | None) -> list[np.ndarray]:
    asked: dict[str, Any] = {
        "model": WEIGHTS["a"],
        "temperature": 1.0,
        "top_p": 1.0,
        "sequences": [sequence.tokens.tolist() for sequence in sequences],
    }
    if adapter is not None:
        asked["adapter"] = adapter
    done = subprocess.run(
        [PYTHON, "-W", "ignore", HERE / "recompute.py"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return [np.array(values) for values in json.loads(done.stdout)]


def gap(sequence: Any, expected: np.ndarray) -> float:
    trained = sequence.mask == 1
    return float(np.abs(sequence.logprobs[trained] - expected[trained]).max())


async def test_every_token_is_of_the_adapter_that_its_rollout_began_with(
    engine: VllmEngine, tmp_path: Path
) -> None:
    """Four versions, rollouts of three turns in flight meanwhile, adapters that do not fit, and an engine that is killed."""
    adapters = {
        version: make_adapter(tmp_path / f"step_{version}", version) for version in range(1, VERSIONS + 1)
    }
    config = make_config(
        tmp_path / "run",
        engine.base_url,
        [{"id": "tests.vllm.envs:Conversations", "name": "questions"}],
        model={"name": MODEL},
        inference={
            "base_urls": [engine.base_url],
            "weight_update": "vllm_lora",
            "ready_timeout_s": START_TIMEOUT_S,
        },
        train={"group_size": 4, "sampling": {"max_tokens": 24, "ignore_eos": True}},
        batch={"size": 16},
        dispatch={"max_inflight": 16, "ramp_s": 0.0, "keep_equal_rewards": True},
    )
    seen: list[Any] = []
    async with serving(config) as service, AsyncTrainerClient(service.server.address) as trainer:
        [endpoint] = service.pool.endpoints
        for step in range(1, VERSIONS + 4):
            batch = await trainer.next_batch()
            assert batch is not None
            seen += batch.sequences
            if step == 2:
                await _refuse_misfits(trainer, tmp_path)
            if step in adapters:
                told = await trainer.publish(step, adapters[step], wait_s=120)
                assert told.loaded_everywhere, told.engines
            if step == VERSIONS + 1:
                engine.kill()
                await until(lambda: not endpoint.healthy)
                engine.start()
        assert endpoint.losses == 2, "by the adapter that it refused, and by its death"

    versions = {sequence.version for sequence in seen}
    assert versions >= set(range(VERSIONS + 1)) - {1}
    assert any(sequence.version_end > sequence.version for sequence in seen), "versions come during rollouts"
    worst = 0.0
    for version in versions:
        own = [sequence for sequence in seen if sequence.version == version]
        for sequence, expected in zip(own, recompute(own, adapters.get(version)), strict=True):
            worst = max(worst, gap(sequence, expected))
        other = adapters[1 if version != 1 else 2]
        assert min(map(gap, own, recompute(own, other))) > 0.2, "adapters must be told apart"
    assert worst < TOLERANCE, f"over {len(seen)} sequences of versions {sorted(versions)}"


async def _refuse_misfits(trainer: AsyncTrainerClient, parent: Path) -> None:
    """An adapter that does not fit is told to the trainer with the engine's own reason, and nothing changes."""
    rank = make_adapter(parent / "rank", 9, "--rank", "64")
    with pytest.raises(TrainerLinkError, match="LoRA rank 64 is greater than max_lora_rank 16"):
        await trainer.publish(50, rank, wait_s=120)
    other = make_adapter(parent / "other", 9, "--hidden", "32")
    with pytest.raises(TrainerLinkError, match="is for another model"):
        await trainer.publish(51, other, wait_s=120)
    with pytest.raises(TrainerLinkError, match="is not a folder"):
        await trainer.publish(52, str(parent / "gone"))
