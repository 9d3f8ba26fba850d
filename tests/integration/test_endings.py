"""The command line as a process: how a run is stopped, refused, or ends in an error, and with which exit code."""

import json
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.journal import JournalReader
from orchestrator.local.server import run_policy_server
from tests.integration.env_servers import until
from tests.integration.recording_trainer import TrainerSpec, read_records
from tests.integration.service_fixture import (
    Command,
    TrainerProcess,
    env,
    make_config,
    run_command,
    running_service,
    settings,
    write_config,
)


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    """The address of an inference server."""
    async with run_policy_server() as base_url:
        yield base_url


def config_file(tmp_path: Path, policy: str, *envs: dict[str, Any], **sections: Any) -> Path:
    return write_config(tmp_path / "config.toml", settings(tmp_path / "run", policy, list(envs), **sections))


async def run_failing(tmp_path: Path, config: Path, *overrides: str) -> tuple[int | None, str]:
    """Run until the error; its exit code and what it said, which is never a traceback of ours."""
    command = await run_command("run", config, *overrides, logs=tmp_path / "logs")
    said = command.errors()
    assert 'File "' not in said.partition("orchestrator: ")[0], said
    return command.process.returncode, said.partition("orchestrator: ")[2]


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_one_signal_drains_and_saves(tmp_path: Path, policy: str, number: signal.Signals) -> None:
    """What is in flight may end and is recorded, the exit code says which signal, and the run can be continued."""
    gate, asked = tmp_path / "gate", tmp_path / "asked"
    config = config_file(
        tmp_path,
        policy,
        env("Gated", args={"gate": str(gate), "asked": str(asked)}),
        batch={"size": 400},
        dispatch={"max_inflight": 8},
    )
    async with await Command.start("run", config, logs=tmp_path / "logs") as command:
        await command.wait_event("run.started")
        await until(lambda: asked.exists() and len(asked.read_text().splitlines()) == 8)
        command.send(number)
        await command.wait_event("run.draining")
        gate.touch()
        assert await command.wait() == 128 + number, command.errors()
        assert not command.processes()
    with JournalReader(tmp_path / "run") as reader:
        assert {row.task.key for row in reader.group_rows(queued=True)} == {"gated/train/0", "gated/train/1"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["end"] == "stopped by a signal"
    if number == signal.SIGTERM:
        async with await Command.start("run", config, logs=tmp_path / "logs") as command:
            assert (await command.wait_event("run.resumed"))["groups"] == 2


@pytest.mark.timeout(600)
async def test_every_batch_keeps_its_minimums_however_often_a_run_is_stopped(
    tmp_path: Path, policy: str
) -> None:
    """Servers that end with the run are no reason to waive a minimum, and a run that drains forms nothing more."""
    record, link = tmp_path / "rank-0.jsonl", f"ipc://{tmp_path}/trainer"
    config = config_file(
        tmp_path,
        policy,
        env("Dice", "quick", ratio=0.9),
        env("Dice", "slow", ratio=0.1, min_batch_allocation=0.5, args={"latency_s": 0.05}),
        trainer={"bind": link},
    )
    spec = TrainerSpec(link, str(record), str(tmp_path / "trigger"))
    async with await TrainerProcess.start(spec):
        for life in range(1, 4):
            async with await Command.start("run", config, logs=tmp_path / "logs") as command:
                await until(
                    lambda: (
                        read_records([record]).last_step >= 5 * life  # noqa: B023  awaited before the next turn
                        or command.process.returncode is not None
                    )
                )
                command.send(signal.SIGTERM)
                assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
                events = [
                    json.loads(line)["event"] for line in command.errors().splitlines() if line[:1] == "{"
                ]
                assert "batch.formed" not in events[events.index("run.draining") :]
                assert "minimum.waived" not in events
                assert "Traceback" not in command.errors()
                assert "cannot schedule new futures" not in command.errors()
    records = read_records([record])
    records.check(world_size=1, batch_size=8)
    for line in records.batches.values():
        assert sum(n for group, n in line["groups"].items() if group.startswith("slow/")) >= 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_at_once(tmp_path: Path, policy: str, number: signal.Signals) -> None:
    """Even while rollouts would go on, and without leaving a process behind."""
    asked = tmp_path / "asked"
    config = config_file(
        tmp_path, policy, env("Gated", args={"gate": str(tmp_path / "never"), "asked": str(asked)})
    )
    async with await Command.start("run", config, logs=tmp_path / "logs") as command:
        await command.wait_event("run.started")
        await until(asked.exists)
        command.send(number)
        await command.wait_event("run.draining")
        command.send(number)
        assert await command.wait() == 128 + number
        assert command.events("run.drain_ended") == []
        await until(lambda: not command.processes())


async def test_a_drain_ends_after_its_time(tmp_path: Path, policy: str) -> None:
    """`dispatch.drain_s` bounds how long a stop waits for groups that do not end."""
    asked = tmp_path / "asked"
    config = config_file(
        tmp_path, policy, env("Gated", args={"gate": str(tmp_path / "never"), "asked": str(asked)})
    )
    async with await Command.start(
        "run", config, "--dispatch.drain_s", "0.2", logs=tmp_path / "logs"
    ) as command:
        await command.wait_event("run.started")
        await until(asked.exists)
        command.send(signal.SIGTERM)
        assert await command.wait() == 128 + signal.SIGTERM
        assert [event["at_most_s"] for event in command.events("run.draining")] == [0.2]
        assert len(command.events("run.drain_ended")) == 1


async def test_a_signal_while_it_starts_ends_the_start(tmp_path: Path, policy: str) -> None:
    """Before anything is served there is nothing to drain: the exit code says the signal, without a traceback."""
    config = config_file(tmp_path, "http://127.0.0.1:9/v1", env("Dice"))
    async with await Command.start("run", config, logs=tmp_path / "logs") as command:
        await command.wait_event("env.ready")
        command.send(signal.SIGTERM)
        assert await command.wait() == 128 + signal.SIGTERM
        assert not command.processes()
        assert "Traceback" not in command.errors()


# --- what cannot be started -----------------------------------------------------------------------------------------


async def test_a_mistake_in_the_configuration_ends_before_anything_is_started(
    tmp_path: Path, policy: str
) -> None:
    """Exit code 2 with every problem at its path; not even the run directory is made."""
    config = config_file(tmp_path, policy, env("Dice", ratoi=1.0), batch={"size": 7, "on_stuck": "wait"})
    code, said = await run_failing(tmp_path, config)
    assert code == 2
    assert 'train.env[0].ratoi: unknown key; did you mean "ratio"?' in said
    assert "batch.size: no number of whole groups of 4 ever sums to 7" in said
    assert not (tmp_path / "run").exists()


async def test_an_env_that_cannot_be_loaded_ends_the_start_with_its_last_words(
    tmp_path: Path, policy: str
) -> None:
    """Exit code 3, with the tail of the server's own log."""
    config = config_file(tmp_path, policy, env("Dice"), env("Unloadable"))
    code, said = await run_failing(tmp_path, config)
    assert code == 3
    assert 'env "unloadable": server unloadable-0 did not start' in said
    assert "RuntimeError: the dataset is not where it should be" in said


async def test_an_env_whose_servers_keep_dying_ends_the_run(tmp_path: Path, policy: str) -> None:
    """Exit code 4 once its restarts are used up."""
    config = config_file(
        tmp_path, policy, env("Dying", max_restarts=2), dispatch={"max_attempts": 100, "backoff_s": 0.01}
    )
    code, said = await run_failing(tmp_path, config)
    assert code == 4
    assert 'env "dying": server dying-0 keeps dying and its restarts are used up' in said


async def test_an_address_that_is_taken_ends_the_start(tmp_path: Path, policy: str) -> None:
    """Exit code 5 for the trainer's link; the address is named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        code, said = await run_failing(
            tmp_path, config_file(tmp_path, policy, env("Dice"), trainer={"bind": address})
        )
    assert code == 5
    assert f"the trainer link cannot listen at {address}" in said


async def test_a_second_orchestrator_on_a_run_directory_is_refused(tmp_path: Path, policy: str) -> None:
    """Exit code 6 with a line that names the first; the first goes on."""
    config = make_config(tmp_path / "run", policy, [env("Dice")])
    async with running_service(config) as running:
        code, said = await run_failing(tmp_path, tmp_path / "run" / "config.toml")
        assert code == 6
        assert f"{tmp_path / 'run'}: in use by pid " in said
        assert "stop that orchestrator or choose another run_dir" in said
        assert not running.serving.done()


async def test_a_run_directory_that_cannot_be_written_ends_the_start(tmp_path: Path, policy: str) -> None:
    """Exit code 6; the directory is named."""
    (tmp_path / "file").touch()
    config = config_file(tmp_path, policy, env("Dice"))
    code, said = await run_failing(tmp_path, config, "--run_dir", str(tmp_path / "file" / "run"))
    assert code == 6
    assert "file/run: the run directory cannot be written" in said


# --- a run directory with other tasks -------------------------------------------------------------------------------


async def test_a_run_directory_with_other_tasks_is_refused_and_every_change_is_named(
    tmp_path: Path, policy: str
) -> None:
    """Exit code 2 with both values and the remedy; nothing was changed, so the old configuration goes on."""
    old = [env("Dice", "dice", args={"tasks": 50}), env("Ranked", "ranked")]
    changed = [env("Dice", "dice", args={"tasks": 60}), env("Ranked", "ranked")]
    changed[1]["id"] += "@hard"
    async with running_service(make_config(tmp_path / "run", policy, old, seed=1)):
        pass
    code, said = await run_failing(tmp_path, config_file(tmp_path, policy, *changed, seed=2))
    assert code == 2
    assert f"{tmp_path / 'run'} holds a run with other tasks" in said
    assert "the seed was 1 and is 2" in said
    assert 'env "dice": it had 50 tasks and has 60 tasks' in said
    assert 'env "ranked": the split was "train" and is "hard"' in said
    assert "set it back, choose another run_dir, or start over with --fresh" in said
    async with running_service(make_config(tmp_path / "run", policy, old, seed=1)):
        pass
    config = make_config(tmp_path / "run", policy, changed, seed=2)
    async with running_service(config, fresh=True):
        pass


async def test_an_env_may_be_new_in_a_run_that_goes_on(tmp_path: Path, policy: str) -> None:
    """It is said, as are changed arguments and an env that is gone."""
    async with running_service(make_config(tmp_path / "run", policy, [env("Dice"), env("Chat")])):
        pass
    envs = [env("Dice", args={"latency_s": 0.01}), env("Ranked")]
    with capture_logs() as logs:
        async with running_service(make_config(tmp_path / "run", policy, envs)):
            pass
    notes = [record["note"] for record in logs if record["event"] == "run.changed"]
    assert [note.partition(";")[0] for note in notes] == [
        'env "ranked" is new and starts at its first task',
        'env "chat" was removed',
        'env "dice": its args have changed',
    ]


# --- what cannot go on ----------------------------------------------------------------------------------------------


async def test_a_run_without_anything_to_train_on_has_its_own_exit_code(tmp_path: Path, policy: str) -> None:
    """Exit code 7, with the env and the reason on one line."""
    config = config_file(tmp_path, policy, env("Level"), dispatch={"max_barren_batches": 2})
    code, said = await run_failing(tmp_path, config)
    assert code == 7
    assert 'env "level": equal_rewards' in said
    assert len(said.splitlines()) == 1


async def test_an_environment_that_raises_is_told_with_its_own_file_and_line(
    tmp_path: Path, policy: str
) -> None:
    """In the first line about it, in the log of the run directory and in the closing error."""
    config = config_file(tmp_path, policy, env("Failing"), dispatch={"max_barren_batches": 1})
    code, said = await run_failing(tmp_path, config)
    assert code == 7
    where = r"\S+envs_for_tests\.py:\d+ in attempt"
    raised = "ValueError: the judge is out of order"
    assert re.search(rf'env "failing": error: {raised}, at {where} \(\d+ rollouts\)', said), said
    log = (tmp_path / "run" / "logs" / "orchestrator.log").read_text()
    records = [json.loads(line) for line in log.splitlines()]
    first = next(record for record in records if record["event"] == "rollout.failed")
    assert first["message"] == raised
    assert re.fullmatch(where, first["where"])
    assert "envs/answering.py" not in first["detail"]
    assert (records[-1]["event"], records[-1]["level"]) == ("run.failed", "error")
    assert records[-1]["error"] == f"StalledError: {said.strip()}"


async def test_an_environment_that_cannot_be_loaded_is_told_with_its_own_frames(
    tmp_path: Path, policy: str
) -> None:
    """Exit code 3; below the one line stand the author's frames, not lines of our log."""
    code, said = await run_failing(tmp_path, config_file(tmp_path, policy, env("Unloadable")))
    assert code == 3
    first, *below = said.splitlines()
    assert 'the constructor of "tests.integration.envs_for_tests:Unloadable" raised RuntimeError: ' in first
    assert re.search(r"at \S+envs_for_tests\.py:\d+ in __init__$", first)
    assert sum("File " in line for line in below) == 1
    assert "RuntimeError: the dataset is not where it should be" in below
    assert below[-1] == f"its log: {tmp_path / 'run' / 'logs' / 'unloadable-0.log'}"


@pytest.mark.timeout(600)
async def test_a_full_disk_ends_the_run_and_loses_nothing_that_was_recorded(
    tmp_path: Path, policy: str
) -> None:
    """Exit code 6 when a file cannot grow any more; with room again the run continues without a gap."""
    record = tmp_path / "rank-0.jsonl"
    config = config_file(tmp_path, policy, env("Dice"), trainer={"bind": f"ipc://{tmp_path}/trainer"})
    spec = TrainerSpec(f"ipc://{tmp_path}/trainer", str(record), str(tmp_path / "trigger"))
    async with await TrainerProcess.start(spec):
        async with await Command.start("run", config, logs=tmp_path / "logs") as command:
            await until(
                lambda: read_records([record]).last_step >= 3 or command.process.returncode is not None
            )
            # The kernel refuses to let any file of the process grow beyond this, as a full disk would.
            resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (400_000, 400_000))
            assert await command.wait() == 6, command.errors()[-3000:]
            assert "orchestrator: the journal cannot be written: " in command.errors()
            assert "Traceback" not in command.errors()
            assert not command.processes()
        before = read_records([record]).last_step
        async with await Command.start("run", config, logs=tmp_path / "logs") as command:
            await until(
                lambda: (
                    read_records([record]).last_step >= before + 3 or command.process.returncode is not None
                )
            )
            command.send(signal.SIGTERM)
            assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
    read_records([record]).check(world_size=1, batch_size=8)
