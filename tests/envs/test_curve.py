"""CURVE keys: where they come from, and that no secret is shown."""

import stat
from pathlib import Path

import pytest

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
