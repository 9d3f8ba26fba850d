"""The table of environments: a row for each, fitted into the width and height that there are.

The least needed columns are left out, numbers are never cut, long names are; where there are more environments than lines,
the last ones are counted instead of shown.
"""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
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


def env_table(
    status: Status, width: int, *, bars: str, most_rows: int | None = None
) -> Iterator[RenderableType]:
    """A row for each env; below a row for their domain, where domains say more than envs."""
    rows = _rows(status, bars)
    left_over = 0 if most_rows is None else max(0, len(rows) - most_rows)
    if left_over:
        rows = rows[: len(rows) - left_over - 1]
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = _fitting(rows, width)
    for heading, column_width in shown.items():
        table.add_column(
            heading,
            justify="left" if heading in LEFT else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=column_width,
        )
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    yield table
    if left_over:
        yield Text(f"and {left_over + 1} more", style="dim")


def _rows(status: Status, bars: str) -> list[dict[str, Text]]:
    rows: list[dict[str, Text]] = []
    several = len(status.domains) > 1 and any(len(domain.envs) > 1 for domain in status.domains.values())
    trends = {name: sparkline(env.rewards, TREND_WIDTH, bars=bars) for name, env in status.envs.items()}
    # One bar is no trend; before the second step there is no such column.
    trends = trends if any(len(trend) > 1 for trend in trends.values()) else {}
    for name, domain in status.domains.items():
        inside = several and len(domain.envs) > 1
        if inside:
            rows.append(_row(Text(plain(name), style="bold"), domain, trend="" if trends else None))
        for env_name in domain.envs:
            env = status.envs[env_name]
            label = Text(
                ("  " if inside else "") + plain(env_name), style="yellow" if env.quarantined else ""
            )
            rows.append(_row(label, env, trend=trends.get(env_name), latency_s=env.mean_latency_s))
    return rows


def _row(
    label: Text, share: EnvStatus | DomainStatus, *, trend: str | None, latency_s: float | None = None
) -> dict[str, Text]:
    return {
        "env": label,
        "reward": Text(number(share.reward)),
        **({} if trend is None else {"trend": Text(trend, style="green")}),
        "mix now": Text(f"{share.recent:.1%}"),
        "mix run": Text(f"{share.actual:.1%}"),
        "target": Text(f"{share.target:.1%}"),
        "in flight": Text(str(share.inflight)),
        "done": Text(str(share.completed)),
        "failed": Text(str(share.failed), style="yellow" if share.failed else ""),
        "latency": Text("" if latency_s is None else latency(latency_s)),
    }


def _fitting(rows: Sequence[Mapping[str, Text]], width: int) -> dict[str, int]:
    """The columns that fit, and their widths."""
    widths = {heading: max(len(heading), *(row[heading].cell_len for row in rows)) for heading in rows[0]}
    longest = widths["env"]
    for heading in (*LEFT_OUT_FIRST, ""):
        numbers = sum(widths.values()) - widths["env"] + COLUMN_GAP * (len(widths) - 1)
        widths["env"] = max(min(longest, width - numbers), min(longest, NAME_WIDTH))
        if numbers + widths["env"] <= width:
            break
        widths.pop(heading, None)
    return widths
