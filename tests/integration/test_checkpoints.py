"""A trainer that falls back to its checkpoint gets the same batches again, however far back that is."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator.errors import TrainerLinkError
from orchestrator.journal import JournalReader
from orchestrator.local.server import run_policy_server
from orchestrator.trainer import AsyncTrainerClient
from tests.integration.env_servers import until
from tests.integration.service_fixture import env, make_config, running_service
from tests.support.trainer_victim import digest

STEPS = 9


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as address:
        yield address


async def test_batches_are_kept_since_the_step_that_was_reported_as_saved(tmp_path: Path, url: str) -> None:
    """More of them than are in memory, over a restart, byte for byte; those before the checkpoint are given back."""
    config = make_config(
        tmp_path,
        url,
        [env("Dice")],
        trainer={"bind": f"ipc://{tmp_path}/s", "keep_batches": "checkpoint"},
    )
    seen: dict[int, str] = {}
    async with running_service(config) as running, AsyncTrainerClient(running.address) as trainer:
        while len(seen) < STEPS:
            batch = await anext(trainer)
            seen[batch.step] = digest(batch)
            if batch.step == 3:
                await trainer.checkpointed(2)
                # Going back changes nothing.
                await trainer.checkpointed(1)
        with pytest.raises(TrainerLinkError, match=r"there is no batch of step 500"):
            await trainer.checkpointed(500)
        await until(lambda: running.service.run.acknowledged >= STEPS - 1)
        await running.service.journal.flush()
        status = running.service.status()
        assert status.kept_batches == STEPS - 1 - 2
        assert status.kept_bytes > 0
        kept_bytes = status.kept_bytes
    with JournalReader(tmp_path) as reader:
        assert [row.step for row in reader.batches() if row.kept][:7] == list(range(3, 10))
    async with running_service(config) as running:
        status = running.service.status()
        assert (status.kept_batches >= STEPS - 3, status.kept_bytes >= kept_bytes) == (True, True)
        async with AsyncTrainerClient(running.address, resume_after=2) as trainer:
            again = {batch.step: digest(batch) for batch in [await anext(trainer) for _ in range(STEPS - 2)]}
            assert again == {step: seen[step] for step in range(3, STEPS + 1)}
            with pytest.raises(TrainerLinkError, match="step 2 is no longer kept"):
                await trainer.get(2)
            await trainer.checkpointed(STEPS)
            await running.service.journal.flush()
            with JournalReader(tmp_path) as reader:
                assert min(row.step for row in reader.batches() if row.kept) > STEPS
