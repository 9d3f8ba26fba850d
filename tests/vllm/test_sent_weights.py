"""A trainer that sends weights itself, with vLLM's own weight-transfer endpoints: what is sampled is of the version that was sent.

The transport is one that needs no GPU (`cpu_transfer`). Log-probabilities are recomputed from the weights that were sent.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.trainer import AsyncTrainerClient
from tests.integration.env_servers import ROOT
from tests.integration.service_fixture import make_config
from tests.support.waiting import until
from tests.vllm.engine import HOME, MODEL, START_TIMEOUT_S, WEIGHTS, VllmEngine, running_engine
from tests.vllm.serving import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
PYTHON = str(HOME / "venv" / "bin" / "python")
TOLERANCE = 2e-3
VERSIONS = 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    options = [
        "--worker-extension-cls",
        "tests.vllm.cpu_transfer.Extension",
        "--weight-transfer-config",
        json.dumps({"backend": "store"}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with running_engine(tmp_path_factory.mktemp("vllm") / "sent.log", options) as engine:
            yield engine


def weights_of(version: int) -> str:
    """Odd versions have the weights b, even ones the initial weights a."""
    return WEIGHTS["b" if version % 2 else "a"]


async def send(version: int, engines: Sequence[str]) -> None:
    """The trainer's own work while the engines stand still."""
    command = [PYTHON, "-W", "ignore", str(HERE / "cpu_transfer.py"), weights_of(version), *engines]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()


def recompute(sequences: Sequence[Any], model: str) -> list[np.ndarray]:
    asked = {
        "model": model,
        "temperature": 1.0,
        "top_p": 1.0,
        "sequences": [sequence.tokens.tolist() for sequence in sequences],
    }
    done = subprocess.run(
        [PYTHON, "-W", "ignore", HERE / "recompute.py"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return [np.array(values) for values in json.loads(done.stdout)]


async def test_what_is_sampled_is_of_the_version_that_was_sent(engine: VllmEngine, tmp_path: Path) -> None:
    """Three versions under load; an engine that was killed waits, and the trainer sends it the last one again."""
    config = make_config(
        tmp_path / "run",
        engine.base_url,
        [{"id": "tests.vllm.envs:Conversations", "name": "questions"}],
        model={"name": MODEL},
        inference={
            "base_urls": [engine.base_url],
            "weight_update": "trainer",
            "ready_timeout_s": START_TIMEOUT_S,
        },
        train={"group_size": 4, "sampling": {"max_tokens": 24, "ignore_eos": True}},
        batch={"size": 16},
        dispatch={"max_inflight": 16, "ramp_s": 0.0, "keep_equal_rewards": True},
    )
    seen: list[Any] = []
    resent: list[int] = []
    async with serving(config) as service:
        [endpoint] = service.pool.endpoints

        async def resend() -> None:
            resent.append(VERSIONS)
            async with trainer.updating(VERSIONS) as engines:
                await send(VERSIONS, engines)

        trainer = AsyncTrainerClient(service.server.address, on_engines_waiting=resend)
        async with trainer:

            async def take() -> None:
                batch = await trainer.next_batch()
                assert batch is not None
                seen.extend(batch.sequences)

            for version in range(VERSIONS + 1):
                while not any(one.version == one.version_end == version for one in seen):
                    await take()
                if version < VERSIONS:
                    async with trainer.updating(version + 1, wait_s=60) as engines:
                        await send(version + 1, engines)
                    assert service.run.version == version + 1
            engine.kill()
            await until(lambda: not endpoint.healthy)
            engine.start()
            # What was finished before comes first; then there is nothing until the engine has its weights again.
            while not resent:
                await take()
            await take()
        assert (endpoint.losses, resent) == (1, [VERSIONS])

    exact = [sequence for sequence in seen if sequence.version == sequence.version_end]
    versions = {sequence.version for sequence in exact}
    assert versions == set(range(VERSIONS + 1))
    for version in versions:
        own = [sequence for sequence in exact if sequence.version == version]
        found = recompute(own, weights_of(version)), recompute(own, weights_of(version + 1))
        for sequence, right, wrong in zip(own, *found, strict=True):
            trained = sequence.mask == 1
            np.testing.assert_allclose(sequence.logprobs[trained], right[trained], atol=TOLERANCE)
            assert np.abs(sequence.logprobs[trained] - wrong[trained]).mean() > 0.2
