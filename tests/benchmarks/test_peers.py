"""Peers are measured only when they are asked for, and cannot take our figures with them."""

import sys
from pathlib import Path

import pytest

from benchmarks import _peers
from tests.adapters.venvs import Venv


class Installed(Venv):
    """A virtualenv that is there, with this interpreter."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def make(self) -> bool:
        return True


class Refused(Venv):
    """One that cannot be installed."""

    def make(self) -> bool:
        return False

    def missing(self) -> str:
        return "a library cannot be installed: no such version"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer's script that answers with what it was asked."""
    monkeypatch.setattr(_peers, "HERE", tmp_path)
    path = tmp_path / "peer.py"
    path.write_text("import sys; print(sys.stdin.read())", encoding="utf-8")
    return path


def test_a_peer_that_was_not_asked_for_says_how_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed."""
    monkeypatch.delenv("BENCH_PEERS", raising=False)
    answer, absent = _peers.ask(Refused("x", ()), "peer.py", {})
    assert answer is None
    assert "BENCH_PEERS=1" in absent


def test_a_peer_that_cannot_be_installed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of the installer, not a crash."""
    monkeypatch.setenv("BENCH_PEERS", "1")
    assert _peers.ask(Refused("x", ()), "peer.py", {}) == (
        None,
        "a library cannot be installed: no such version",
    )


def test_a_peer_answers_what_it_was_asked(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON, there and back."""
    monkeypatch.setenv("BENCH_PEERS", "1")
    assert _peers.ask(Installed("x", ()), script.name, {"ms": 1.5}) == ({"ms": 1.5}, "")


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no JSON')"])
def test_a_peer_that_fails_is_said(script: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Ours can be shown without it."""
    monkeypatch.setenv("BENCH_PEERS", "1")
    script.write_text(code, encoding="utf-8")
    answer, absent = _peers.ask(Installed("x", ()), script.name, {})
    assert answer is None
    assert absent.startswith("a peer was not measured, peer.py failed")
