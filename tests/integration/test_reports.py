"""What a trainer reports is seen where people look, over either transport, and a mismatch is warned of."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

import orchestrator
from orchestrator.errors import TrainerLinkError
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.service_fixture import env, make_config, running_service, settings


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    async with run_policy_server() as url:
        yield url


async def test_a_run_inside_a_program_takes_reports_too(tmp_path: Path, base_url: str) -> None:
    """The program is the trainer; the run shows its numbers."""
    values = settings(tmp_path / "run", base_url, [env("Dice")])
    async with orchestrator.running(values) as run:
        batch = await run.next_batch()
        assert batch is not None
        await run.report(batch.step, {"loss": 0.25})
        assert run.status().reports["loss"].value == 0.25


@pytest.mark.parametrize("transport", ["zmq", "filesystem"])
async def test_reports_are_in_the_status_the_metrics_and_the_summary(
    tmp_path: Path, base_url: str, transport: str
) -> None:
    """Refused ones say why and change nothing; a mismatch that goes on is in the log and in the status."""
    link = {"transport": transport, "bind": "tcp://127.0.0.1:0"}
    config = make_config(tmp_path / "run", base_url, [env("Dice")], trainer=link)
    refusals = []
    with structlog.testing.capture_logs() as logs:
        async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
            for step in (1, 2, 3):
                await trainer.next_batch()
                await trainer.report(step, {"loss": 0.5, "logprob_mismatch": 4.9})
            for step, name, value in ((3, "loss", math.nan), (99, "loss", 1.0), (3, "two\nlines", 1.0)):
                try:
                    await trainer.report(step, {name: value})
                except (TrainerLinkError, ValueError) as error:
                    refusals.append(str(error))
            status = running.service.status()
            metrics = running.service.front.metrics().decode()
    assert refusals[0] == "loss of step 3 is not a finite number"
    assert "no batch of step 99" in refusals[1]
    assert "$.metrics" in refusals[2]
    assert (status.reports["loss"].step, status.reports["loss"].value) == (3, 0.5)
    assert status.reports["logprob_mismatch"].recent == [(1, 4.9), (2, 4.9), (3, 4.9)]
    assert "logprob_mismatch is 4.9 at step 3" in status.mismatch
    assert 'orchestrator_trainer_reported{name="loss"} 0.5' in metrics
    assert "orchestrator_logprob_mismatch_unusual 1.0" in metrics
    [warning] = [entry for entry in logs if entry["event"] == "trainer.mismatch"]
    assert "weights of the published version" in warning["remedy"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["reports"]["loss"] == {"step": 3, "value": 0.5, "median": 0.5}
