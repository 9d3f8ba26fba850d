"""The closing words of a run: why it ended, what it learned, what became of its rollouts, where it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.views.numbers import change, duration, number
from orchestrator.views.terminal import plain

SUMMARY_WIDTH = 72
"""Below this, headings take two lines."""


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The closing words of a run."""
    console.print()
    console.print(Text(plain(f"{summary['end']}"), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("env", "first reward", "last reward", "mix", "target", "sequences"):
        shown = heading.replace(" ", "\n") if console.width < SUMMARY_WIDTH else heading
        table.add_column(shown, justify="left" if heading == "env" else "right")
    for name, env in summary["envs"].items():
        table.add_row(
            Text(plain(name)),
            number(env["first_reward"]),
            number(env["last_reward"]),
            f"{env['actual_share']:.1%}",
            f"{env['target_share']:.1%}",
            str(env["sequences"]),
        )
    table.add_row(
        "all",
        number(summary["first_reward"]),
        number(summary["last_reward"]),
        "",
        "",
        str(summary["sequences"]),
        style="bold",
    )
    console.print(table)
    if summary.get("evals"):
        console.print(_evaluations(summary["evals"]))
    outcomes = ", ".join(
        f"{n} {outcome.replace('_', ' ')}" for outcome, n in summary["outcomes"].items() if n
    )
    line = f"{summary['steps']} steps in {_took(summary['wall_time_s'])}; rollouts: {outcomes}"
    console.print(Text(plain(line)))
    console.print(Text(plain(f"run directory: {summary['run_dir']}")), soft_wrap=True)


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else duration(seconds)


def _evaluations(results: Sequence[Mapping[str, Any]]) -> Table:
    """First and last of each env."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("evaluation", "first", "last", "change", "step"):
        table.add_column(heading, justify="left" if heading == "evaluation" else "right")
    for env in dict.fromkeys(result["env"] for result in results):
        mine = [result for result in results if result["env"] == env]
        name = f"avg@{mine[-1]['k']}"
        scores = [result[name] for result in mine if result.get(name) is not None]
        table.add_row(
            Text(plain(f"{env.removeprefix('eval-')} {name}")),
            number(scores[0] if scores else None),
            number(scores[-1] if scores else None),
            change(scores[-1] - scores[0]) if len(scores) > 1 else "",
            str(mine[-1]["step"]),
        )
    return table
