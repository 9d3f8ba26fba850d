"""What a person sees: the live display while a run goes on, and the closing summary. Both read the facts.

What comes from elsewhere (names, messages, addresses) is shown as it is, but for control characters and markup.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.facts import Status
from orchestrator.views.terminal import plain

REFRESH_S = 0.25


async def show_progress(status: Callable[[], Status], console: Console) -> None:
    """Redraw until cancelled; the last picture stays."""
    with Live(render(status()), console=console, auto_refresh=False, transient=False) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(render(status()), refresh=True)
        finally:
            live.update(render(status()), refresh=True)


def render(status: Status) -> RenderableType:
    """One picture of a run."""
    steps = f"{status.step}" if status.max_steps is None else f"{status.step}/{status.max_steps}"
    line = Text.assemble(
        ("step ", "dim"),
        (steps, "bold"),
        ("   reward ", "dim"),
        (_number(status.reward), "bold green"),
        ("   version ", "dim"),
        f"{status.version}",
        ("   in flight ", "dim"),
        f"{status.inflight}/{status.limit}",
        ("   rollouts/s ", "dim"),
        f"{status.rollouts_per_s:.0f}",
        ("   queued ", "dim"),
        f"{status.queued_sequences}/{status.batch_size}",
        ("   ", ""),
        f"{status.seconds:.0f} s",
    )
    parts: list[RenderableType] = [line]
    if status.max_steps is not None:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=status.max_steps, completed=status.step, width=72))
        parts.append(bar)
    parts.append(_env_table(status))
    parts += [Text(plain(line), style="yellow") for line in _troubles(status)]
    parts.append(Text(plain(f"waits for {status.waiting_for}") if status.waiting_for else "", style="dim"))
    return Group(*parts)


def _troubles(status: Status) -> list[str]:
    """What is not as it was asked for, a line each."""
    lines = [
        f'env "{name}" is missing from batches: {env.minimum_waived}'
        for name, env in status.envs.items()
        if env.minimum_waived
    ]
    lines += [
        f"inference server {endpoint.url}: {endpoint.error}"
        for endpoint in status.endpoints
        if endpoint.error and not endpoint.healthy
    ]
    return [*lines, status.refused] if status.refused else lines


def _env_table(status: Status) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    headings = ("env", "reward", "mix now", "mix run", "target", "in flight", "done", "failed", "latency")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "env" else "right")
    for name, env in status.envs.items():
        table.add_row(
            Text(plain(name), style="yellow" if env.quarantined else ""),
            _number(env.reward),
            f"{env.recent:.1%}",
            f"{env.actual:.1%}",
            f"{env.target:.1%}",
            str(env.inflight),
            str(env.completed),
            str(env.dispatched - env.completed - env.inflight),
            "" if env.mean_latency_s is None else f"{env.mean_latency_s * 1000:.0f} ms",
        )
    return table


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The closing words of a run."""
    console.print()
    console.print(Text(plain(f"{summary['end']}"), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("env", "first reward", "last reward", "mix", "target", "sequences"):
        table.add_column(heading, justify="left" if heading == "env" else "right")
    for name, env in summary["envs"].items():
        table.add_row(
            Text(plain(name)),
            _number(env["first_reward"]),
            _number(env["last_reward"]),
            f"{env['actual_share']:.1%}",
            f"{env['target_share']:.1%}",
            str(env["sequences"]),
        )
    table.add_row(
        "all",
        _number(summary["first_reward"]),
        _number(summary["last_reward"]),
        "",
        "",
        str(summary["sequences"]),
        style="bold",
    )
    console.print(table)
    outcomes = ", ".join(
        f"{n} {outcome.replace('_', ' ')}" for outcome, n in summary["outcomes"].items() if n
    )
    line = f"{summary['steps']} steps in {summary['wall_time_s']:.1f} s; rollouts: {outcomes}"
    console.print(Text(plain(line)))
    console.print(Text(plain(f"run directory: {summary['run_dir']}")), soft_wrap=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
