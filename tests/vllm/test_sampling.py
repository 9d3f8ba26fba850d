"""Runs on a real vLLM learn from what was sampled: the log-probabilities are recomputed from the weights alone."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.inference import NEUTRAL, EngineApi, EngineRefusedError, SamplingCheck
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.service_fixture import make_config, running_service
from tests.vllm.engine import HOME, MODEL, START_TIMEOUT_S, WEIGHTS, VllmEngine, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-4
SHAPED = {"temperature": 0.7, "top_p": 0.9}
RECOMPUTE = Path(__file__).parent / "recompute.py"


@pytest.fixture(scope="module")
def greedy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights a in a folder whose generation_config.json asks for the likeliest token."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    shutil.copytree(WEIGHTS["a"], folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "do_sample": True}))
    return folder


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory, greedy_folder: Path) -> Iterator[VllmEngine]:
    """An engine as it should be started, with a model that has sampling defaults of its own."""
    options = ["--model", str(greedy_folder), "--logprobs-mode", "processed_logprobs"]
    with running_engine(tmp_path_factory.mktemp("vllm") / "processed.log", options) as engine:
        yield engine


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine as it is started by somebody who knows nothing of all this."""
    with running_engine(tmp_path_factory.mktemp("vllm") / "raw.log", []) as engine:
        yield engine


def config_of(run_dir: Path, engine: VllmEngine, sampling: Mapping[str, Any]) -> Config:
    table = {"id": "tests.vllm.envs:Questions", "name": "questions", "ratio": 1.0}
    return make_config(
        run_dir,
        engine.base_url,
        [table],
        model={"name": MODEL},
        inference={
            "base_urls": [engine.base_url],
            "weight_update": "vllm",
            "ready_timeout_s": START_TIMEOUT_S,
        },
        train={
            "group_size": 4,
            "env": [table],
            "sampling": {"max_tokens": 24, "ignore_eos": True, **sampling},
        },
        batch={"size": 16},
        dispatch={"max_inflight": 16, "ramp_s": 0.0, "keep_equal_rewards": True},
    )


async def batch_of(config: Config) -> Any:
    """The first batch of a run."""
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        return await trainer.next_batch()


def recompute(sequences: Sequence[Any], *, temperature: float, top_p: float) -> list[np.ndarray]:
    """Each token's log-probability, from the weights a."""
    asked = {
        "model": WEIGHTS["a"],
        "temperature": temperature,
        "top_p": top_p,
        "sequences": [sequence.tokens.tolist() for sequence in sequences],
    }
    done = subprocess.run(
        [HOME / "venv" / "bin" / "python", "-W", "ignore", RECOMPUTE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return [np.array(values) for values in json.loads(done.stdout)]


def sampled_of(sequence: Any) -> tuple[int, ...]:
    return tuple(sequence.tokens[sequence.mask == 1].tolist())


async def test_what_is_trained_on_is_what_was_sampled(processed: VllmEngine, tmp_path: Path) -> None:
    """With a temperature and a cut, log-probabilities recomputed from the weights agree within 1e-4."""
    batch = await batch_of(config_of(tmp_path, processed, SHAPED))
    assert len(batch.sequences) == 16
    worst = 0.0
    for sequence, expected in zip(batch.sequences, recompute(batch.sequences, **SHAPED), strict=True):
        trained = sequence.mask == 1
        assert trained.sum() == 24
        worst = max(worst, float(np.abs(sequence.logprobs[trained] - expected[trained]).max()))
    assert worst < TOLERANCE


async def test_defaults_of_the_models_folder_do_not_reach_training(
    processed: VllmEngine, tmp_path: Path
) -> None:
    """A generation_config.json with top_k = 1 would make every member of a group say the same."""
    batch = await batch_of(config_of(tmp_path / "neutral", processed, {}))
    answers = {sampled_of(sequence) for sequence in batch.sequences}
    assert len(answers) == 16
    expected = recompute(batch.sequences, temperature=1.0, top_p=1.0)
    for sequence, values in zip(batch.sequences, expected, strict=True):
        trained = sequence.mask == 1
        np.testing.assert_allclose(sequence.logprobs[trained], values[trained], atol=TOLERANCE)
    config = config_of(tmp_path / "own", processed, {})
    left_out = config.model_copy(
        update={"train": config.train.model_copy(update={"neutral_sampling": False})}
    )
    greedy = await batch_of(left_out)
    assert len({sampled_of(sequence) for sequence in greedy.sequences}) == 4, (
        "one answer for each of four tasks"
    )


async def test_a_run_refuses_to_start_on_raw_log_probabilities(raw: VllmEngine, tmp_path: Path) -> None:
    """They would be those of another distribution; the message has the option to start vLLM with."""
    with pytest.raises(EngineRefusedError, match="--logprobs-mode processed_logprobs") as caught:
        await batch_of(config_of(tmp_path / "shaped", raw, SHAPED))
    assert caught.value.exit_code == ConfigError.exit_code
    batch = await batch_of(config_of(tmp_path / "neutral", raw, {}))
    expected = recompute(batch.sequences, temperature=1.0, top_p=1.0)
    for sequence, values in zip(batch.sequences, expected, strict=True):
        trained = sequence.mask == 1
        np.testing.assert_allclose(sequence.logprobs[trained], values[trained], atol=TOLERANCE)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_p": 0.9}])
async def test_engines_that_do_not_say_are_told_apart_by_single_tokens(
    processed: VllmEngine, raw: VllmEngine, sampling: dict[str, float]
) -> None:
    """Without VLLM_SERVER_DEV_MODE an engine does not tell its mode; here it is asked where nobody answers."""
    check = SamplingCheck(
        model=MODEL, samplings={"math": {**NEUTRAL, **sampling}}, accept_raw=False, timeout_s=60.0
    )
    async with aiohttp.ClientSession() as session:
        for engine in (processed, raw):
            api = EngineApi(
                url=engine.base_url, root=f"{engine.root}/nowhere", session=session, check_timeout_s=20.0
            )
            if engine is processed:
                await check.check(api)
            else:
                with pytest.raises(EngineRefusedError, match="before temperature and cuts"):
                    await check.check(api)
