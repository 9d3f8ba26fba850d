"""Two trees side by side: the benchmarks of a revision and of the working tree, in rounds A B B A A B B A.

A round is one benchmark of one tree in a fresh process, so that what else the machine does falls on both. A figure has moved
if the ranges of its rounds do not overlap and the medians differ by more than 5 %; else the difference is noise. With four
rounds of each tree, chance alone separates the ranges of one figure in 35, and 5 % in fewer: a surprise is worth a second
run with ONLY. Figures are matched by benchmark, words and peer. The revision lies in a temporary git worktree, with the
virtualenvs of this one, and is removed afterwards.
"""

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.frame import Effort
from benchmarks.report import Outcome, this_machine, today
from benchmarks.runner import benchmark_names, run_benchmark
from benchmarks.table import indented, number, range_text

ROUNDS = 4
LEAST_CHANGE = 0.05
"""A smaller change of the median is noise, however steady it is: other runs of the same tree differ by as much."""

Key = tuple[str, str, str]


class BadRevisionError(Exception):
    """What was named is no revision that can be checked out; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The rounds of one figure in both trees; none where a tree does not have it."""

    benchmark: str
    what: str
    unit: str
    base: tuple[float, ...]
    here: tuple[float, ...]

    @property
    def change(self) -> float | None:
        """By how much of the base's median the other is higher."""
        if not self.base or not self.here or not statistics.median(self.base):
            return None
        return statistics.median(self.here) / statistics.median(self.base) - 1

    @property
    def moved(self) -> bool:
        """Beyond noise; see the module's docstring."""
        if not self.base or not self.here:
            return False
        apart = max(self.base) < min(self.here) or max(self.here) < min(self.base)
        return apart and (self.change is None or abs(self.change) > LEAST_CHANGE)

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.base or not self.here:
            return "only in BASE" if self.base else "only here"
        if not self.moved:
            return "noise"
        return "up" if statistics.median(self.here) > statistics.median(self.base) else "down"


def in_turns(rounds: int) -> Iterator[str]:
    """Whose turn it is, `rounds` of each."""
    for number_of_pair in range(rounds):
        yield from ("BASE", "here") if number_of_pair % 2 == 0 else ("here", "BASE")


def match(base: Sequence[Outcome], here: Sequence[Outcome]) -> list[Compared]:
    """The figures of either tree, each with all its rounds."""
    samples: dict[Key, tuple[list[float], list[float]]] = {}
    units: dict[Key, str] = {}
    for place, outcomes in enumerate((base, here)):
        for outcome in outcomes:
            for figure in outcome.figures:
                key = (figure.benchmark, figure.what, figure.peer_name)
                samples.setdefault(key, ([], []))[place].append(figure.ours)
                units[key] = figure.unit
    return [
        Compared(key[0], key[1], units[key], tuple(base), tuple(here))
        for key, (base, here) in samples.items()
    ]


@contextmanager
def checked_out(revision: str, root: Path) -> Iterator[Path]:
    """A tree of the revision, for the time of the block."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit.returncode:
        raise BadRevisionError(f'BASE: "{revision}" is no commit, branch or tag of this repository')
    with tempfile.TemporaryDirectory(prefix="bench-base-") as directory:
        tree = Path(directory) / "tree"
        added = _git(root, "worktree", "add", "--detach", str(tree), commit.stdout.strip())
        if added.returncode:
            reason = (added.stderr.strip() or "git failed").splitlines()[-1]
            raise BadRevisionError(f'BASE: "{revision}" cannot be checked out: {reason}')
        try:
            for venv in root.glob(".venv*"):
                (tree / venv.name).symlink_to(venv.resolve())
            yield tree
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def compare(
    base: Path, here: Path, only: Sequence[str], *, effort: Effort, rounds: int, say: Callable[[str], None]
) -> tuple[list[Compared], dict[str, Outcome]]:
    """All rounds of every benchmark that either tree has; and why there is nothing of some."""
    found: list[Compared] = []
    troubles: dict[str, Outcome] = {}
    trees = {"BASE": base, "here": here}
    names = {side: benchmark_names(tree) for side, tree in trees.items()}
    for name in only or sorted({*names["BASE"], *names["here"]}):
        outcomes: dict[str, list[Outcome]] = {"BASE": [], "here": []}
        for side in in_turns(rounds):
            if name in names[side]:
                say(f"{name}: {side}, round {len(outcomes[side]) + 1} of {rounds}")
                outcomes[side].append(run_benchmark(name, effort, tree=trees[side]))
        for side, ended in outcomes.items():
            for outcome in ended:
                if outcome.failed or outcome.left_out:
                    troubles[f"{name} ({side})"] = outcome
        found += match(outcomes["BASE"], outcomes["here"])
    return found, troubles


def encode_comparison(
    found: Sequence[Compared], troubles: dict[str, Outcome], *, base: str, here: str, effort: str
) -> str:
    """The same rows for machines, with where and when they were measured."""
    rows = [
        {**asdict(one), "change": one.change, "moved": one.moved, "verdict": one.verdict} for one in found
    ]
    failed = {name: outcome.failed for name, outcome in troubles.items() if outcome.failed}
    left_out = {name: outcome.left_out for name, outcome in troubles.items() if outcome.left_out}
    whole = {
        "base": base,
        "here": here,
        "date": today(),
        "machine": asdict(this_machine()),
        "effort": effort,
        "compared": rows,
        "left_out": left_out,
        "failed": failed,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2).decode() + "\n"


def print_comparison(
    found: Sequence[Compared], troubles: dict[str, Outcome], base: str, console: Console
) -> None:
    """One table; those that moved are counted below it."""
    table = Table(title=f"BASE is {base}; here is the working tree", title_justify="left", box=None)
    table.add_column("what", overflow="fold", ratio=1)
    table.add_column("BASE", justify="right", overflow="fold", max_width=18)
    table.add_column("here", justify="right", overflow="fold", max_width=18)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("moved", overflow="fold", min_width=5, max_width=12)
    for name in sorted({one.benchmark for one in found}):
        table.add_row(f"[bold]{escape(name)}[/bold]")
        for one in found:
            if one.benchmark == name:
                change = "" if one.change is None else f"{100 * one.change:+.1f} %"
                cells = (_side(one.base, one.unit), _side(one.here, one.unit), change)
                style = "bold" if one.moved else None
                table.add_row(indented(one.what), *map(escape, cells), one.verdict, style=style)
    console.print(table)
    for name, outcome in troubles.items():
        console.print(
            f"{name}: {outcome.failed or f'left out: {outcome.left_out}'}", markup=False, highlight=False
        )
    moved = sum(one.moved for one in found)
    rule = f"ranges of the rounds apart, medians more than {LEAST_CHANGE:.0%} apart"
    console.print(f"{moved} of {len(found)} figures moved ({rule})", highlight=False)


def _side(rounds: tuple[float, ...], unit: str) -> str:
    return f"{number(statistics.median(rounds))} {unit}\n{range_text(rounds)}".strip() if rounds else ""


def _git(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
