"""The start of a run: what is found before anything is started, and what is said while it goes on."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.errors import ConfigError, TrainerLinkError
from orchestrator.journal import Journal, Recovered
from orchestrator.service import build_front, start_service
from orchestrator.service.front import Front
from tests.integration.env_servers import until
from tests.integration.service_fixture import env, make_config

NOWHERE = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(("table", "error"), [("trainer", TrainerLinkError), ("http", ConfigError)])
async def test_an_address_in_use_is_found_before_any_environment_is_started(
    tmp_path: Path, table: str, error: type[Exception]
) -> None:
    """The trainer's and that of HTTP: nobody waits for a model to load to hear of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"trainer": {"bind": f"tcp://127.0.0.1:{port}"}, "http": {"port": port}}
        config = make_config(tmp_path / "run", NOWHERE, [env("Dice")], **{table: settings[table]})
        with capture_logs() as logs, pytest.raises(error, match=str(port)):
            async with start_service(config):
                pass
    assert "env.server_started" not in [record["event"] for record in logs]


async def _start(config: Config, front: Front) -> None:
    async with start_service(config, front=front):
        pass


async def test_the_status_can_be_asked_for_while_the_journal_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with much in its journal, on a slow disk, is not taken for dead by whoever probes it."""
    recover, reading, go_on = Journal.recover, threading.Event(), threading.Event()
    told_meanwhile: list[bool] = []

    def slowly(journal: Journal, **options: Any) -> Recovered:
        reading.set()
        told_meanwhile.append(go_on.wait(5.0))
        return recover(journal, **options)

    monkeypatch.setattr(Journal, "recover", slowly)
    config = make_config(tmp_path / "run", NOWHERE, [env("Waiting", args={"gate": str(tmp_path / "gate")})])
    front = build_front(config)
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(_start(config, front))
        await until(reading.is_set)
        code = await asyncio.to_thread(main, ["status", str(tmp_path / "run")])
        go_on.set()
        await until(lambda: bool(told_meanwhile))
        starting.cancel()
    assert (code, told_meanwhile) == (0, [True])
    assert "the journal to be read" in capsys.readouterr().out


async def test_the_status_says_from_the_start_what_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which env loads and which inference server does not answer, in `orchestrator status` and over HTTP."""
    gate = str(tmp_path / "gate")
    config = make_config(tmp_path / "run", NOWHERE, [env("Waiting", args={"gate": gate})])
    front = build_front(config)
    assert front.status().waiting_for == "the journal to be read"
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(_start(config, front))
        await until(lambda: "Connection refused" in front.status().waiting_for)
        assert await asyncio.to_thread(main, ["status", str(tmp_path / "run")]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert 'waits for env "waiting" to load (0 of 1 servers are ready)' in shown
        assert f"waits for the inference server {NOWHERE}: GET /health failed: cannot connect" in shown
        assert "state: starting" in shown
        addresses = json.loads((tmp_path / "run" / "addresses.json").read_text())
        assert addresses["trainer"].startswith("tcp://127.0.0.1:")
        starting.cancel()


async def test_environments_that_load_for_long_are_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, until they are ready."""
    monkeypatch.setattr("orchestrator.service.starting.START_REPORT_S", 0.05)
    config = make_config(tmp_path / "run", NOWHERE, [env("Waiting", args={"gate": str(tmp_path / "gate")})])

    def reports() -> list[list[str]]:
        return [record["waits_for"] for record in logs if record["event"] == "run.starting"]

    with capture_logs() as logs:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(_start(config, build_front(config)))
            await until(lambda: len(reports()) >= 2)
            starting.cancel()
    assert reports()[0] == ['env "waiting" to load (0 of 1 servers are ready)']
