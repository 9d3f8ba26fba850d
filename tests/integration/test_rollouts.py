"""What a real run leaves to be read: its rollouts, the reasons of its failures, and all of it after kill -9."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrator import RolloutReader
from orchestrator.archive.schema import FILE
from orchestrator.journal import JournalReader
from orchestrator.local.server import run_policy_server
from tests.integration.env_servers import ROOT, until
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import Command, env, make_config, run_command, running_service

QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as base_url:
        yield base_url


async def test_the_rollouts_of_a_finished_run_are_found_and_read(tmp_path: Path, policy: str) -> None:
    """Every group of every batch, the evaluations, and why an env's rollouts failed; `--fresh` moves them aside."""
    run_dir, record = tmp_path / "run", TrainerRecord()
    evaluated = [env("Chat", "chat", num_examples=3)]
    config = make_config(run_dir, policy, [env("Chat"), env("Failing")], max_steps=4, eval={"env": evaluated})
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record))
        await running.wait_end()
    with RolloutReader(run_dir) as reader:
        trained = list(reader.groups(outcome="trained"))
        assert {one.id for one in trained} == {name.partition("+")[0] for name in record.groups()}
        assert {one.step for one in trained} == {1, 2, 3, 4}
        assert all(one.size == 4 and one.tokens > 0 and one.seconds >= 0 for one in trained)
        said = next(reader.groups(env="chat", split="train", outcome="trained"))
        assert said.has_text
        assert [one.messages[0]["content"] for one in said.rollouts] == [f"task {said.task}"] * 4
        assert [one.reward for one in said.rollouts] == list(said.rewards)
        found = list(reader.groups(split="eval", step=0))
        assert Counter(one.outcome for one in found) == {"evaluated": 3}
        assert all(one.has_text for one in found)
        (failure,) = reader.failures()
        assert (failure.env, failure.kind) == ("failing", "error")
        assert "the judge is out of order" in failure.text
        assert "envs_for_tests.py" in failure.detail
        given_up = list(reader.groups(env="failing"))
        assert {(one.outcome, one.rewards) for one in given_up} == {("error", ())}
        assert failure.task in {one.task for one in given_up}
    async with running_service(config, fresh=True):
        assert (run_dir / "journal.old-1").is_dir()
        await until((run_dir / f"{FILE}.old-1").is_file)
    with RolloutReader(run_dir) as reader:
        assert not any(one.outcome == "trained" for one in reader.groups())


async def test_a_run_that_keeps_no_archive_is_read_from_its_journal(tmp_path: Path, policy: str) -> None:
    """No file is made, and what the journal still holds can be read."""
    run_dir, record = tmp_path / "run", TrainerRecord()
    config = make_config(run_dir, policy, [env("Chat")], max_steps=2, archive={"enabled": False})
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        group.create_task(train_here(running.address, record))
        await running.wait_end()
    assert not (run_dir / FILE).exists()
    with RolloutReader(run_dir) as reader:
        assert {one.step for one in reader.groups(outcome="trained", texts=False)} == {1, 2}
        assert next(reader.groups(outcome="trained")).rollouts[0].messages[0]["role"] == "user"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_killed_run_is_readable_and_goes_on_without_doubling_a_row(tmp_path: Path) -> None:
    """Also while it runs; every group of every batch of both processes has one row, under its step."""
    run_dir = tmp_path / "run"
    arguments = ("run", QUICKSTART, "--run_dir", run_dir, "--max_steps", "10")
    async with await Command.start(*arguments, logs=tmp_path / "logs") as command:
        await command.wait_event("trainer.version_published", 4)

        def trained() -> set[str]:
            with RolloutReader(run_dir) as reader:
                return {one.id for one in reader.groups(outcome="trained", texts=False)}

        await until(lambda: bool(trained()))  # the archive is written a moment later
        before = trained()
        command.send(signal.SIGKILL)
        await command.wait()
        await until(lambda: not command.processes())
    assert before <= trained()
    command = await run_command(*arguments, logs=tmp_path / "logs")
    assert command.process.returncode == 0, command.errors()[-3000:]
    assert not command.events("archive.moved_aside")
    with RolloutReader(run_dir) as reader, JournalReader(run_dir) as journal:
        groups = list(reader.groups(outcome="trained", texts=False))
        assert len({one.id for one in groups}) == len(groups)
        assert before <= {one.id for one in groups}
        steps = Counter(one.step for one in groups)
        assert all(steps[batch.step] <= batch.groups for batch in journal.batches())
        # The parts of a group that was split have one row, under the step of the first.
        last = journal.recover(world_size=1).batches[-1]
        assert last.step == 10
        assert steps[10] == sum(not group.part for group in last.groups)
