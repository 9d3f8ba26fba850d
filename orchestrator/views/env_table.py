"""The table of environments: a row for each, fitted into the width and height that there are.

The least needed columns are left out, numbers are never cut, long names are; where there are more environments than lines,
the last ones are counted instead of shown. Every row is one text, which is drawn ten times as fast as a table of rich: the display
is drawn in the service's own event loop, four times a second.
"""

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from orchestrator.facts import DomainStatus, EnvStatus, Status
from orchestrator.views.numbers import latency, number, sparkline
from orchestrator.views.terminal import plain

COLUMN_GAP = 2
NAME_WIDTH = 18
"""What a long name keeps of a narrow terminal before columns are left out."""
TREND_WIDTH = 12
LEFT_OUT_FIRST = ("latency", "mix run", "failed", "in flight", "done", "trend", "mix now")
LEFT = ("env", "trend")
"""Columns that begin at their left edge."""


Cell = tuple[str, str]
"""A text and its style."""


def env_table(status: Status, width: int, *, bars: str, most_rows: int | None = None) -> Iterator[Text]:
    """A row for each env; below a row for their domain, where domains say more than envs."""
    rows = _rows(status, bars)
    left_over = 0 if most_rows is None else max(0, len(rows) - most_rows)
    if left_over:
        rows = rows[: len(rows) - left_over - 1]
    shown = _fitting(rows, width)
    yield _line({heading: (heading, "dim") for heading in shown}, shown)
    yield from (_line(row, shown) for row in rows)
    if left_over:
        yield Text(f"and {left_over + 1} more", style="dim")


def _line(row: Mapping[str, Cell], widths: Mapping[str, int]) -> Text:
    line = Text(no_wrap=True)
    for place, (heading, width) in enumerate(widths.items()):
        text, style = row[heading]
        line.append(" " * COLUMN_GAP if place else "")
        line.append(_fitted(text, width, left=heading in LEFT), style or None)
    return line


def _fitted(text: str, width: int, *, left: bool) -> str:
    """Padded to its column; too long a text ends in an ellipsis."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    padding = " " * (width - length)
    return text + padding if left else padding + text


def _rows(status: Status, bars: str) -> list[dict[str, Cell]]:
    rows: list[dict[str, Cell]] = []
    several = len(status.domains) > 1 and any(len(domain.envs) > 1 for domain in status.domains.values())
    trends = {name: sparkline(env.rewards, TREND_WIDTH, bars=bars) for name, env in status.envs.items()}
    # One bar is no trend; before the second step there is no such column.
    trends = trends if any(len(trend) > 1 for trend in trends.values()) else {}
    for name, domain in status.domains.items():
        inside = several and len(domain.envs) > 1
        if inside:
            rows.append(_row((plain(name), "bold"), domain, trend="" if trends else None))
        for env_name in domain.envs:
            env = status.envs[env_name]
            label = ("  " if inside else "") + plain(env_name)
            style = "yellow" if env.quarantined else ""
            rows.append(_row((label, style), env, trend=trends.get(env_name), latency_s=env.mean_latency_s))
    return rows


def _row(
    label: Cell, share: EnvStatus | DomainStatus, *, trend: str | None, latency_s: float | None = None
) -> dict[str, Cell]:
    return {
        "env": label,
        "reward": (number(share.reward), ""),
        **({} if trend is None else {"trend": (trend, "green")}),
        "mix now": (f"{share.recent:.1%}", ""),
        "mix run": (f"{share.actual:.1%}", ""),
        "target": (f"{share.target:.1%}", ""),
        "in flight": (str(share.inflight), ""),
        "done": (str(share.completed), ""),
        "failed": (str(share.failed), "yellow" if share.failed else ""),
        "latency": ("" if latency_s is None else latency(latency_s), ""),
    }


def _fitting(rows: Sequence[Mapping[str, Cell]], width: int) -> dict[str, int]:
    """The columns that fit, and their widths."""
    widths = {heading: max(len(heading), *(cell_len(row[heading][0]) for row in rows)) for heading in rows[0]}
    longest = widths["env"]
    for heading in (*LEFT_OUT_FIRST, ""):
        numbers = sum(widths.values()) - widths["env"] + COLUMN_GAP * (len(widths) - 1)
        widths["env"] = max(min(longest, width - numbers), min(longest, NAME_WIDTH))
        if numbers + widths["env"] <= width:
            break
        widths.pop(heading, None)
    return widths
