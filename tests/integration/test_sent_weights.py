"""A trainer that sends weights to the inference servers itself, over HTTP here, against the whole service."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import orchestrator
from orchestrator.config import Config
from orchestrator.dispatch.waits import WaitKind
from orchestrator.errors import TrainerLinkError
from orchestrator.local.policy import Policy
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient, NothingSentError
from tests.integration.service_fixture import env, make_config, running_service
from tests.support.waiting import until


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as url:
        yield url


@pytest.fixture
async def fresh() -> AsyncIterator[str]:
    """The address of another one, which nobody has sent anything."""
    async with run_policy_server() as url:
        yield url


def config_of(folder: Path, policy: str, **inference: Any) -> Config:
    settings = {
        "base_urls": [policy],
        "weight_update": "trainer",
        "health_interval_s": 0.05,
        "update_timeout_s": 30,
        **inference,
    }
    return make_config(folder / "run", policy, [env("Dice")], inference=settings)


async def send(engines: Sequence[str], folder: Path) -> None:
    """What a trainer does with its own means while the engines stand still."""
    async with aiohttp.ClientSession() as session:
        for url in engines:
            root = url.removesuffix("/v1")
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            async with session.get(f"{root}/is_paused") as response:
                assert (await response.json())["is_paused"]
            async with session.post(f"{root}/collective_rpc", json=body) as response:
                assert response.status == 200


async def label_of(policy: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{policy.removesuffix('/v1')}/weight_info") as response,
    ):
        return str((await response.json())["weight_version"])


async def test_a_version_that_was_sent_counts_as_any_other(tmp_path: Path, policy: str) -> None:
    """It is recorded and sampled from; what goes back, or is published in another way, is refused with the right one."""
    weights = Policy().save(tmp_path / "weights")
    async with running_service(config_of(tmp_path, policy)) as running:
        run, pool = running.service.run, running.service.pool
        async with AsyncTrainerClient(running.address) as trainer:
            for version in (1, 2):
                batch = await trainer.next_batch()
                assert batch is not None
                async with trainer.updating(version, wait_s=50) as engines:
                    assert engines == [policy]
                    [wait] = [
                        wait for wait in running.service.status().waits if wait.kind == WaitKind.WEIGHTS
                    ]
                    assert f"the trainer to send version {version}" in wait.text
                    await send(engines, weights)
                assert run.weights.newest == run.version == version
                assert (await label_of(policy)).split(" ")[0] == str(version)
                assert not [wait for wait in running.service.status().waits if wait.kind == WaitKind.WEIGHTS]
            with pytest.raises(TrainerLinkError, match=r"with trainer\.updating\(3\)"):
                await trainer.publish(3, str(weights))
            with pytest.raises(TrainerLinkError, match="version 1 is older than the published 2"):
                async with trainer.updating(1):
                    pass
            while (batch := await trainer.next_batch()) is not None and min(batch.versions) < 2:
                pass
        assert [endpoint.losses for endpoint in pool.endpoints] == [0]


async def test_after_an_exception_inside_no_engine_is_sampled_from_before_the_next_version(
    tmp_path: Path, policy: str, fresh: str
) -> None:
    """One of two engines was sent to, so what has which weights is not known: both wait, and a rollout that stood still is asked again."""
    weights = Policy().save(tmp_path / "weights")
    values = config_of(tmp_path, policy, base_urls=[policy, fresh])

    async def send_to_one_and_raise(trainer: AsyncTrainerClient) -> None:
        async with trainer.updating(1) as engines:
            assert set(engines) == {policy, fresh}
            await send(engines[:1], weights)
            raise ZeroDivisionError("after the first of two")

    async with running_service(values) as running:
        run, pool = running.service.run, running.service.pool
        async with AsyncTrainerClient(running.address, ping_s=0.1) as trainer:
            with pytest.raises(ZeroDivisionError, match="after the first of two"):
                await send_to_one_and_raise(trainer)
            await until(lambda: pool.sending.version is None)
            assert (run.weights.newest, pool.ready) == (0, [])
            assert [endpoint.losses for endpoint in pool.endpoints] == [1, 1]
            await until(lambda: pool.sending.waiting == 2)
            assert "waits for the trainer to send" in pool.explain()
            async with trainer.updating(1, wait_s=50) as engines:
                await send(engines, weights)
            assert (run.version, len(pool.ready)) == (1, 2)
            while (batch := await trainer.next_batch()) is not None and min(batch.versions) < 1:
                pass


async def test_a_trainer_that_says_that_it_sent_nothing_changes_nothing(tmp_path: Path, policy: str) -> None:
    """The engines go on as they were, and the next version is sent as if nothing had been."""
    weights = Policy().save(tmp_path / "weights")
    async with running_service(config_of(tmp_path, policy)) as running:
        run, pool = running.service.run, running.service.pool
        async with AsyncTrainerClient(running.address) as trainer:
            with pytest.raises(NothingSentError):
                async with trainer.updating(1):
                    raise NothingSentError("the process group is gone")
            await until(lambda: pool.sending.version is None)
            assert run.weights.newest == 0
            assert await label_of(policy) == "default"
            assert len(pool.ready) == 1
            async with trainer.updating(1, wait_s=50) as engines:
                await send(engines, weights)
            assert run.version == 1


async def test_a_trainer_that_dies_inside_leaves_engines_that_wait_for_the_next(
    tmp_path: Path, policy: str
) -> None:
    """The process that takes its place is asked for weights while it waits for a batch, so that the run goes on."""
    weights = Policy().save(tmp_path / "weights")
    async with running_service(config_of(tmp_path, policy)) as running:
        run, pool = running.service.run, running.service.pool
        old = AsyncTrainerClient(running.address)
        await old.__aenter__()
        update = old.updating(1)
        await update.__aenter__()
        asked: list[int] = []

        async def resend() -> None:
            asked.append(new.engines_waiting)
            async with new.updating(1) as engines:
                await send(engines, weights)

        new = AsyncTrainerClient(running.address, ping_s=0.1, on_engines_waiting=resend)
        async with new:
            await until(lambda: not pool.ready)
            assert (
                "nobody knows which weights it has" in pool.explain()
                or "waits for the trainer" in pool.explain()
            )
            assert run.weights.newest == 0
            while (batch := await new.next_batch()) is not None and min(batch.versions) < 1:
                pass
            assert asked
            assert run.version == 1
            with pytest.raises(TrainerLinkError, match="a newer process has joined"):
                await update.__aexit__(None, None, None)
        await old._close()


async def test_a_trainer_that_says_nothing_is_given_up_in_time(tmp_path: Path, policy: str) -> None:
    """It hears of it when it leaves the block, and may send the version again."""
    weights = Policy().save(tmp_path / "weights")
    async with running_service(config_of(tmp_path, policy, update_timeout_s=0.5)) as running:
        pool = running.service.pool
        async with AsyncTrainerClient(running.address) as trainer:
            with pytest.raises(TrainerLinkError, match="version 1 is not being sent: it was given up"):
                async with trainer.updating(1):
                    await until(lambda: pool.sending.version is None)
            assert not pool.ready
            while not pool.ready:  # a machine that is slow now may be given up again, and may send again
                with contextlib.suppress(TrainerLinkError):
                    async with trainer.updating(1, wait_s=50) as engines:
                        await send(engines, weights)
            assert (running.service.run.version, len(pool.ready)) == (1, 1)


async def test_what_became_of_an_earlier_attempt_says_nothing_of_a_later_one(
    tmp_path: Path, policy: str
) -> None:
    """One that raised has ended by its trainer's word; the same version is sent again, and that is given up for its time."""
    async with running_service(config_of(tmp_path, policy, update_timeout_s=0.5)) as running:
        run, pool = running.service.run, running.service.pool
        async with AsyncTrainerClient(running.address) as trainer:
            with pytest.raises(ZeroDivisionError):
                async with trainer.updating(1):
                    raise ZeroDivisionError
            with pytest.raises(TrainerLinkError, match="version 1 is not being sent: it was given up"):
                async with trainer.updating(1):
                    await until(lambda: pool.sending.version is None)
            assert run.weights.newest == 0


async def test_after_a_restart_engines_that_have_the_version_go_on(
    tmp_path: Path, policy: str, fresh: str
) -> None:
    """Without the trainer's help; an engine that was restarted too waits for it, and the version may be sent once more."""
    weights = Policy().save(tmp_path / "weights")
    async with running_service(config_of(tmp_path, policy)) as running:
        async with (
            AsyncTrainerClient(running.address) as trainer,
            trainer.updating(1, wait_s=50) as engines,
        ):
            await send(engines, weights)
        assert running.service.run.version == 1
    async with running_service(config_of(tmp_path, policy)) as running:
        assert (running.service.run.version, len(running.service.pool.ready)) == (1, 1)
    async with running_service(config_of(tmp_path, fresh)) as running:
        pool = running.service.pool
        assert not pool.ready
        said = "waits for the trainer to send version 1"
        await until(lambda: said in running.service.status().waiting_for)
        async with AsyncTrainerClient(running.address) as trainer:
            async with trainer.updating(1, wait_s=50) as engines:
                await send(engines, weights)
            await until(lambda: len(pool.ready) == 1)
            assert running.service.run.weights.newest == 1


async def train_and_send(config: Config, weights: Path, versions: Sequence[int], **options: Any) -> None:
    """A process of a run whose trainer sends versions, each after the step of its number."""
    async with (
        running_service(config, **options) as running,
        AsyncTrainerClient(running.address) as trainer,
    ):
        for version in versions:
            if version > trainer.after:
                batch = await trainer.next_batch()
                assert batch is not None
                assert batch.step == version
            async with trainer.updating(version, step=version, wait_s=50) as engines:
                await send(engines, weights)


@pytest.mark.parametrize("other", ["another run", "set back since"])
async def test_a_version_of_the_same_number_of_another_life_is_another(
    tmp_path: Path, policy: str, fresh: str, other: str
) -> None:
    """An engine that has it is not sampled from: it waits for the trainer."""
    weights = Policy().save(tmp_path / "weights")
    both = config_of(tmp_path, policy, base_urls=[policy, fresh])
    if other == "another run":
        elsewhere = config_of(tmp_path, policy).model_copy(update={"run_dir": tmp_path / "elsewhere"})
        await train_and_send(elsewhere, weights, [1, 2])
        await train_and_send(config_of(tmp_path, fresh), weights, [1, 2])
    else:
        await train_and_send(both, weights, [1, 2])
        await train_and_send(config_of(tmp_path, fresh), weights, [1, 2], rewind_to=1)
    async with running_service(both) as running:
        pool = running.service.pool
        assert running.service.run.version == 2
        await until(lambda: pool.sending.waiting == 1)
        assert [endpoint.url for endpoint in pool.ready] == [fresh]


async def test_where_weights_come_from_folders_nothing_can_be_sent(tmp_path: Path, policy: str) -> None:
    """The refusal names the setting."""
    config = config_of(tmp_path, policy, weight_update="vllm")
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        with pytest.raises(TrainerLinkError, match=r'inference\.weight_update is "vllm"'):
            async with trainer.updating(1):
                pass


async def test_a_program_with_the_run_inside_sends_too(tmp_path: Path, policy: str) -> None:
    """With the same block."""
    weights = Policy().save(tmp_path / "weights")
    async with orchestrator.running(config_of(tmp_path, policy, initial_weights="trainer")) as run:
        await until(lambda: run.engines_waiting == 1)
        async with run.updating(0) as engines:
            await send(engines, weights)
        assert await run.next_batch() is not None
