"""Runs a benchmark of a tree in a process of its own, so that neither its memory, its settings nor its end reach another.

The tree is on PYTHONPATH and is the working directory, before what is installed; the interpreter is this one.
Whatever becomes of the process is an outcome, never an exception.
"""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.frame import Effort
from benchmarks.report import Outcome

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1800.0
"""The longest takes a few minutes at full effort."""
END_S = 10.0


def benchmark_names(tree: Path = ROOT) -> list[str]:
    """The modules of a tree that measure something, without importing them."""
    return sorted(
        path.stem
        for path in (tree / "benchmarks").glob("[!_]*.py")
        if "\ndef figures(" in path.read_text(encoding="utf-8")
    )


def run_benchmark(name: str, effort: Effort, *, tree: Path = ROOT, limit_s: float = LIMIT_S) -> Outcome:
    """What one benchmark of a tree comes to."""
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        written = Path(directory) / "outcome.json"
        script = str(ROOT / "benchmarks" / "_round.py")
        command = [sys.executable, "-P", script, name, str(int(effort)), str(written)]
        # What it prints is for people; standard output may be JSON.
        process = subprocess.Popen(command, cwd=tree, env=environ, stdout=2, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(failed=f"not done after {limit_s:g} s")
        finally:
            _end(process)
        if not written.exists():
            return Outcome(failed=f"its process ended with code {code}")
        try:
            found = msgspec.json.decode(written.read_bytes(), type=Outcome)
        except msgspec.DecodeError as error:
            return Outcome(failed=f"its figures are none: {error}")
    return replace(found, figures=tuple(replace(figure, benchmark=name) for figure in found.figures))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also when this process was interrupted: all that it started goes with it."""
    if process.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
        return
