"""A fresh run never starts on another run's weights: they are loaded, waited for, or the run does not start."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.inference import EngineRefusedError
from orchestrator.local.policy import Policy
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient, Publication
from tests.integration.env_servers import until
from tests.integration.service_fixture import env, make_config, running_service


@pytest.fixture
async def servers() -> AsyncIterator[list[str]]:
    """Two inference servers, the second with what another run has left there."""
    async with run_policy_server() as own, run_policy_server() as foreign:
        async with aiohttp.ClientSession() as session:
            url = f"{foreign.removesuffix('/v1')}/update_weight_version"
            async with session.post(url, json={"new_version": "41"}) as answer:
                assert answer.status == 200
        yield [own, foreign]


def config_with(run_dir: Path, urls: list[str], **inference: Any) -> Config:
    shared = {"weight_update": "vllm", "check_weights": False, "health_interval_s": 0.05}
    return make_config(run_dir, urls[0], [env("Dice")], inference={**shared, "base_urls": urls, **inference})


async def labels(urls: list[str]) -> list[str]:
    found = []
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(f"{url.removesuffix('/v1')}/weight_info") as answer:
                found.append((await answer.json())["weight_version"])
    return found


async def test_a_fresh_run_on_another_runs_weights_does_not_start(tmp_path: Path, servers: list[str]) -> None:
    """It ends at once with the exit code of a configuration and the remedy."""
    with pytest.raises(EngineRefusedError, match=r"inference\.initial_weights") as caught:
        async with running_service(config_with(tmp_path, servers[1:])):
            pass
    assert caught.value.exit_code == ConfigError.exit_code


async def test_a_fresh_run_begins_with_the_weights_that_are_named(tmp_path: Path, servers: list[str]) -> None:
    """Every server has loaded them before the first rollout, and a restart knows where they lie."""
    folder = str(Policy().save(tmp_path / "initial"))
    config = config_with(tmp_path / "run", servers, initial_weights=folder)
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        assert await labels(servers) == ["0", "0"]
        assert len(running.service.pool.ready) == 2
        assert await trainer.next_batch() is not None
    later = config_with(tmp_path / "run", servers)
    async with running_service(later) as running:
        assert running.service.pool.loaded.path == folder
        assert running.service.run.weights.loaded_path == folder


async def test_initial_weights_that_are_not_there_are_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    """It is said before anything is started."""
    config = config_with(tmp_path, ["http://127.0.0.1:9/v1"], initial_weights="nowhere", check_weights=True)
    with pytest.raises(ConfigError, match=r"inference\.initial_weights: .*nowhere is not a folder"):
        async with running_service(config):
            pass


async def test_a_fresh_run_waits_for_the_trainers_version_0(tmp_path: Path, servers: list[str]) -> None:
    """Nothing is sampled before; then every server has it, and a restart goes on with it."""
    folder = str(Policy().save(tmp_path / "initial"))
    config = config_with(tmp_path / "run", servers, initial_weights="trainer")
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        run = running.service.run
        assert "waits for the trainer to publish version 0" in running.service.status().waiting_for
        await trainer.publish(0, str(tmp_path / "nowhere"))
        await until(lambda: "version 0 could not be loaded" in run.weights.refused)
        assert running.service.pool.awaits_initial
        assert run.parts.ledger.total_inflight == 0
        assert await trainer.publish(0, folder) == Publication(0)
        await until(lambda: len(running.service.pool.ready) == 2)
        assert await labels(servers) == ["0", "0"]
        await until(lambda: run.weights.loaded_path == folder)
        assert await trainer.next_batch() is not None
        assert "nothing changes" in (await trainer.publish(0, folder)).note
    async with running_service(config) as running:
        assert len(running.service.pool.ready) == 2
        assert running.service.pool.loaded.path == folder
