"""`orchestrator rollouts`: what people see of a run's rollouts, in terminals of any width."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator.cli import main
from tests.support.archived import batch_of, conversation, evaluated, failure, opened, pending


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two steps, a rejected group, an evaluation and failures."""
    monkeypatch.setenv("COLUMNS", "120")
    first, second = pending(0, (0.0, 1.0)), pending(1, (0.5, 0.75), env="an-env-with-a-very-long-name-indeed")
    with opened(tmp_path / "run") as archive:
        archive.scored(first, "queued", 12.0)
        archive.batch_formed(batch_of(1, first))
        archive.scored(second, "queued", 13.0)
        archive.batch_formed(batch_of(2, second))
        archive.scored(pending(2, (0.0, 0.0), text="[red]évil[/red]\x1b[2J"), "equal_rewards", 14.0)
        archive.evaluated(evaluated(3, (1.0,), step=2), 15.0)
        for number in range(3):
            said = failure("raised", f"KeyError: \x1b[31m{number}", "Traceback\n  last line")
            archive.attempt_failed(pending(4), said, 16.0)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()


def said(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert main(["rollouts", *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return "".join(f"{line.rstrip()}\n" for line in out.splitlines())


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line on standard error of a command that is refused."""
    assert main(["rollouts", *map(str, argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("width", [40, 50, 80, 120, 200])
def test_the_table_fits_the_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Whatever its width; the number by which a group is shown is never cut."""
    monkeypatch.setenv("COLUMNS", str(width))
    shown = said(capsys, run_dir).splitlines()
    assert all(len(line) <= width for line in shown)
    assert [line.split()[1] for line in shown[1:5]] == ["4", "3", "2", "1"]
    assert "tokens" in shown[0] if width >= 120 else "tokens" not in shown[0]
    assert all(line.startswith("●") for line in shown[1:5])


@pytest.mark.parametrize("width", [64, 90, 100, 110])
def test_names_are_readable_before_further_columns_are_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """A table of numbers says nothing without what they belong to."""
    monkeypatch.setenv("COLUMNS", str(width))
    shown = said(capsys, run_dir)
    assert "an-env-with-a" in shown
    assert "equal_rewards" in shown


def test_filters_and_limits_hold_for_the_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what there is in all is told below."""
    shown = said(capsys, run_dir, "--step", "1-2", "--split", "train", "--min-reward", "0.9").splitlines()
    assert [line.split()[1:3] for line in shown[1:-2]] == [["1", "math"]]
    assert shown[-2] == "groups: 2 trained, 1 equal_rewards, 1 evaluated"
    assert "There are more" in said(capsys, run_dir, "--limit", "1")
    assert "equal_rewards" in said(capsys, run_dir, "--contains", "ÉVIL", "--limit", "1").splitlines()[1]


def test_a_group_is_shown_as_conversations(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its number or its id, whole or one member; with rewards, metrics, timings and tokens."""
    shown = said(capsys, run_dir, "--show", "1")
    assert "math/train/0 (#1)" in shown
    assert "trained, step 1; version 0–1" in shown
    assert "rollout 1 of 2: reward 0.000" in shown
    assert "rollout 2 of 2: reward 1.000" in shown
    assert "5 tokens, stop, total 1.50 s, right = 1" in shown
    assert "user\n  question 0\nassistant\n  says 1.0\n" in shown
    one = said(capsys, run_dir, "--show", "math/train/0", "--member", "2")
    assert "rollout 2 of 2" in one
    assert "rollout 1 of 2" not in one


def test_text_from_elsewhere_steers_neither_terminal_nor_markup(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters are replaced, brackets stay what they are."""
    assert "  [red]évil[/red]�[2J\n" in said(capsys, run_dir, "--show", "3")
    assert "\x1b" not in said(capsys, run_dir, "--failures")


def test_tool_calls_are_shown_with_their_arguments(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so are reasoning, names and seats."""
    import msgspec

    group = pending(7, (1.0,))
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    entry = conversation("x", 1.0, messages=messages, seats={"white": 0.5}, truncated=True)
    group.results = [msgspec.structs.replace(group.results[0], transcript=msgspec.msgpack.encode([entry]))]
    with opened(run_dir, last_step=2) as archive:
        archive.scored(group, "queued", 20.0)
    shown = said(capsys, run_dir, "--show", "math/train/7")
    assert 'assistant\n  hm\n  → add({"a": 1})\ntool add\n  2\n' in shown
    assert "seat white earned 0.5" in shown
    assert "truncated" in shown


def test_failures_are_told_with_their_reason(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How often, when, at which task, and where the last one was raised."""
    shown = said(capsys, run_dir, "--failures")
    assert "math: raised  3 times, last " in shown
    assert ", task 4\n  KeyError: �[31m2\n    Traceback\n      last line\n" in shown
    assert "No rollout failed" in said(capsys, run_dir, "--failures", "--env", "nobody")


def test_rollouts_are_exported_as_lines(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One for each rollout; what is there already is not overwritten."""
    path = tmp_path / "found.jsonl"
    assert (
        said(capsys, run_dir, "--export", path, "--split", "train", "--oldest") == f"6 rollouts in {path}\n"
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["group"], row["number"], row["reward"]) for row in rows[:3]] == [
        ("math/train/0", 0, 0.0),
        ("math/train/0", 1, 1.0),
        ("an-env-with-a-very-long-name-indeed/train/1", 0, 0.5),
    ]
    assert rows[0]["messages"][0] == {"role": "user", "content": "question 0"}
    assert (rows[0]["step"], rows[0]["outcome"], rows[0]["metrics"]) == (1, "trained", {"right": 0.0})
    assert "is there already" in refused(capsys, run_dir, "--export", path)
    assert "must end in .jsonl or .parquet" in refused(capsys, run_dir, "--export", tmp_path / "found.csv")
    assert "cannot be written" in refused(capsys, run_dir, "--export", tmp_path / "no" / "found.jsonl")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["found.jsonl", "run"]


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is installed here")
def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is written."""
    err = refused(capsys, run_dir, "--export", tmp_path / "found.parquet")
    assert "pip install 'rollout-orchestrator[dataset]'" in err
    assert not (tmp_path / "found.parquet").exists()


def test_mistakes_are_one_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is no run, a group or a member that is not there, a range that is none."""
    assert "is it the run_dir of a run?" in refused(capsys, tmp_path)
    assert 'there is no group "77"' in refused(capsys, run_dir, "--show", "77")
    assert "has 2 rollouts" in refused(capsys, run_dir, "--show", "1", "--member", "3")
    for wrong in (["--step", "x"], ["--limit", "0"], ["--version", "3-"]):
        with pytest.raises(SystemExit):
            main(["rollouts", str(run_dir), *wrong])
        assert "argument" in capsys.readouterr().err
