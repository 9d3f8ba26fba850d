"""The live display: one picture of a run, drawn again and again. What it shows is made in `lines` and `env_table`.

What comes from elsewhere (names, messages, addresses) is shown as it is, but for control characters and markup. Without
a terminal, without colours (NO_COLOR) and in an encoding that has no bars it says the same.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.facts import Status
from orchestrator.views.env_table import env_table
from orchestrator.views.lines import changes, evaluations, facts, health, troubles
from orchestrator.views.numbers import BARS, PLAIN_BARS, duration
from orchestrator.views.terminal import plain

REFRESH_S = 0.25
BAR_WIDTH = 72
LEAST_ROWS = 3
"""Of the table, however low the terminal is."""


async def show_progress(status: Callable[[], Status], console: Console) -> None:
    """Redraw until cancelled; the last picture stays."""
    with Live(render(status(), live=True), console=console, auto_refresh=False, transient=False) as live:
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(render(status(), live=True), refresh=True)
        finally:
            live.update(render(status(), live=True), refresh=True)


@asynccontextmanager
async def show_start(status: Callable[[], Status], console: Console) -> AsyncIterator[None]:
    """While the block runs, say what the start waits for; nothing of it stays."""

    async def redraw() -> None:
        with Live(render(status(), live=True), console=console, auto_refresh=False, transient=True) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(render(status(), live=True), refresh=True)

    drawing = asyncio.create_task(redraw())  # noqa: TID251  ended and awaited below
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait([drawing])


def render(status: Status, *, live: bool = False) -> RenderableType:
    """One picture of a run; a `live` one is no higher than the terminal."""
    return _Picture(status, live)


class _Picture:
    """Fits itself into the width that there is, and a live one into the height."""

    def __init__(self, status: Status, live: bool) -> None:
        self._status = status
        self._live = live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status, options.max_width
        if not status.envs:
            yield from _without_run(status)
            return
        above: list[RenderableType] = [*facts(status, width)]
        if status.max_steps is not None:
            bar = Table.grid()
            bar.add_row(
                ProgressBar(total=status.max_steps, completed=status.step, width=min(BAR_WIDTH, width))
            )
            above.append(bar)
        above += [health(status), *evaluations(status.evals, width), *changes(status)]
        below = [Text(plain(line), style="yellow") for line in troubles(status)]
        if status.changes:
            below.append(Text(plain(f"changed by hand: {'; '.join(status.changes)}"), style="cyan"))
        below.append(
            Text(plain(f"waits for {status.waiting_for}") if status.waiting_for else "", style="dim")
        )
        most_rows = None
        if self._live and console.is_terminal:
            taken = len(above) + 1 + sum(-(-text.cell_len // width) or 1 for text in below)
            most_rows = max(LEAST_ROWS, console.height - taken - 1)
        yield from above
        yield from env_table(
            status, width, bars=PLAIN_BARS if options.ascii_only else BARS, most_rows=most_rows
        )
        yield from below


def _without_run(status: Status) -> Iterator[Text]:
    """Before there is a run, or after it: what is waited for, a line each."""
    yield Text.assemble((status.state, "bold"), f"  {duration(status.seconds)}")
    yield from (
        Text(plain(f"waits for {wait.text}"), style="yellow" if wait.kind == "endpoint" else "dim")
        for wait in status.waits
    )
