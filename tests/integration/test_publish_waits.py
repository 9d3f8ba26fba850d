"""A trainer that publishes and waits hears what every inference server made of the version."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from orchestrator.errors import TrainerLinkError
from orchestrator.local.policy import Policy
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.service_fixture import env, make_config, running_service
from tests.support.inference_engine import folder_of_weights

WAIT_S = 50.0
"""Longer than anything here takes: an answer that comes is one that was not waited out."""


@pytest.fixture
async def one() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as url:
        yield url


@pytest.fixture
async def dying() -> AsyncIterator[tuple[str, AsyncExitStack]]:
    """The address of another one, and what ends it."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(run_policy_server()), stack


async def test_an_answer_says_which_servers_have_the_version(
    tmp_path: Path, one: str, dying: tuple[str, AsyncExitStack]
) -> None:
    """Both have it; none can load it, which is an error; one of them has died, and is named with the reason."""
    folders = [str(Policy().save(tmp_path / name)) for name in ("initial", "first", "second")]
    other, end = dying
    inference = {
        "base_urls": [one, other],
        "weight_update": "vllm",
        "check_weights": False,
        "health_interval_s": 0.05,
        "initial_weights": "trainer",
    }
    config = make_config(tmp_path / "run", one, [env("Dice")], inference=inference)
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        for version in (0, 1):
            told = await trainer.publish(version, folders[version], wait_s=WAIT_S)
            assert told.loaded_everywhere
            assert told.engines == {one: "", other: ""}
            assert [endpoint.version for endpoint in running.service.pool.endpoints] == [version] * 2
        with pytest.raises(TrainerLinkError, match="version 2 could not be loaded"):
            await trainer.publish(2, str(tmp_path / "nowhere"), wait_s=WAIT_S)
        assert running.service.run.weights.newest == 1
        await end.aclose()
        told = await trainer.publish(3, folders[2], wait_s=WAIT_S)
        assert not told.loaded_everywhere
        assert told.engines is not None
        assert (told.engines[one], bool(told.engines[other])) == ("", True)
        again = await trainer.publish(3, folders[2], wait_s=WAIT_S)
        assert ("nothing changes" in again.note, again.engines) == (True, told.engines)


async def test_a_checkpoint_that_was_cut_short_is_refused_where_it_is_published(
    tmp_path: Path, one: str
) -> None:
    """No engine is asked to load it, the weights before stay, and the run goes on."""
    config = make_config(
        tmp_path / "run", one, [env("Dice")], inference={"base_urls": [one], "weight_update": "vllm"}
    )
    file = folder_of_weights(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        for wait_s in (0.0, WAIT_S):
            with pytest.raises(
                TrainerLinkError, match=r"version 1: .*model\.safetensors has \d+ bytes where"
            ):
                await trainer.publish(1, str(file.parent), wait_s=wait_s)
        assert running.service.run.weights.newest == 0
        assert [endpoint.version for endpoint in running.service.pool.ready] == [0]
        assert await trainer.next_batch() is not None


async def test_waiting_ends_in_its_time(tmp_path: Path, one: str) -> None:
    """A server that hangs while it loads is named; the version counts all the same."""
    folder = str(Policy().save(tmp_path / "first"))
    inference = {"base_urls": [one], "weight_update": "tests.support.hanging_update:hang"}
    config = make_config(tmp_path / "run", one, [env("Dice")], inference=inference)
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        told = await trainer.publish(1, folder, wait_s=0.2)
        assert told.engines == {one: "has not loaded it in the time that was to be waited"}
        assert running.service.run.weights.newest == 1
