"""The one table of a report, as people see it: readable at 80 columns, with more beside it where there is room."""

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from benchmarks.report import Measured, Report

NARROW, WIDE = 100, 140
"""Columns below which peers and goals get less room, and from which on the range of the samples is shown too."""
MET = {True: "yes", False: "NO", None: ""}


def number(value: float) -> str:
    """Three digits that matter, or all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def peer_text(figure: Measured) -> str:
    """The peer's figure and name; a dash for one that was not measured."""
    if figure.peer is None and not figure.peer_name:
        return ""
    return f"{'—' if figure.peer is None else number(figure.peer)} {figure.peer_name}".strip()


def ratio_text(figure: Measured) -> str:
    """Ours over the peer's; what is far below it as a fraction, which is shorter."""
    if figure.ratio is None:
        return ""
    return f"1/{1 / figure.ratio:,.0f}" if 0 < figure.ratio < 0.01 else f"{figure.ratio:.3g}×"


def range_text(samples: tuple[float, ...]) -> str:
    return f"{number(min(samples))}–{number(max(samples))}" if len(samples) > 1 else ""


def indented(text: str) -> Padding:
    """A cell of a row below its benchmark's name, with all its lines."""
    return Padding(escape(text), (0, 0, 0, 2))


def print_report(report: Report, console: Console) -> None:
    """All rows by benchmark, then what to know about them."""
    wide, narrow = console.width >= WIDE, console.width < NARROW
    table = Table(title=f"Benchmarks of {report.commit}, {report.date}", title_justify="left", box=None)
    table.add_column("what", overflow="fold", ratio=1)
    table.add_column("ours", justify="right", overflow="fold", max_width=12)
    if wide:
        table.add_column("range", justify="right", no_wrap=True)
    table.add_column("peer or limit", overflow="fold", max_width=14 if narrow else 24)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("goal", overflow="fold", max_width=10 if narrow else 14)
    table.add_column("met", no_wrap=True)
    benchmarks = dict.fromkeys(
        [*(figure.benchmark for figure in report.figures), *report.left_out, *report.failed]
    )
    for name in sorted(benchmarks):
        table.add_row(f"[bold]{escape(name)}[/bold]")
        if name in report.left_out:
            table.add_row(indented(f"left out: {report.left_out[name]}"))
        if name in report.failed:
            table.add_row(indented(f"FAILED: {report.failed[name]}"))
        for figure in report.figures:
            if figure.benchmark == name:
                cells = [f"{number(figure.ours)} {figure.unit}"]
                cells += [range_text(figure.samples)] if wide else []
                cells += [peer_text(figure), ratio_text(figure), figure.goal, MET[figure.met]]
                table.add_row(indented(figure.what), *map(escape, cells))
    console.print(table)
    for line in closing_lines(report):
        console.print(line, markup=False, highlight=False)


def closing_lines(report: Report) -> list[str]:
    """What stands below the table: the machine, peers that are lacking, and goals that were missed."""
    lines = [report.circumstances]
    lines += dict.fromkeys(figure.note for figure in report.figures if figure.note)
    goals = sum(figure.met is not None for figure in report.figures)
    if goals:
        lines.append(
            f"{report.missed} of {goals} goals missed" if report.missed else f"all {goals} goals met"
        )
    if report.failed:
        lines.append(f"failed: {', '.join(sorted(report.failed))}")
    return lines
