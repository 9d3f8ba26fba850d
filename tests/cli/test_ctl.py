"""`orchestrator ctl`: how commands are written, where the token comes from, and what is said when something is missing."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.cli.ctl import build_command
from orchestrator.errors import ConfigError
from orchestrator.run.commands import Command, as_json, parse_command
from orchestrator.views.control import Answer, add_control
from orchestrator.views.http import App, serve_http
from tests.support.sample_status import sample_status


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("pause", {"command": "pause"}),
        ("resume", {"command": "resume"}),
        ("drain", {"command": "drain"}),
        ("ratio a=0.4 my=env=2", {"command": "ratio", "envs": {"a": 0.4, "my=env": 2.0}}),
        ("quarantine a", {"command": "quarantine", "env": "a"}),
        ("restore a", {"command": "restore", "env": "a"}),
        ("eval", {"command": "eval"}),
        ("eval e", {"command": "eval", "env": "e"}),
        ("max-inflight 12", {"command": "max-inflight", "value": 12}),
        ("endpoint add http://x/v1", {"command": "endpoint", "action": "add", "url": "http://x/v1"}),
    ],
)
def test_every_command_becomes_what_the_run_takes(words: str, command: dict[str, Any]) -> None:
    """As docs/control.md has it."""
    name, *arguments = words.split()
    assert build_command(name, arguments) == command
    parse_command(command)


@pytest.mark.parametrize(
    "words",
    [
        "pause now",
        "ratio",
        "ratio a",
        "ratio a=x",
        "ratio =1",
        "ratio a=1 a=2",
        "quarantine",
        "restore a b",
        "eval a b",
        "max-inflight",
        "max-inflight many",
        "endpoint add",
        "endpoint paint http://x",
    ],
)
def test_a_command_that_is_written_wrong_shows_how_it_is_written(words: str) -> None:
    """Before anything is sent."""
    name, *arguments = words.split()
    with pytest.raises(ConfigError, match=f"write: orchestrator ctl RUN_DIR {name}"):
        build_command(name, arguments)


class Desk:
    """Answers commands in the place of a run."""

    def __init__(self, code: int = 200) -> None:
        self.code = code
        self.told: list[tuple[dict[str, Any], str]] = []

    async def tell(self, command: Command, by: str) -> Answer:
        self.told.append((as_json(command), by))
        status = sample_status(changes=["max_inflight: 64 -> 32 (since noon, by me)"])
        return Answer(self.code, "it is \x1b[31mso", status, changed=True)


async def asked(desk: Desk, tmp_path: Path, *words: str, token: str = "right") -> tuple[int, str]:
    """Exit code and address of `ctl` against a service that knows one token."""
    app = App(token=None)
    add_control(app, tell=desk.tell, tokens=["right"])
    async with serve_http(app, host="127.0.0.1", port=0) as address:
        (tmp_path / "addresses.json").write_text(json.dumps({"http": address}))
        (tmp_path / "control.token").write_text(f"{token}\n")
        target = [address if word == "URL" else str(tmp_path) if word == "DIR" else word for word in words]
        return await asyncio.to_thread(main, ["ctl", *target]), address


async def test_what_changed_and_the_new_state_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every difference from the configuration, and without control characters of whoever answers."""
    desk = Desk()
    code, _ = await asked(desk, tmp_path, "DIR", "ratio", "a=1")
    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "it is �[31mso",
        "state: running; waits for a free slot",
        "differs from the configuration: max_inflight: 64 -> 32 (since noon, by me)",
    ]
    ((command, by),) = desk.told
    assert command == {"command": "ratio", "envs": {"a": 1.0}}
    assert by.startswith("cli uid ")


async def test_the_answer_can_be_had_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs, refusals too."""
    assert (await asked(Desk(409), tmp_path, "DIR", "pause", "--json"))[0] == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["state"]) == (False, "running")


async def test_a_refusal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 1."""
    assert (await asked(Desk(409), tmp_path, "DIR", "pause"))[0] == 1
    assert capsys.readouterr().err == "orchestrator: refused: it is �[31mso\n"


async def test_an_address_needs_a_token_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the usual name, or of the one that is given."""
    monkeypatch.delenv("ORCHESTRATOR_TOKEN", raising=False)
    assert (await asked(Desk(), tmp_path, "URL", "pause"))[0] == 2
    assert "the variable ORCHESTRATOR_TOKEN is not set" in capsys.readouterr().err
    monkeypatch.setenv("ORCHESTRATOR_TOKEN", "right")
    assert (await asked(Desk(), tmp_path, "URL", "pause"))[0] == 0
    monkeypatch.setenv("OTHER", "wrong")
    assert (await asked(Desk(), tmp_path, "URL", "pause", "--token-env", "OTHER"))[0] == 1
    assert "the token is not the right one" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_told_from_one_that_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And from one that cannot be asked at all."""
    assert main(["ctl", str(tmp_path), "pause"]) == 2
    assert "is " in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (tmp_path / "addresses.json").write_text(json.dumps({"http": f"http://127.0.0.1:{port}"}))
    assert main(["ctl", str(tmp_path), "pause"]) == 1
    assert "the run is not running" in capsys.readouterr().err
    (tmp_path / "control.token").write_text("left behind\n")
    assert main(["ctl", str(tmp_path), "pause"]) == 1
    assert "nothing answers" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 7, "end": "max_steps reached", "finished_at": "noon"})
    )
    assert main(["ctl", str(tmp_path), "pause"]) == 1
    assert "it ended after step 7 (max_steps reached, noon)" in capsys.readouterr().err
    (tmp_path / "addresses.json").write_text('{"http": null}')
    assert main(["ctl", str(tmp_path), "pause"]) == 2
    assert "set http.enabled = true" in capsys.readouterr().err
