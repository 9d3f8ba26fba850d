"""A trainer that falls back further than batches are kept: where it may, it has the run set back by itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import TrainerLinkError
from orchestrator.journal import JournalReader
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.service_fixture import Command, env, settings, write_config
from tests.support.ports import free_port

RAN = 5
BACK_TO = 2
STEPS = 6


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as address:
        yield address


def configured(tmp_path: Path, url: str, **trainer: Any) -> Path:
    values = settings(
        tmp_path / "run",
        url,
        [env("Dice")],
        max_steps=STEPS,
        trainer={"keep_batches": 1, "allow_rewind": True, **trainer},
    )
    return write_config(tmp_path / "config.toml", values)


async def train(address: str, steps: int, **options: Any) -> list[int]:
    """Steps that a trainer is given, until it has so many; the last one is not acknowledged."""
    async with AsyncTrainerClient(address, auto_ack=False, **options) as trainer:
        seen: list[int] = []
        while len(seen) < steps:
            batch = await anext(trainer)
            seen.append(batch.step)
            await trainer.publish(batch.step)
            if len(seen) < steps:
                await trainer.ack(batch.step)
        return seen


async def test_a_trainer_may_have_the_run_set_back(tmp_path: Path, url: str) -> None:
    """The service restarts by itself behind the step that the trainer has; the trainer only waits. The run then goes on to its end."""
    address = f"tcp://127.0.0.1:{free_port()}"
    config = configured(tmp_path, url, bind=address)
    async with await Command.start("run", config, logs=tmp_path) as command:
        assert await train(address, RAN) == list(range(1, RAN + 1))
        # Without a word from the trainer nothing is given up.
        with pytest.raises(TrainerLinkError, match=rf"--rewind-to {BACK_TO}`"):
            await train(address, 1, resume_after=BACK_TO)
        async with AsyncTrainerClient(address, resume_after=BACK_TO, rewind=True) as trainer:
            seen = [batch.step async for batch in trainer]
        assert seen == list(range(BACK_TO + 1, STEPS + 1))
        assert await command.wait() == 0, command.errors()[-3000:]
        (rewound,) = command.events("run.rewound")
        assert (rewound["last_step"] >= RAN, rewound["step"]) == (True, BACK_TO)
    with JournalReader(tmp_path / "run") as reader:
        assert [row.step for row in reader.batches()] == list(range(1, STEPS + 1))


async def test_every_rank_must_ask_for_it(tmp_path: Path, url: str) -> None:
    """A rank waits for the others; one that goes on has it refused, with its number, and loses nothing."""
    address = f"ipc://{tmp_path}/s"
    config = configured(tmp_path, url, bind=address, world_size=2)

    def rank(number: int, **options: Any) -> AsyncTrainerClient:
        return AsyncTrainerClient(address, rank=number, world_size=2, **options)

    async with await Command.start("run", config, logs=tmp_path) as command:
        async with asyncio.TaskGroup() as group:
            for number in (0, 1):
                group.create_task(train(address, RAN, rank=number, world_size=2))
        async with rank(0, resume_after=BACK_TO, rewind=True) as back, rank(1) as other:
            asked = asyncio.create_task(back.next_batch())
            waits = await command.wait_event("trainer.rewind_waits")
            assert (waits["asked_by"], waits["waits_for"]) == ([0], [1])
            assert (await anext(other)).step == RAN
            with pytest.raises(TrainerLinkError, match=rf"rank 1 goes on with step {RAN}"):
                await asked
        assert not command.events("run.rewound")

        async def from_the_start(number: int) -> list[int]:
            async with rank(number, resume_after=BACK_TO, rewind=True) as trainer:
                return [batch.step async for batch in trainer]

        async with asyncio.TaskGroup() as group:
            both = [group.create_task(from_the_start(number)) for number in (0, 1)]
        assert [task.result() for task in both] == [list(range(BACK_TO + 1, STEPS + 1))] * 2
        assert await command.wait() == 0, command.errors()[-3000:]
        assert len(command.events("run.rewound")) == 1


async def test_a_rank_that_outlives_a_rewind_is_stopped(tmp_path: Path, url: str) -> None:
    """It stands on a step that was given up, though there is one of that number again: nothing that it says counts, and each thing
    that it says is an error with the remedy. The trainer that was started from the checkpoint is left in peace.
    """
    address = f"ipc://{tmp_path}/s"
    config = configured(tmp_path, url, bind=address)
    remedy = f"set back to step {BACK_TO} .*since this process joined.*restart it from its checkpoint of step {BACK_TO}"
    survivor = AsyncTrainerClient(address, auto_ack=False, ping_s=0.2)
    async with AsyncExitStack() as until_the_end:
        async with await Command.start("run", config, logs=tmp_path) as command:
            await until_the_end.enter_async_context(survivor)
            await train_on(survivor, RAN)
            command.process.terminate()
            assert await command.wait() == 143
        async with await Command.start(
            "run", config, "--rewind-to", str(BACK_TO), logs=tmp_path / "again"
        ) as command:
            async with AsyncTrainerClient(address, resume_after=BACK_TO, auto_ack=False) as real:
                await train_on(real, RAN - BACK_TO)
                for doing in (
                    lambda: survivor.publish(RAN),
                    lambda: survivor.ack(RAN),
                    survivor.next_batch,
                    lambda: survivor.report(RAN, {"loss": 1.0}),
                    lambda: survivor.checkpointed(RAN),
                    survivor.done,
                ):
                    with pytest.raises(TrainerLinkError, match=remedy):
                        await doing()
                with pytest.raises(TrainerLinkError, match=remedy):
                    async with survivor.updating(RAN):
                        pytest.fail("the engines stood still for weights that were given up")
                assert not command.events("trainer.rank_replaced")
                assert [event["version"] for event in command.events("trainer.version_published")] == [
                    3,
                    4,
                    5,
                ]
                await real.ack(RAN)
                assert (await anext(real)).step == STEPS
                await real.ack(STEPS)
            assert await command.wait() == 0, command.errors()[-3000:]


async def train_on(trainer: AsyncTrainerClient, steps: int) -> None:
    """The next so many steps, of which the last is not acknowledged."""
    for left in range(steps, 0, -1):
        batch = await anext(trainer)
        await trainer.publish(batch.step)
        if left > 1:
            await trainer.ack(batch.step)
