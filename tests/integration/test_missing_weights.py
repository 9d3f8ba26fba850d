"""A run whose checkpoint is gone: the same command starts it, and the next version that can be loaded carries it on."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from orchestrator.config import Config
from orchestrator.inference import EndpointState
from orchestrator.local.policy import Policy
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.env_servers import until
from tests.integration.service_fixture import env, make_config, running_service


@pytest.fixture
async def servers() -> AsyncIterator[tuple[str, str]]:
    """The addresses of two inference servers, of which the second stands for the first after a restart."""
    async with run_policy_server() as first, run_policy_server() as second:
        yield first, second


def config_with(run_dir: Path, base_url: str) -> Config:
    inference = {
        "base_urls": [base_url],
        "weight_update": "vllm",
        "check_weights": False,
        "health_interval_s": 0.05,
    }
    return make_config(run_dir, base_url, [env("Dice")], inference=inference)


async def test_a_run_with_a_deleted_checkpoint_starts_and_goes_on_with_the_next_version(
    tmp_path: Path, servers: tuple[str, str]
) -> None:
    """The inference server was restarted and the weights that the run had are gone: it waits, and says for what."""
    first, second = (str(Policy().save(tmp_path / name)) for name in ("first", "second"))
    config = config_with(tmp_path / "run", servers[0])
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        assert await trainer.next_batch() is not None
        await trainer.publish(1, first)
        await until(lambda: running.service.pool.loaded.version == 1)
    shutil.rmtree(first)
    config = config_with(tmp_path / "run", servers[1])
    with structlog.testing.capture_logs() as logs:
        async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
            pool = running.service.pool
            [endpoint] = pool.endpoints
            assert endpoint.state is EndpointState.STARTING
            assert first in pool.missing_weights
            assert first in pool.explain()
            await trainer.publish(2, second)
            await until(lambda: endpoint.healthy)
            assert (endpoint.version, pool.loaded.version, pool.missing_weights) == (2, 2, "")
            assert await trainer.next_batch() is not None
    assert "weights.missing" in [entry["event"] for entry in logs]
