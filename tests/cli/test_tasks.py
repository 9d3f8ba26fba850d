"""`orchestrator tasks`: what people see of what a run knows about its tasks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.curriculum import TaskOutcome
from orchestrator.journal import EnvIdentity, RunIdentity
from tests.support.journal_opening import open_journal

DIFFICULTY = {"strategy": "difficulty", "options": {}, "explore": 0.05, "reward_range": [-1.0, 1.0]}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a curriculum in one env and tasks without end in the other."""
    monkeypatch.setenv("COLUMNS", "120")

    async def record() -> None:
        async with open_journal(tmp_path / "run") as journal:
            envs = {
                "math": EnvIdentity("math", "train", 1000, "", curriculum=DIFFICULTY),
                "gen\x1b[2J": EnvIdentity("gen", "train", None, ""),
                "new": EnvIdentity("new", "train", 5, ""),
            }
            journal.set_identity(RunIdentity(3, envs))
            for task in range(30):
                journal.record_late(
                    "math", TaskOutcome(task, task // 10, (task + 0.5) / 15 - 1, 4, equal=task < 3)
                )
            journal.record_late("gen\x1b[2J", TaskOutcome(2**31, 1, 1.0, 4, equal=True))

    asyncio.run(record())
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert main(["tasks", *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_a_table_of_tasks_and_what_they_add_up_to(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, pools, solve rates, the hardest tasks first; nothing steers the terminal."""
    text = said(capsys, run_dir)
    assert "math: difficulty" in text
    assert "tasks 1,000, tried 30; groups 30, 10.0% of them with equal rewards" in text
    assert "pools: unseen 970, easy 6, medium 18, hard 6, retired 0" in text
    assert "0-10 %: 3" in text
    assert "and 10 more (--limit)" in text
    assert "tasks without end, tried 1" in text
    assert "2147483648" in text
    assert "tasks 5, tried 0" in text
    assert "\x1b[2J" not in text


def test_tasks_are_sorted_limited_and_chosen_by_env(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every number for programs."""
    asked = ("--env", "math", "--sort", "reward", "--descending", "--limit", "2", "--json")
    found: dict[str, Any] = json.loads(said(capsys, run_dir, *asked))
    assert list(found) == ["math"]
    assert [row["task"] for row in found["math"]["tasks"]] == [29, 28]
    assert found["math"]["tasks"][1] == {
        "task": 28,
        "groups": 1,
        "rollouts": 4,
        "reward": 0.9,
        "solve_rate": 0.95,
        "equal_share": 0.0,
        "version": 2,
    }
    everything = json.loads(said(capsys, run_dir, "--json"))
    assert len(everything["math"]["tasks"]) == 30
    assert everything["math"]["solve_rates"] == [3] * 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "mth"], 'there is no train env "mth"; it has: '),
        (["elsewhere"], "there is no journal here"),
    ],
)
def test_what_is_not_there_is_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """In one line."""
    where = [str(run_dir / options[0])] if options[0] == "elsewhere" else [str(run_dir), *options]
    assert main(["tasks", *where]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
