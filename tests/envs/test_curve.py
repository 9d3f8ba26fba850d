"""CURVE keys: where they come from, and that no secret is shown."""

import stat
from pathlib import Path

import pytest
import structlog.testing

from envs.curve import KeyFileError, generate_pair, read_key, read_pair, write_pair
from envs.server_spec import ServerSpec


def test_key_pairs_are_written_for_their_owner_alone_and_never_overwritten(tmp_path: Path) -> None:
    """The secret half is mode 600; a second keygen into the same directory refuses."""
    public, secret = write_pair(tmp_path, "server")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    pair = read_pair(secret)
    assert pair.public == read_key(public)
    assert pair.secret not in repr(pair)
    with pytest.raises(KeyFileError, match="exists already"):
        write_pair(tmp_path, "server")


def test_keys_come_from_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "env:NAME", where there is no file to protect."""
    pair = generate_pair()
    monkeypatch.setenv("TEST_CURVE_SECRET", pair.secret)
    assert read_pair("env:TEST_CURVE_SECRET") == pair
    with pytest.raises(KeyFileError, match="NO_SUCH_KEY"):
        read_key("env:NO_SUCH_KEY")


def test_a_secret_that_others_can_read_is_pointed_out_once(tmp_path: Path) -> None:
    """The file and the remedy are named, never the key; a public key may be read by everyone."""
    public, secret = write_pair(tmp_path, "server")
    with structlog.testing.capture_logs() as events:
        read_pair(secret)
        read_key(public)
    assert events == []
    loose = tmp_path / "loose.secret"
    loose.write_text(secret.read_text())
    loose.chmod(0o640)
    with structlog.testing.capture_logs() as events:
        pair = read_pair(loose)
        read_pair(str(loose))
    assert [(event["event"], event["remedy"]) for event in events] == [
        ("key.readable_by_others", f"chmod 600 {loose}")
    ]
    assert pair.secret not in str(events)


def test_a_bad_key_is_not_shown(tmp_path: Path) -> None:
    """It may be the secret of something else."""
    file = tmp_path / "key"
    file.write_text("hunter2")
    with pytest.raises(KeyFileError) as error:
        read_key(file)
    assert "hunter2" not in str(error.value)
    assert str(file) in str(error.value)


def test_instructions_show_no_secret() -> None:
    """They may end up in a log or a traceback."""
    pair = generate_pair()
    spec = ServerSpec(
        name="s", id="reverse", bind="tcp://0.0.0.0:1", curve_secret=pair.secret, args={"token": "hunter2"}
    )
    assert pair.secret not in repr(spec)
    assert "hunter2" not in repr(spec)
