"""TRL's AsyncGRPOTrainer trains what a real vLLM samples, and the engine loads what it publishes (examples/trl)."""

import json
from pathlib import Path

import pytest

from tests.adapters.test_trl import EXAMPLE, read_record, run
from tests.adapters.venvs import CHECKOUT, TRL
from tests.integration.service_fixture import Command
from tests.vllm.engine import MODEL, WEIGHTS, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STEPS = 4
SIZE = 16


async def test_the_engine_samples_from_what_trl_has_published(tmp_path: Path) -> None:
    """It was started with other weights; the ratio of the first step is 1 only if it has loaded the trainer's."""
    if reason := TRL.missing():
        pytest.skip(reason)
    log, recorded, address = tmp_path / "log", tmp_path / "record.jsonl", f"ipc://{tmp_path}/s"
    options = ["--model", WEIGHTS["b"], "--connect", address, "--out", str(tmp_path / "out")]
    options += ["--batch-size", str(SIZE), "--steps", str(STEPS), "--learning-rate", "0.001"]
    with running_engine(tmp_path / "engine.log", ()) as engine:
        settings = [
            "--run_dir",
            str(tmp_path / "run"),
            "--inference.base_urls",
            json.dumps([engine.base_url]),
        ]
        settings += ["--trainer.bind", address, "--max_steps", str(STEPS), "--batch.size", str(SIZE)]
        settings += [
            "--train.env.digits.id",
            "tests.vllm.envs:Questions",
            "--model.name",
            MODEL,
            "--http.port",
            "0",
        ]
        settings += ["--train.sampling.max_tokens", "16"]
        async with await Command.start("run", EXAMPLE / "config.toml", *settings, logs=tmp_path) as service:
            await service.wait_event("run.started")
            trainer = CHECKOUT / "tests" / "adapters" / "trl_trainer.py"
            code, _ = await run(trainer, *options, log=log, RECORD=str(recorded))
            assert code == 0, log.read_text(encoding="utf-8")[-3000:]
            assert await service.wait() == 0, service.errors()[-3000:]
    record = read_record(recorded)
    trained = [item for item in record if "trained" in item]
    served = {item["served"]: item["print"] for item in record if "served" in item}
    assert [item["trained"] for item in trained] == list(range(1, STEPS + 1))
    assert all(item["print"] == served[item["trained"]] for item in trained)
    assert trained[0]["ratio"] == pytest.approx(1, abs=2e-3)
    assert trained[0]["kl"] == pytest.approx(0, abs=1e-4)
