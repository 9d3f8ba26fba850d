"""The README's table, written from a report: the rows that matter, with the date and the machine.

The table stands between two marks, and nothing else of the page is touched. A chosen row that the report lacks is an
error, so that a renamed figure does not vanish from the page.
"""

import re
from pathlib import Path

from benchmarks.report import Measured, Report
from benchmarks.table import MET, number, peer_text, ratio_text

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

CHOSEN = (
    ("dispatch", "orchestrator CPU per rollout, everything included"),
    ("dispatch", "loop lag p99 at"),
    ("dispatch", "CPU per rollout at"),
    ("schedulers", "rollouts of 50 ms, the whole service: CPU per rollout"),
    ("schedulers", "rollouts that take no time, the link alone: CPU per rollout"),
    ("env_sdk", "env server CPU per single-turn rollout of 16 tokens"),
    ("env_sdk", "env server CPU per single-turn rollout of 2048 tokens"),
    ("verifiers", "verifiers, one turn: orchestrator-side CPU per rollout"),
    ("verifiers", "verifiers, one turn: env server CPU per rollout"),
    ("atropos", "CPU of forming a batch of 256, sizes 1,2,4,8,16, two minimums, 10,000 groups queued"),
    ("atropos", "from a batch that is ready to arrays in the trainer"),
    ("mix", "latencies 1/5/20, losses 0/10/40 %: first 10,000"),
    ("mix", "whole runs, groups of 8, losses 0/10/40 %, max_versions *: batches"),
    ("curriculum", "frontier: a decision among"),
    ("curriculum", "frontier: memory of a task"),
    ("simulate", "a million rollouts"),
    ("journal", "CPU more with the journal than without"),
    ("startup", "orchestrator --help"),
    ("startup", "import orchestrator.trainer"),
    ("startup", "orchestrator run to its first rollout"),
    ("startup", "resume with"),
    ("startup", "env servers ready"),
    ("trainer_link", "1,024 × 2,048 tokens with log-probabilities: offer to arrays, one rank"),
    ("trainer_link", "1,024 × 2,048 tokens with log-probabilities: CPU of both sides"),
)
"""Benchmark, and how the words of the figure begin; a * stands for what differs between figures of one kind."""


class MissingRowError(Exception):
    """The report has no figure for a chosen row; the message names all of them."""


def says(what: str, begins: str) -> bool:
    """Whether a figure's words begin like this."""
    return re.match(re.escape(begins).replace(r"\*", ".*?"), what) is not None


def chosen(report: Report) -> list[Measured]:
    """The figures of the table, in its order."""
    rows: list[Measured] = []
    missing = []
    for benchmark, begins in CHOSEN:
        found = [
            figure for figure in report.figures if figure.benchmark == benchmark and says(figure.what, begins)
        ]
        rows += found
        if not found:
            missing.append(f'"{begins}" of {benchmark}')
    if missing:
        raise MissingRowError(f"the report has no figure {', '.join(missing)}")
    return rows


def markdown(report: Report) -> str:
    """The table, and the line below it that says where it was measured."""
    lines = [
        "| benchmark | what | ours | peer or limit, in the same run | ratio | goal | met |",
        "|---" * 7 + "|",
    ]
    for figure in chosen(report):
        ours = f"{number(figure.ours)} {figure.unit}".strip()
        cells = (
            figure.benchmark,
            figure.what,
            ours,
            peer_text(figure),
            ratio_text(figure),
            figure.goal,
            MET[figure.met],
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Measured on {report.date} at {report.commit}: {report.circumstances}."]
    return "\n".join(lines)


def write_readme(report: Report, page: Path) -> None:
    """Put the table between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise MissingRowError(f"{page.name} lacks the marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{markdown(report)}\n{END}{after}", encoding="utf-8")
