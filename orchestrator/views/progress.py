"""What a person sees: the live display while a run goes on, and the closing summary. Both read the facts.

What comes from elsewhere (names, messages, addresses) is shown as it is, but for control characters and markup.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.facts import DomainStatus, EnvStatus, ReportStatus, Status
from orchestrator.views.terminal import plain

REFRESH_S = 0.25
BAR_WIDTH = 72
GAP = "   "
COLUMN_GAP = 2
NAME_WIDTH = 18
"""What a long name keeps of a narrow terminal before columns are left out."""
SUMMARY_WIDTH = 72
"""Below this, headings of the summary take two lines."""
FAILED_SHARE = 0.1
"""From this share of failed rollouts on, the display tells what the last one said."""
MOST_REPORTED = 4
"""Numbers of the trainer that the display shows; the status has all of them."""
LEFT_OUT_FIRST = ("latency", "mix run", "failed", "in flight", "done", "mix now")


async def show_progress(status: Callable[[], Status], console: Console) -> None:
    """Redraw until cancelled; the last picture stays."""
    with Live(render(status()), console=console, auto_refresh=False, transient=False) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(render(status()), refresh=True)
        finally:
            live.update(render(status()), refresh=True)


@asynccontextmanager
async def show_start(status: Callable[[], Status], console: Console) -> AsyncIterator[None]:
    """While the block runs, say what the start waits for; nothing of it stays."""

    async def redraw() -> None:
        with Live(render(status()), console=console, auto_refresh=False, transient=True) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(render(status()), refresh=True)

    drawing = asyncio.create_task(redraw())  # noqa: TID251  ended and awaited below
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait([drawing])


def render(status: Status) -> RenderableType:
    """One picture of a run."""
    return _Picture(status)


class _Picture:
    """Fits itself into the width that there is: facts go to a further line, the least needed columns are left out."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status, options.max_width
        if not status.envs:
            yield from _without_run(status)
            return
        yield from _facts(status, width)
        if status.max_steps is not None:
            bar = Table.grid()
            bar.add_row(
                ProgressBar(total=status.max_steps, completed=status.step, width=min(BAR_WIDTH, width))
            )
            yield bar
        yield _env_table(status, width)
        yield from (Text(plain(line), style="yellow") for line in _troubles(status))
        if status.changes:
            yield Text(plain(f"changed by hand: {'; '.join(status.changes)}"), style="cyan")
        yield Text(plain(f"waits for {status.waiting_for}") if status.waiting_for else "", style="dim")


def _without_run(status: Status) -> Iterator[Text]:
    """Before there is a run, or after it: what is waited for, a line each."""
    yield Text.assemble((status.state, "bold"), f"  {status.seconds:.0f} s")
    yield from (
        Text(plain(f"waits for {wait.text}"), style="yellow" if wait.kind == "endpoint" else "dim")
        for wait in status.waits
    )


def _facts(status: Status, width: int) -> Iterator[Text]:
    """The numbers of the run, as many to a line as fit."""
    steps = f"{status.step}" if status.max_steps is None else f"{status.step}/{status.max_steps}"
    facts = [
        Text.assemble(("step ", "dim"), (steps, "bold")),
        Text.assemble(("reward ", "dim"), (_number(status.reward), "bold green")),
        Text.assemble(("version ", "dim"), f"{status.version}"),
        Text.assemble(("in flight ", "dim"), f"{status.inflight}/{status.limit}"),
        Text.assemble(("rollouts/s ", "dim"), f"{status.rollouts_per_s:.0f}"),
        Text.assemble(("queued ", "dim"), f"{status.queued_sequences}/{status.batch_size}"),
        Text(f"{status.seconds:.0f} s"),
    ]
    facts += [
        Text.assemble((f"{plain(name)} ", "dim"), f"{told.value:.4g}")
        for name, told in _shown(status.reports)
    ]
    line = facts[0]
    for fact in facts[1:]:
        if line.cell_len + len(GAP) + fact.cell_len > width:
            yield line
            line = fact
        else:
            line = Text.assemble(line, GAP, fact)
    yield line


def _shown(reports: Mapping[str, ReportStatus]) -> list[tuple[str, ReportStatus]]:
    """What the trainer reports, as far as there is room: the mismatch first, which says whether the data is right."""
    ordered = sorted(reports.items(), key=lambda entry: entry[0] != "logprob_mismatch")
    return ordered[:MOST_REPORTED]


def _troubles(status: Status) -> list[str]:
    """What is not as it was asked for, a line each."""
    lines = [
        f'env "{name}" is missing from batches: {env.minimum_waived}'
        for name, env in status.envs.items()
        if env.minimum_waived
    ]
    lines += [
        f'env "{name}": {env.failed} of {env.failed + env.completed} rollouts did not end well, the last: {env.failure}'
        for name, env in status.envs.items()
        if env.failure and (env.quarantined or env.failed >= FAILED_SHARE * (env.failed + env.completed))
    ]
    lines += [
        f"inference server {endpoint.url}: {endpoint.error}"
        for endpoint in status.endpoints
        if endpoint.error and not endpoint.healthy
    ]
    return [*lines, *filter(None, (status.refused, status.mismatch))]


def _env_table(status: Status, width: int) -> Table:
    """A row for each env; below a row for their domain, where domains say more than envs."""
    rows: list[dict[str, Text]] = []
    several = len(status.domains) > 1 and any(len(domain.envs) > 1 for domain in status.domains.values())
    for name, domain in status.domains.items():
        inside = several and len(domain.envs) > 1
        if inside:
            rows.append(_row(Text(plain(name), style="bold"), domain, latency_s=None))
        for env_name in domain.envs:
            env = status.envs[env_name]
            label = Text(
                ("  " if inside else "") + plain(env_name), style="yellow" if env.quarantined else ""
            )
            rows.append(_row(label, env, latency_s=env.mean_latency_s))
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = _fitting(rows, width)
    for heading, column_width in shown.items():
        left = heading == "env"
        table.add_column(
            heading,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=column_width,
        )
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def _row(label: Text, share: EnvStatus | DomainStatus, *, latency_s: float | None) -> dict[str, Text]:
    return {
        "env": label,
        "reward": Text(_number(share.reward)),
        "mix now": Text(f"{share.recent:.1%}"),
        "mix run": Text(f"{share.actual:.1%}"),
        "target": Text(f"{share.target:.1%}"),
        "in flight": Text(str(share.inflight)),
        "done": Text(str(share.completed)),
        "failed": Text(str(share.failed)),
        "latency": Text("" if latency_s is None else _duration(latency_s)),
    }


def _fitting(rows: Sequence[Mapping[str, Text]], width: int) -> dict[str, int]:
    """The columns that fit, and their widths: numbers are never cut, long names are."""
    widths = {heading: max(len(heading), *(row[heading].cell_len for row in rows)) for heading in rows[0]}
    longest = widths["env"]
    for heading in LEFT_OUT_FIRST:
        numbers = sum(widths.values()) - widths["env"] + COLUMN_GAP * (len(widths) - 1)
        widths["env"] = max(min(longest, width - numbers), min(longest, NAME_WIDTH))
        if numbers + widths["env"] <= width:
            break
        del widths[heading]
    return widths


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


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
