"""One measured figure, and how figures are run and printed.

Every module of this package that has `figures(quick) -> list[Figure]` takes part. Figures count CPU time or
ratios; a goal is printed with whether it was met, never enforced.
"""

import importlib
import pkgutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, ours and the peer's (or the bare limit's) in the same run, and the goal."""

    what: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str = ""
    goal: str = ""
    met: bool | None = None
    spread: str = ""


def median_and_spread(samples: Sequence[float]) -> tuple[float, str]:
    """The median, and lowest–highest as text."""
    return statistics.median(samples), f"{min(samples):.4g}–{max(samples):.4g}"


def find_benchmarks(only: str = "") -> dict[str, Callable[[bool], list[Figure]]]:
    """The modules of this package that measure something, by name."""
    package = importlib.import_module("benchmarks")
    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_") or info.name == "frame" or (only and info.name != only):
            continue
        module = importlib.import_module(f"benchmarks.{info.name}")
        if hasattr(module, "figures"):
            found[info.name] = module.figures
    return found


def print_figures(name: str, figures: Sequence[Figure], console: Console) -> None:
    """One table per benchmark."""
    table = Table(title=name, title_justify="left")
    for heading in ("what", "ours", "spread", "peer / limit", "ratio", "goal", "met"):
        table.add_column(heading, justify="left" if heading in ("what", "goal") else "right", overflow="fold")
    for figure in figures:
        peer = "" if figure.peer is None else f"{figure.peer:.4g} {figure.peer_name}".strip()
        ratio = "" if not figure.peer else f"{figure.ours / figure.peer:.2f}×"
        met = {True: "yes", False: "no", None: ""}[figure.met]
        table.add_row(
            figure.what, f"{figure.ours:.4g} {figure.unit}", figure.spread, peer, ratio, figure.goal, met
        )
    console.print(table)
