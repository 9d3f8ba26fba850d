"""A page of its own about simulated configurations: speed against staleness, and the figures of each. No script, nothing from elsewhere."""

import base64
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence

from orchestrator.simulate.answers import Answer, Answers, ages_of, with_spread
from orchestrator.simulate.sweep import Point, Refused

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 460, 70, 50, 16, 170

STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fbfbfa, #141517); --box: light-dark(#fff, #1b1d20);
  --line: light-dark(#e3e3df, #303338); --text: light-dark(#1d1f21, #dfe1e4); --dim: light-dark(#64686e, #969ca4);
  --mark: light-dark(#1f5fbf, #7db1ff); --warn: light-dark(#c2571a, #f2a063); }
body { margin: 0 auto; max-width: 1080px; padding: 16px; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 16px; overflow-wrap: anywhere; } h2 { font-size: 14px; margin: 24px 0 8px; } .dim { color: var(--dim); }
.wide { overflow-x: auto; } table { border-collapse: collapse; background: var(--box); }
td, th { border: 1px solid var(--line); padding: 3px 9px; text-align: right; } td:first-child, th:first-child { text-align: left; }
tr.best td { font-weight: 600; } svg { background: var(--box); border: 1px solid var(--line); max-width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .dim { fill: var(--dim); }
svg line { stroke: var(--line); } svg .front { fill: none; stroke: var(--mark); stroke-dasharray: 4 4; }
svg .spread { stroke: var(--dim); } svg .point { fill: var(--page); stroke: var(--dim); stroke-width: 1.5; }
svg .best { fill: var(--mark); stroke: var(--mark); } svg .recorded { fill: none; stroke: var(--warn); stroke-width: 2; }
"""

COLUMNS: Mapping[str, tuple[Callable[[Answer], float | None], str]] = {
    "steps per hour": (lambda one: one.steps_per_hour, ".1f"),
    "sequences per second": (lambda one: one.sequences_per_s, ".2f"),
    "staleness": (lambda one: one.staleness, ".2f"),
    "thrown away": (lambda one: one.thrown_away, ".1%"),
    "trainer": (lambda one: one.trainer, ".0%"),
    "engines": (lambda one: one.engines, ".0%"),
    "queued": (lambda one: one.queue, ".1f"),
}


def build_page(
    title: str,
    points: Sequence[Point],
    recorded: Answer | None,
    notes: Sequence[str],
    refused: Sequence[Refused] = (),
) -> str:
    """The document."""
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'"
    name = html.escape(title)
    lines = [*notes, *(f"not simulated: {one.name}: {one.reason}" for one in refused)]
    said = "".join(f"<p class=dim>{html.escape(line)}</p>" for line in lines)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>simulated: {name}</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body><h1>{name}, simulated</h1>
<p class=dim>Speed against staleness, with the spread over {len(points[0].answers.each)} seeds. Full points are the best: no other one is
faster and as fresh, or fresher and as fast.</p>{said}
<div class=wide>{_chart(points, recorded)}</div>
<h2>What each does</h2><div class=wide>{_table(points, recorded)}</div>
<h2>Where the time goes</h2><div class=wide>{_shares(points, lambda one: one.time)}</div>
<h2>Delivered mix</h2><div class=wide>{_shares(points, lambda one: one.shares)}</div>
<h2>Age in versions</h2><div class=wide>{_shares(points, ages_of)}</div>
</body></html>
"""


def _chart(points: Sequence[Point], recorded: Answer | None) -> str:
    ages = [point.staleness for point in points] + ([recorded.staleness] if recorded else [])
    speeds = [point.speed for point in points] + ([recorded.sequences_per_s] if recorded else [])
    most_age, most_speed = max([1.0, *ages]) * 1.08, max(speeds, default=1.0) * 1.12 or 1.0

    def x(age: float) -> float:
        return LEFT + age / most_age * (WIDTH - LEFT - RIGHT)

    def y(speed: float) -> float:
        return HEIGHT - BOTTOM - speed / most_speed * (HEIGHT - BOTTOM - TOP)

    parts = []
    for tick in range(6):
        speed, age = most_speed * tick / 5, most_age * tick / 5
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(speed):.1f}" y2="{y(speed):.1f}"/>')
        parts.append(
            f'<text class="dim" x="{LEFT - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:.3g}</text>'
        )
        parts.append(
            f'<text class="dim" x="{x(age):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{age:.2f}</text>'
        )
    best = sorted((point for point in points if point.best), key=lambda point: point.staleness)
    if len(best) > 1:
        way = " ".join(f"{x(point.staleness):.1f},{y(point.speed):.1f}" for point in best)
        parts.append(f'<polyline class="front" points="{way}"/>')
    for point in points:
        at, up = x(point.staleness), y(point.speed)
        spread = point.answers.deviation(lambda one: one.sequences_per_s)
        low, high = y(point.speed - spread), y(point.speed + spread)
        parts.append(f'<line class="spread" x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        kind = "point best" if point.best else "point"
        parts.append(
            f'<circle class="{kind}" cx="{at:.1f}" cy="{up:.1f}" r="5"><title>{html.escape(point.name)}</title></circle>'
        )
        if len(points) <= 24:
            parts.append(f'<text x="{at + 9:.1f}" y="{up + 4:.1f}">{html.escape(_short(point.name))}</text>')
    if recorded is not None:
        at, up = x(recorded.staleness), y(recorded.sequences_per_s)
        parts.append(
            f'<circle class="recorded" cx="{at:.1f}" cy="{up:.1f}" r="9"><title>recorded</title></circle>'
        )
        parts.append(f'<text x="{at + 13:.1f}" y="{up - 8:.1f}">recorded</text>')
    middle = (WIDTH - RIGHT + LEFT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">staleness, versions</text>')
    parts.append(
        f'<text x="16" y="{HEIGHT / 2:.0f}" text-anchor="middle" transform="rotate(-90 16 {HEIGHT / 2:.0f})">sequences per second</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'


def _short(name: str) -> str:
    """The values alone; which setting each is of stands in the table."""
    return ", ".join(word.rpartition("=")[2] for word in name.split())


def _table(points: Sequence[Point], recorded: Answer | None) -> str:
    rows = [(point.name, "best" if point.best else "", point.answers) for point in points]
    if recorded is not None:
        rows = [("recorded", "", Answers([recorded])), *rows]
    lines = []
    for name, kind, answers in rows:
        told = "".join(f"<td>{_cell(answers, *column)}</td>" for column in COLUMNS.values())
        lines.append(f'<tr class="{kind}"><td>{html.escape(name)}</td>{told}</tr>')
    heads = "".join(f"<th>{column}</th>" for column in COLUMNS)
    return f"<table><tr><th></th>{heads}</tr>{''.join(lines)}</table>"


def _cell(answers: Answers, number: Callable[[Answer], float | None], shape: str) -> str:
    mean = answers.mean(number)
    return "–" if mean is None else with_spread(answers, mean, answers.deviation(number), shape)


def _shares(points: Sequence[Point], of: Callable[[Answer], Mapping[str, float]]) -> str:
    tables = [point.answers.table(of) for point in points]
    names = list(dict.fromkeys(name for table in tables for name in table))
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = []
    for point, table in zip(points, tables, strict=True):
        spreads = point.answers.spreads(of)
        cells = "".join(
            f"<td>{with_spread(point.answers, table[name], spreads[name], '.1%') if name in table else '–'}</td>"
            for name in names
        )
        lines.append(f"<tr><td>{html.escape(point.name)}</td>{cells}</tr>")
    return f"<table><tr><th></th>{heads}</tr>{''.join(lines)}</table>"


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
