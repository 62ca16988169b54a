"""Curves over steps, such as losses: as text for a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 320, 56, 36
COLOURS = ("#2f6db5", "#e08a1e", "#3a9d7c", "#8e6bb8")


def curve_text(values: Sequence[float], *, width: int = 60, height: int = 10) -> str:
    """A curve as lines of text, the highest value on top.

    >>> print(curve_text([3.0, 2.0, 1.0], height=3))
           3 |*
             | *
           1 |  *
    """
    if not values:
        return "(no values)"
    count = min(width, len(values))
    columns = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    rows = [round((high - value) / span * (height - 1)) for value in columns]
    lines = []
    for row in range(height):
        label = f"{high:.4g}" if row == 0 else f"{low:.4g}" if row == height - 1 else ""
        lines.append(f"{label:>8} |" + "".join("*" if at == row else " " for at in rows).rstrip())
    return "\n".join(lines)


def curve_svg(series: Mapping[str, Sequence[float]], *, title: str, x_label: str = "step") -> str:
    """Some curves on common axes, each with its name, as one SVG element that stands alone."""
    values = [value for row in series.values() for value in row]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    span = (high - low) or 1.0
    longest = max((len(row) for row in series.values()), default=1)
    parts = []
    for i in range(5):
        value = low + span * i / 4
        y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 30) * i / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:g}" y2="{y:g}" stroke="#c9ced8" stroke-width="0.6"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{value:.4g}</text>')
    for number, (name, row) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{LEFT + (WIDTH - LEFT - 10) * i / max(1, longest - 1):.1f},"
            f"{HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 30) * (value - low) / span:.1f}"
            for i, value in enumerate(row)
        )
        dash = "" if number == 0 else ' stroke-dasharray="5 4"'
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(
            f'<text x="{WIDTH - 14}" y="{46 + 16 * number}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    parts.append(f'<text x="{WIDTH / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#5d6778">'
        f'<text x="{LEFT}" y="18" font-weight="600" fill="#1c2330">{escape(title)}</text>{"".join(parts)}</svg>'
    )
