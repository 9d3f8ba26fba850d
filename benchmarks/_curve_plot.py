"""A curve as a small picture (SVG) that stands alone in a page, light or dark: logarithmic to the right, from zero upwards."""

import html
import math
from collections.abc import Sequence

from orchestrator.simulate.plot import BOTTOM, LEFT, TOP

WIDTH, HEIGHT, RIGHT = 560, 300, 24
STYLE = """
svg { color-scheme: light dark } text { font: 12px system-ui, sans-serif; fill: #64686e } .title { fill: #1d1f21; font-size: 13px }
line { stroke: #e3e3df } polyline { fill: none; stroke: #1f5fbf; stroke-width: 2 } circle { fill: #1f5fbf }
rect { fill: #fff; stroke: #e3e3df }
@media (prefers-color-scheme: dark) { .title { fill: #dfe1e4 } text { fill: #969ca4 } line, rect { stroke: #303338 }
  rect { fill: #1b1d20 } polyline { stroke: #7db1ff } circle { fill: #7db1ff } }
"""


def draw(title: str, along: str, unit: str, points: Sequence[tuple[float, float]]) -> str:
    """The picture of points, which are sorted from left to right and above zero."""
    first, last = math.log(points[0][0]), math.log(points[-1][0])
    top = max(value for _, value in points) * 1.15

    def x(at: float) -> float:
        return LEFT + (math.log(at) - first) / ((last - first) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP - 16)

    parts = [f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}"/>']
    parts.append(f'<text class="title" x="{LEFT}" y="{TOP + 4}">{html.escape(title)}</text>')
    for tick in range(5):
        value = top * tick / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{measured(value)}</text>'
        )
    for at, _ in points:
        parts.append(
            f'<text x="{x(at):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{shown(at)}</text>'
        )
    way = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
    parts.append(f'<polyline points="{way}"/>')
    for at, value in points:
        said = f"{shown(at)}: {measured(value)} {html.escape(unit)}"
        parts.append(f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="4"><title>{said}</title></circle>')
    middle = (WIDTH - RIGHT + LEFT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(along)}</text>')
    upright = f'transform="rotate(-90 16 {HEIGHT / 2:.0f})"'
    parts.append(
        f'<text x="16" y="{HEIGHT / 2:.0f}" text-anchor="middle" {upright}>{html.escape(unit)}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>{html.escape(title)}</title><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def measured(value: float) -> str:
    """A measured value with as many digits as say something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown(number: float) -> str:
    """A number on the axis, short."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"
