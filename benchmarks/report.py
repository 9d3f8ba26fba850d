"""What a run of the benchmarks found, as one value that is printed, written as JSON and read back.

A benchmark has figures, or was left out for a reason, or failed; each of the three stands in the report. With the figures go
the commit, the date and the machine, without which they say little.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of a benchmark."""

    what: str
    ours: float
    unit: str
    benchmark: str = ""
    samples: tuple[float, ...] = ()
    peer: float | None = None
    peer_name: str = ""
    goal: str = ""
    met: bool | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return self.ours / self.peer if self.peer else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one benchmark came to."""

    figures: tuple[Measured, ...] = ()
    left_out: str = ""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran; the load is that of the minute before."""

    cores: int
    processor: str
    system: str
    python: str
    load: float


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of one run, and what there is no figure of."""

    commit: str
    date: str
    machine: Machine
    effort: str
    figures: tuple[Measured, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def missed(self) -> int:
        """How many goals were not met."""
        return sum(figure.met is False for figure in self.figures)

    @property
    def circumstances(self) -> str:
        """Where and how it was measured."""
        machine = self.machine
        where = f"{machine.cores} cores ({machine.processor}), {machine.system}, {machine.python}"
        return f"{where}, load {machine.load:g} at the start, {self.effort} effort"


def make_report(
    outcomes: Mapping[str, Outcome], *, effort: str, machine: Machine, commit: str, date: str
) -> Report:
    """One report of all outcomes, by the names of their benchmarks."""
    return Report(
        commit=commit,
        date=date,
        machine=machine,
        effort=effort,
        figures=tuple(figure for outcome in outcomes.values() for figure in outcome.figures),
        left_out={name: outcome.left_out for name, outcome in outcomes.items() if outcome.left_out},
        failed={name: outcome.failed for name, outcome in outcomes.items() if outcome.failed},
    )


def encode(report: Report) -> str:
    """As JSON for people and machines."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def decode(text: str | bytes) -> Report:
    """What `encode` wrote; msgspec.DecodeError for anything else."""
    return msgspec.json.decode(text, type=Report)


def this_machine() -> Machine:
    """The machine as it is before anything is measured."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    system = f"{platform.system()} {platform.machine()}"
    return Machine(os.cpu_count() or 1, _processor(), system, python, round(os.getloadavg()[0], 1))


def today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def commit_of(tree: Path) -> str:
    """The commit that is checked out, marked if files differ from it; empty outside of a repository."""
    commit = _git(tree, "rev-parse", "--short=12", "HEAD")
    changed = _git(tree, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def _git(tree: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
