"""`python -m benchmarks`: one table of all, whatever becomes of one of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.frame import Effort
from benchmarks.report import Machine, Measured, Outcome, Report, decode, encode, make_report
from benchmarks.runner import ROOT, benchmark_names, run_benchmark
from benchmarks.table import ratio_text
from tests.benchmarks.conftest import Write, figure_of

MACHINE = Machine(2, "a processor", "Linux x86_64", "CPython 3.11.7", 0.5)
LEFT_OUT = """
    def figures(effort):
        raise CannotRunError("a library is lacking; install it")
    """
FAILING = """
    def figures(effort):
        raise ValueError("it went wrong")
    """


def test_a_failing_benchmark_does_not_lose_the_rows_of_others(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own row says what happened, and the exit code is 1."""
    tree = write_tree(first=figure_of("3.0"), second=FAILING, third=figure_of("4.0"))
    assert main([], tree=tree) == 1
    shown = capsys.readouterr().out
    assert shown.count("speed") == 2
    assert "ValueError: it went wrong" in shown
    assert "failed: second" in shown


def test_a_benchmark_that_cannot_run_is_a_row_that_says_why(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing library is no failure."""
    tree = write_tree(first=figure_of("3.0"), second=LEFT_OUT)
    assert main([], tree=tree) == 0
    shown = capsys.readouterr().out
    assert "left out: a library is lacking; install it" in " ".join(shown.split())
    assert "all 1 goals met" in shown


def test_a_row_has_ours_the_peers_the_ratio_and_the_goal(
    write_tree: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns too."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["one"], tree=write_tree(one=figure_of("6.0"))) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line.split() for line in lines if "speed" in line]
    assert row == ["speed", "6", "µs", "8", "a", "peer", "0.75×", "<", "5", "µs", "NO"]
    assert max(map(len, lines)) <= 80
    assert "1 of 1 goals missed" in lines


@pytest.mark.parametrize(
    ("ours", "peer", "text"),
    [(3.0, 2.0, "1.5×"), (0.0, 2.0, "0×"), (1.0, 4000.0, "1/4,000"), (1.0, 0.0, ""), (1.0, None, "")],
)
def test_a_ratio_is_short(ours: float, peer: float | None, text: str) -> None:
    """A small one is a fraction; none where the peer has nothing to divide by."""
    assert ratio_text(Measured("speed", ours, "µs", peer=peer)) == text


def test_json_goes_to_standard_output_alone(write_tree: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json -` nothing else is written there, so that it can be piped."""
    tree = write_tree(one=figure_of("3.0") + "print('noise')\n", two=LEFT_OUT, three=FAILING)
    assert main(["--json", "-"], tree=tree) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"commit", "date", "machine", "effort", "figures", "left_out", "failed"}
    assert set(found["machine"]) == {"cores", "processor", "system", "python", "load"}
    assert found["figures"] == [
        {
            "benchmark": "one", "what": "speed", "ours": 3.0, "unit": "µs", "samples": [], "peer": 8.0,
            "peer_name": "a peer", "goal": "< 5 µs", "met": True, "note": "",
        }
    ]  # fmt: skip
    assert found["left_out"] == {"two": "a library is lacking; install it"}
    assert found["failed"] == {"three": "ValueError: it went wrong"}


def test_a_report_is_the_same_after_json() -> None:
    """What is written is what is read back."""
    figure = Measured("speed", 1.5, "µs", "one", (1.0, 1.5, 2.0), 3.0, "a peer", "< 2 µs", True)
    outcomes = {
        "one": Outcome((figure,)),
        "two": Outcome(left_out="lacking"),
        "three": Outcome(failed="broken"),
    }
    report = make_report(outcomes, effort="full", machine=MACHINE, commit="abc", date="2026-01-01")
    assert decode(encode(report)) == report
    assert report.left_out == {"two": "lacking"}
    assert report.failed == {"three": "broken"}


def test_an_unknown_name_is_answered_with_the_names_there_are(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, and nothing is run."""
    assert main(["thre"], tree=write_tree(one=FAILING, two=FAILING)) == 2
    assert capsys.readouterr().err == 'no benchmark is named "thre"; there are: one, two\n'


def test_a_process_that_dies_is_an_outcome(write_tree: Write) -> None:
    """Not only exceptions: a signal or an early exit is said as well."""
    dying = """
    import os
    def figures(effort):
        os.kill(os.getpid(), 9)
    """
    assert run_benchmark("one", Effort.FULL, tree=write_tree(one=dying)).failed == (
        "its process ended with code -9"
    )


def test_a_figure_that_is_no_number_is_a_failure(write_tree: Write) -> None:
    """Of that benchmark alone."""
    outcome = run_benchmark("one", Effort.FULL, tree=write_tree(one=figure_of("float('nan')")))
    assert outcome.failed.startswith("its figures are none: ")


def test_a_file_that_cannot_be_written_is_said_before_anything_runs(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after half an hour."""
    assert main(["--json", "/nowhere/at/all.json"], tree=write_tree(one=FAILING)) == 2
    assert capsys.readouterr().err == "--json: there is no directory /nowhere/at\n"


def test_a_benchmark_that_hangs_is_ended(write_tree: Write) -> None:
    """After the limit its row says so."""
    hanging = """
    import signal
    def figures(effort):
        signal.pause()
    """
    outcome = run_benchmark("one", Effort.FULL, tree=write_tree(one=hanging), limit_s=2.0)
    assert outcome == Outcome(failed="not done after 2 s")


def test_an_interrupt_shows_what_was_measured_and_leaves_no_process(
    write_tree: Write, tmp_path: Path
) -> None:
    """Half an hour is not lost by Ctrl-C."""
    written = tmp_path / "pid"
    hanging = f"""
    import os, pathlib, signal
    def figures(effort):
        pathlib.Path({str(written)!r}).write_text(str(os.getpid()))
        signal.pause()
    """
    tree = write_tree(first=figure_of("3.0"), second=hanging)
    code = (
        # Whoever runs the tests in the background may have had it ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"import pathlib, sys; from benchmarks.__main__ import main; sys.exit(main([], tree=pathlib.Path({str(tree)!r})))"
    )
    command = [sys.executable, "-c", code]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        while not written.exists() or not written.read_text():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate()
    assert process.returncode == 130
    assert "speed" in shown
    assert "interrupted" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def test_a_tree_of_an_earlier_time_is_asked_as_it_understands(write_tree: Write) -> None:
    """Where `figures` took only whether to be quick and spreads were text."""
    tree = write_tree()
    (tree / "benchmarks" / "frame.py").write_text("# nothing that is used\n", encoding="utf-8")
    (tree / "benchmarks" / "old.py").write_text(
        """
from types import SimpleNamespace

def figures(quick=False):
    assert isinstance(quick, bool)
    return [SimpleNamespace(what="speed", ours=1.0 if quick else 2.0, unit="s", peer=None, peer_name="", goal="", met=None, spread="1–2")]
""",
        encoding="utf-8",
    )
    assert benchmark_names(tree) == ["old"]
    (full,) = run_benchmark("old", Effort.FULL, tree=tree).figures
    (quick,) = run_benchmark("old", Effort.QUICK, tree=tree).figures
    assert (full.ours, quick.ours) == (2.0, 1.0)


def test_missing_peers_are_said_once_with_how_to_measure_them(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows keep a dash with the peer's name."""
    peerless = """
    def figures(effort):
        note = "not measured: BENCH_PEERS=1 does"
        return [Figure(what, 1.0, "s", None, "a library", note=note) for what in ("one", "two")]
    """
    assert main([], tree=write_tree(one=peerless)) == 0
    shown = capsys.readouterr().out
    assert shown.count("— a library") == 2
    assert shown.count("BENCH_PEERS=1") == 1


def report_of(*figures: Measured) -> Report:
    """A report of these figures and nothing else."""
    return Report("abc", "2026-01-01 12:00 UTC", MACHINE, "full", figures)
