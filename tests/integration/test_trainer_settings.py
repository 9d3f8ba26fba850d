"""Settings of the trainer link that the whole service follows: another world size after a restart, a token, a socket."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, TrainerLinkError
from orchestrator.local.server import run_policy_server
from orchestrator.service.blueprint import verify
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.env_servers import until
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import env, make_config, running_service


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as base_url:
        yield base_url


async def test_a_world_size_that_cannot_share_a_formed_batch_is_refused_at_the_start(
    tmp_path: Path, policy: str
) -> None:
    """With the remedy, which works: the batch is served to as many ranks as divide it."""
    run_dir, envs = tmp_path / "run", [env("Dice")]
    config = make_config(run_dir, policy, envs, max_steps=1)
    async with running_service(config) as running:
        await until(lambda: running.service.server.leased == [1])
    other = make_config(run_dir, policy, envs, batch={"size": 12}, trainer={"world_size": 3})
    with pytest.raises(ConfigError, match=r"step 1 was formed with 8 sequences .* a number that divides 8"):
        async with running_service(other):
            pytest.fail("started")
    remedy = make_config(run_dir, policy, envs, max_steps=1, trainer={"world_size": 4})
    record = TrainerRecord()
    async with running_service(remedy) as running, asyncio.TaskGroup() as group:
        for rank in range(4):
            group.create_task(train_here(running.address, record, rank=rank, world_size=4))
        await running.wait_end()
    record.check(world_size=4, batch_size=8)
    assert record.last_step == 1


async def test_a_service_with_a_token_serves_those_who_present_it(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a socket file of its own, as on a machine with several users."""
    monkeypatch.setenv("MY_TOKEN", "between us")
    bind = f"ipc://{tmp_path}/link/trainer.sock"
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice")],
        max_steps=1,
        trainer={"bind": bind, "token_env": "MY_TOKEN"},
    )
    async with running_service(config) as running:
        assert (running.address, (tmp_path / "link").stat().st_mode & 0o777) == (bind, 0o700)
        with pytest.raises(TrainerLinkError, match="presented no token"):
            async with AsyncTrainerClient(bind):
                pytest.fail("joined without the token")
        async with AsyncTrainerClient(bind, token="between us") as trainer:
            assert (await anext(trainer)).step == 1


def test_a_token_variable_that_is_not_set_is_found_before_anything_starts(tmp_path: Path) -> None:
    """In the words that every such variable has."""
    config = make_config(
        tmp_path / "run", "http://127.0.0.1:9/v1", [env("Dice")], trainer={"token_env": "NO_SUCH_VARIABLE"}
    )
    with pytest.raises(ConfigError, match=r"trainer.token_env: the environment variable NO_SUCH_VARIABLE"):
        verify(config)
