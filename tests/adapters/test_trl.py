"""TRL's AsyncGRPOTrainer on the orchestrator, as examples/trl has it: the real library, a real model, whole runs."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.adapters.venvs import CHECKOUT, TRL
from tests.integration.service_fixture import Command

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(600)]

EXAMPLE = CHECKOUT / "examples" / "trl"
RECOMPUTE = CHECKOUT / "tests" / "vllm" / "recompute.py"
STEPS = 5
DIES_AT = 4
SAVED_AT = 2
SIZE = 16


@asynccontextmanager
async def program(script: Path, *arguments: str, log: Path, **environ: str) -> AsyncIterator[Any]:
    """A script in TRL's virtualenv; it is killed when the block is left."""
    with log.open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            TRL.python,
            script,
            *arguments,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "TRL_EXPERIMENTAL_SILENCE": "1", **environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(
    script: Path, *arguments: str, log: Path, stdin: bytes = b"", **environ: str
) -> tuple[int, bytes]:
    """Its exit code and what it has printed."""
    async with program(script, *arguments, log=log, **environ) as process:
        out, _ = await process.communicate(stdin)
        return process.returncode, out


def read_record(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_a_killed_and_resumed_trainer_trains_on_every_batch_and_its_weights_are_served(
    tmp_path: Path,
) -> None:
    """Killed within a step: it goes on behind its checkpoint with the same batches. Each step trains on its own batch alone.

    The engine began with other weights: that the first ratio is 1 shows that it samples from what the trainer published, and
    that its log-probabilities at the end are those of the last folder shows that it went along.
    """
    if reason := TRL.missing():
        pytest.skip(reason)
    log, recorded = tmp_path / "log", tmp_path / "record.jsonl"
    for name, seed in (("model", "0"), ("other", "1")):
        assert (await run(EXAMPLE / "make_model.py", str(tmp_path / name), "--seed", seed, log=log))[0] == 0
    out, address = tmp_path / "out", f"ipc://{tmp_path}/s"
    options = ["--model", str(tmp_path / "model"), "--connect", address, "--out", str(out)]
    options += ["--batch-size", str(SIZE), "--steps", str(STEPS), "--save-steps", str(SAVED_AT)]
    options += ["--learning-rate", "0.01"]
    trainer = CHECKOUT / "tests" / "adapters" / "trl_trainer.py"
    async with program(EXAMPLE / "tiny_engine.py", str(tmp_path / "other"), "--port", "0", log=log) as engine:
        url = (await engine.stdout.readline()).decode().strip()
        settings = ["--run_dir", str(tmp_path / "run"), "--inference.base_urls", json.dumps([url])]
        settings += ["--trainer.bind", address, "--max_steps", str(STEPS), "--batch.size", str(SIZE)]
        settings += ["--http.port", "0", "--log.format", "json"]
        async with await Command.start("run", EXAMPLE / "config.toml", *settings, logs=tmp_path) as service:
            await service.wait_event("run.started")
            code, _ = await run(trainer, *options, log=log, RECORD=str(recorded), DIES_AT=str(DIES_AT))
            assert code < 0, log.read_text(encoding="utf-8")[-3000:]
            first = read_record(recorded)
            code, _ = await run(trainer, *options, log=log, RECORD=str(recorded))
            assert code == 0, log.read_text(encoding="utf-8")[-3000:]
            assert await service.wait() == 0, service.errors()[-3000:]
        async with aiohttp.ClientSession() as session:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 6}
            async with session.post(f"{url}/chat/completions", json=asked) as response:
                answer = await response.json()

    second = read_record(recorded)[len(first) :]
    trained = [[item["trained"] for item in part if "trained" in item] for part in (first, second)]
    assert trained == [list(range(1, DIES_AT + 1)), list(range(SAVED_AT + 1, STEPS + 1))]
    acknowledged = [item["acknowledged"] for item in first if "acknowledged" in item]
    assert acknowledged == list(range(DIES_AT))  # not the step that it died in
    served = {item["served"]: item for item in second if "served" in item}
    assert sorted(served) == list(range(SAVED_AT + 1, STEPS + 1))
    for item in first:
        if "served" in item and item["served"] > SAVED_AT:
            assert item == served[item["served"]]
    served |= {item["served"]: item for item in first if "served" in item}
    for item in [*first, *second]:
        if "trained" in item:
            assert item["print"] == served[item["trained"]]["print"]
    opening = next(item for item in first if "trained" in item)
    assert (opening["ratio"], opening["kl"]) == (pytest.approx(1, abs=1e-4), pytest.approx(0, abs=1e-4))

    choice = answer["choices"][0]
    tokens = [*answer["prompt_token_ids"], *choice["token_ids"]]
    newest = {"model": str(out / "weights" / f"step_{STEPS}"), "temperature": 1.0, "top_p": 1.0}
    _, found = await run(RECOMPUTE, log=log, stdin=json.dumps({**newest, "sequences": [tokens]}).encode())
    expected = json.loads(found)[0][len(answer["prompt_token_ids"]) :]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)
