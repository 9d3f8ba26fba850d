"""Run directories as the page shows them: what the records add up to, rollouts that are found, and reports."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.cli.view import build_report
from orchestrator.errors import ConfigError
from orchestrator.journal.directory import lock_run_dir
from orchestrator.service import browse
from orchestrator.service.browse import ArchivedRollouts
from orchestrator.service.page import RunDirectory
from tests.support.recorded_run import HOSTILE, write_journal, write_many_rollouts, write_run
from tests.support.step_records import step_record


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "mine")


@pytest.fixture
def rollouts(run_dir: Path) -> ArchivedRollouts:
    return ArchivedRollouts(run_dir)


def test_a_finished_run_says_how_it_ended(run_dir: Path) -> None:
    """Its last step, its envs and what became of their rollouts come from the records."""
    run = RunDirectory(run_dir)
    told = run.snapshot()
    status = run.status()
    assert (status.state, status.step, status.trained) == ("ended", 12, 12)
    assert "max_steps reached" in status.waiting_for
    assert list(status.envs) == ["math", "code"]
    code = status.envs["code"]
    assert (code.failed, code.dropped) == (12, {"equal_rewards": 32})
    assert code.completed == sum(
        step_record(n, envs=("math", "code")).envs["code"].sequences for n in range(1, 13)
    )
    assert status.outcomes == {"completed": status.envs["math"].completed + code.completed, "failed": 12}
    assert told["series"]["steps"] == list(range(1, 13))
    assert told["evals"][0]["avg@4"] == 0.5


def test_a_run_that_crashed_says_so(tmp_path: Path) -> None:
    """Without a summary nobody ended it in order; neither did who went on after it was written."""
    run = RunDirectory(write_run(tmp_path / "killed", ended=False))
    run.recorded.refresh()
    assert (run.status().state, run.status().step) == ("crashed", 12)
    assert "goes on with it" in run.status().waiting_for
    went_on = write_run(tmp_path / "went_on")
    (went_on / "addresses.json").write_text("{}", encoding="utf-8")
    os.utime(went_on / "summary.json", (0, 0))
    assert RunDirectory(went_on).status().state == "crashed"


def test_a_run_that_somebody_works_on_says_where_its_own_page_is(run_dir: Path) -> None:
    """What is shown is what the journal has."""
    (run_dir / "addresses.json").write_text(json.dumps({"http": "http://127.0.0.1:8600"}), encoding="utf-8")
    with lock_run_dir(run_dir):
        status = RunDirectory(run_dir).status()
    assert status.state == "busy"
    assert "http://127.0.0.1:8600" in status.waiting_for


def test_a_run_without_a_step_can_be_looked_at(tmp_path: Path) -> None:
    """There is nothing to draw yet, and nothing fails."""
    write_journal(tmp_path, [])
    told = RunDirectory(tmp_path).snapshot()
    assert (told["status"].step, told["series"]["steps"], told["status"].envs) == (0, [], {})


def test_a_directory_without_a_run_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands say so in one line."""
    with pytest.raises(ConfigError, match="is it the run_dir of a run"):
        RunDirectory(tmp_path)
    for command in ("view", "report"):
        assert main([command, str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["view", str(tmp_path), "--port", "70000"]) == 2


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 25),
        ({"env": "math"}, 13),
        ({"env": "math", "step": "3"}, 1),
        ({"step": "3-4"}, 4),
        ({"outcome": "equal_rewards"}, 1),
        ({"env": "code", "min_reward": "0.7"}, 12),
        ({"min_reward": "0.9", "max_reward": "1"}, 12),
        ({"contains": "QUESTION OF STEP 7"}, 1),
        ({"contains": "nobody said this"}, 0),
        ({"env": "math", "task": "4"}, 2),
        ({"env": "", "step": " "}, 25),
    ],
)
def test_groups_are_found_by_what_they_are(
    rollouts: ArchivedRollouts, wanted: dict[str, str], count: int
) -> None:
    """Every filter of the page, alone and together."""
    found = rollouts.find(wanted)
    assert (len(found["groups"]), found["next"], found["partial"]) == (count, None, False)
    assert found["envs"] == ["code", "math"]
    assert found["outcomes"] == ["equal_rewards", "trained"]


@pytest.mark.parametrize(
    "wanted",
    [
        {"step": "x"},
        {"step": "3-"},
        {"step": "-3"},
        {"task": "1.5"},
        {"min_reward": "high"},
        {"after": "9" * 30},
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    rollouts: ArchivedRollouts, wanted: dict[str, str]
) -> None:
    """The message names the filter."""
    with pytest.raises(ValueError, match=next(iter(wanted))):
        rollouts.find(wanted)


def test_many_groups_come_page_by_page(rollouts: ArchivedRollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages together are all groups, each once, newest first."""
    monkeypatch.setattr(browse, "MAX_GROUPS", 10)
    seen, after = list[int](), ""
    for size in (10, 10, 5):
        found = rollouts.find({"after": after} if after else {})
        assert len(found["groups"]) == size
        seen += [group["seq"] for group in found["groups"]]
        after = str(found["next"])
    assert after == "None"
    assert seen == sorted(set(seen), reverse=True)


def test_a_search_for_a_text_is_bounded_in_time(run_dir: Path) -> None:
    """It says how far it came, and goes on from there."""
    ticks: Iterator[float] = iter(range(100))
    rollouts = ArchivedRollouts(run_dir, clock=lambda: next(ticks))
    found = rollouts.find({"contains": "question of step 1 "})
    assert (found["groups"], found["partial"]) == ([], True)
    again = ArchivedRollouts(run_dir).find({"contains": "question of step 1 ", "after": str(found["next"])})
    assert (len(again["groups"]), again["partial"]) == (1, False)


def test_a_group_is_read_with_its_conversations(rollouts: ArchivedRollouts) -> None:
    """Roles, texts, rewards and metrics of every member."""
    seq = rollouts.find({"env": "math", "step": "3"})["groups"][0]["seq"]
    group = rollouts.group(str(seq))
    assert group is not None
    assert [one["reward"] for one in group["rollouts"]] == [0.0, 1.0, 0.5]
    question, answer = group["rollouts"][1]["messages"]
    assert (question["role"], question["text"]) == ("user", f"question of step 3 {HOSTILE}")
    assert (answer["role"], answer["text"], answer["calls"]) == ("assistant", "says 1.0", [])
    assert group["rollouts"][1]["metrics"] == {"right": 1.0}
    assert rollouts.group("999") is None
    assert rollouts.group("no such id") is None


def inside(report: bytes) -> dict[str, Any]:
    """The data of a report."""
    start = report.index(b'id="data">') + len(b'id="data">')
    told: dict[str, Any] = json.loads(report[start : report.index(b"</script>", start)])
    return told


def test_a_report_has_several_runs_and_a_sample_of_their_rollouts(tmp_path: Path) -> None:
    """Runs of one name are told apart by their paths."""
    first = write_run(tmp_path / "a" / "run")
    second = write_run(tmp_path / "b" / "run", steps=5, seed=1)
    report = build_report([first, second])
    runs = inside(report)["runs"]
    assert [run["name"] for run in runs] == [str(first), str(second)]
    assert [run["series"]["last"] for run in runs] == [12, 5]
    for run in runs:
        assert {group["env"] for group in run["groups"]} == {"math", "code"}
        assert all(one["messages"] for group in run["groups"] for one in group["rollouts"])
    assert HOSTILE.encode() not in report


def test_report_writes_one_file(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o` names it; a place that cannot be written is one line."""
    path = tmp_path / "out.html"
    assert main(["report", str(run_dir), "-o", str(path)]) == 0
    assert inside(path.read_bytes())["runs"][0]["name"] == "mine"
    assert not path.with_name("out.html.part").exists()
    capsys.readouterr()
    assert main(["report", str(run_dir), "-o", str(tmp_path / "none" / "out.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_ten_thousand_steps_and_a_million_rollouts_is_shown(tmp_path: Path) -> None:
    """What the page is sent is bounded, whatever the run's length; the times are printed."""
    write_journal(tmp_path, (step_record(step) for step in range(1, 10_001)))
    write_many_rollouts(tmp_path, steps=10_000, groups_per_step=13, group_size=8)
    run, rollouts = RunDirectory(tmp_path), ArchivedRollouts(tmp_path)
    began = time.monotonic()
    told = run.snapshot()
    charts = time.monotonic()
    found = rollouts.find({})
    by_step = rollouts.find({"env": "math", "step": "5000"})
    shown = time.monotonic()
    print(f"\ncharts {charts - began:.2f} s, two lists of rollouts {shown - charts:.2f} s")  # noqa: T201
    assert len(told["series"]["steps"]) <= 1000
    assert len(found["groups"]) == browse.MAX_GROUPS
    assert len(by_step["groups"]) == 13
