"""`orchestrator bridge`: mistakes are one line and the exit code of a configuration."""

from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.errors import ConfigError

PRIME = ["prime-rl", "--out", "out", "--seq-len", "64"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["atropos", "--note", "nowhere/note.json"], "--note: there is no directory"),
        (["atropos", "--token-env", "NO_SUCH_TOKEN"], "--token-env names NO_SUCH_TOKEN"),
        ([*PRIME, "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["prime-rl", "--out", "out", "--seq-len", "-5"], "--seq-len must be at least 1, got -5"),
        ([*PRIME, "--port", "5600"], "--host and --port are for --transport zmq"),
        ([*PRIME, "--transport", "zmq"], "--transport zmq needs --port"),
        ([*PRIME, "--transport", "zmq", "--port", "65535"], "--port must be between 1 and 65534, got 65535"),
        (["atropos", "--connect", "127.0.0.1:5555"], 'did you mean "tcp://127.0.0.1:5555"?'),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """Before anything is served or written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("envs.logs.configure_logging", lambda **_: None)
    code = main(["bridge", *arguments])
    err = capsys.readouterr().err
    assert code in (ConfigError.exit_code, 5)
    assert (said in err, err.count("\n")) == (True, 1)
    assert list(tmp_path.iterdir()) == []
