"""A run that cannot be asked tells from its directory how far it came and how it ended."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.versions import Versions
from orchestrator.facts import Facts
from orchestrator.journal import Journal
from orchestrator.service.front import Front
from orchestrator.views.http import build_app, serve_http
from orchestrator.views.past import read_past
from tests.support.journal_groups import make_batch
from tests.support.journal_opening import open_journal


async def form(journal: Journal, step: int) -> None:
    """A step's batch, with the states that a run records beside it."""
    batch, durable = make_batch(step), asyncio.Event()
    facts = Facts({"math": 1.0}, ledger=Ledger(), versions=Versions(max_versions=2), now=0.0)
    for group in batch.groups:
        journal.record_group(group)
    facts.scored("math", [0.25, 0.75])
    record = facts.batch_formed(batch, quarantined=frozenset(), now=1.0)
    states = {
        "facts": facts.state_dict(61.7),
        "version": {"published": [step], "serving": step, "trained": step - 1},
    }
    journal.record_batch(batch, durable.set, record=record, states=states)
    await durable.wait()


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    """Of a run of two steps with an evaluation, whose process is gone; nothing says how it ended."""
    async with open_journal(tmp_path) as journal:
        await form(journal, 1)
        journal.record_acknowledged(1)
        await form(journal, 2)
        for step, score in ((0, 0.25), (1, 0.5)):
            journal.record_eval({"env": "eval-math", "step": step, "version": step, "k": 2, "avg@2": score})
    (tmp_path / "addresses.json").write_text(json.dumps({"http": "http://127.0.0.1:9"}))
    return tmp_path


def summarise(run_dir: Path, **fields: Any) -> Path:
    path = run_dir / "summary.json"
    path.write_text(json.dumps({"end": "max_steps reached", **fields}))
    return path


def log_failure(run_dir: Path, error: str, at: float | None = None) -> None:
    (run_dir / "logs").mkdir(exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() if at is None else at))
    lines = ["not JSON", json.dumps({"event": "run.failed", "error": error, "time": stamp}), "[1]"]
    (run_dir / "logs" / "orchestrator.log").write_text("\n".join(lines) + "\n")


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_looking_at_a_run_that_was_killed_is_no_sign_of_its_life(tmp_path: Path) -> None:
    """SQLite touches a file of the journal whenever one that was not closed is read."""
    code = (
        "import asyncio, os, sys; from pathlib import Path\n"
        "from tests.support.journal_opening import open_journal; from tests.views.test_past import form\n"
        "async def main():\n"
        "    async with open_journal(Path(sys.argv[1])) as journal:\n"
        "        await form(journal, 1)\n"
        "        os._exit(9)\n"
        "asyncio.run(main())\n"
    )
    asked = [sys.executable, "-c", code, str(tmp_path)]
    killed = subprocess.run(asked, cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == 9
    for path in (tmp_path / "journal").iterdir():
        age(path, 3600.0)
    read_past(tmp_path)
    past = read_past(tmp_path)
    assert past.state == "crashed"
    assert past.at < time.time() - 3000.0


async def test_it_says_how_far_the_run_came(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, rewards, evaluations and when; the exit code says that nobody runs it."""
    summarise(run_dir)
    assert main(["status", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("ended: max_steps reached (")
    assert "step 2, trained 1, version 2, after 62 s" in out
    assert "reward 0.500, at first 0.500" in out
    assert "evals   math avg@2 0.500 +0.250 (step 1)" in out
    assert "the last batch was formed at " in out
    assert ["math", "0.500", "0.500"] in [line.split() for line in out.splitlines()]


async def test_the_same_for_programs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints it as data."""
    summarise(run_dir)
    assert main(["status", str(run_dir), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["why"], told["step"]) == ("ended", "max_steps reached", 2)


async def test_a_run_that_failed_says_with_what(run_dir: Path) -> None:
    """Although a summary of an earlier process is still there."""
    age(summarise(run_dir), 100)
    log_failure(run_dir, 'EnvLostError: env "math" keeps dying')
    past = read_past(run_dir)
    assert (past.state, past.why) == ("failed", 'EnvLostError: env "math" keeps dying')


async def test_a_run_that_was_killed_is_told_from_one_that_ended(run_dir: Path) -> None:
    """Neither the summary nor the failure of an earlier process is taken for its own."""
    age(summarise(run_dir), 100)
    log_failure(run_dir, "an old one", at=time.time() - 100)
    past = read_past(run_dir)
    assert (past.state, past.why) == ("crashed", "there is no record of its end")
    assert time.time() - past.at < 60


async def test_a_directory_in_use_is_not_called_dead(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An orchestrator holds its lock, but does not answer; it is not turned away by the question."""
    summarise(run_dir)
    async with open_journal(run_dir) as journal:
        assert await asyncio.to_thread(main, ["status", str(run_dir)]) == 0
        await form(journal, 3)
    out = capsys.readouterr().out
    assert out.startswith("busy: an orchestrator uses the directory")
    assert "nothing answers" in out


async def test_a_run_that_starts_again_says_what_it_has_done(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While environments load, the service itself knows only what it waits for."""
    front = Front(notes=[], max_steps=3, batch_size=8)
    app = build_app(status=front.status, metrics=front.metrics, token=None)
    async with serve_http(app, host="127.0.0.1", port=0) as address:
        (run_dir / "addresses.json").write_text(json.dumps({"http": address}))
        assert await asyncio.to_thread(main, ["status", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "waits for the journal to be read" in out
    assert "so far:\nstep 2, trained 1, version 2" in out


async def test_a_run_without_a_batch_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is a journal, and that is all."""
    async with open_journal(tmp_path):
        pass
    (tmp_path / "addresses.json").write_text(json.dumps({"http": None}))
    assert main(["status", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "crashed: there is no record of its end" in out
    assert "no batch was formed yet" in out


async def test_an_encoding_without_its_characters_ends_nothing(run_dir: Path) -> None:
    """A pipe or a terminal of ASCII gets marks in their place, and plain bars for the trend."""
    summarise(run_dir, end="genug – for now")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "orchestrator", "status", str(run_dir)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("ended: genug ? for now (")
    assert done.stdout.isascii()
