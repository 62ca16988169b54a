"""Simulated pipeline steps as a page: a band for each rank, a box for each action, strips for what its card carries.

All steps are drawn on one time axis, so that a longer box row is a slower schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from weft.pipeline import Direction, Kind, Simulation
from weft.report.drawing import SCRIPT, page, time_axis
from weft.report.result import Table
from weft.timeline.text import format_seconds

WIDTH, MARGIN = 1040, 60
BAND, STRIP, GAP, HEADING, AXIS = 20, 4, 7, 28, 24
LEGIBLE = 5.9  # pixels that a digit takes
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input",
    Kind.WEIGHT_GRADIENT: "weight",
}
LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("input", "gradient of the input"),
    ("weight", "gradient of the weights"),
    ("send", "sends"),
    ("recv", "receives"),
)

# Told apart by lightness too; digits are dark on light boxes and light on dark ones.
STYLE = """
.pipe { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
.pipe text { fill: #1c2330; } .pipe .soft { fill: #5d6778; } .pipe .heading { font-weight: 600; font-size: 13px; }
.pipe .track { fill: #5d6778; fill-opacity: 0.07; } .pipe .grid { stroke: #c9ced8; stroke-width: 0.6; }
.pipe .e { stroke: #ffffff; stroke-width: 0.7; } .pipe .e:hover { fill-opacity: 0.7; }
.pipe .forward { fill: #9cc3ef; } .pipe .backward { fill: #1f4f8a; } .pipe .input { fill: #3f78bd; }
.pipe .weight { fill: #b9a2dc; }
.pipe .send { fill: #e08a1e; stroke: none; } .pipe .recv { fill: #3a9d7c; stroke: none; }
.pipe .digit { font-size: 10.5px; text-anchor: middle; pointer-events: none; fill: #14181f; }
.pipe .on-dark { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  .pipe text { fill: #e3e7ee; } .pipe .soft { fill: #98a2b3; } .pipe .grid { stroke: #3d4654; }
  .pipe .track { fill: #98a2b3; } .pipe .e { stroke: #14181f; } .pipe .digit { fill: #14181f; }
  .pipe .on-dark { fill: #ffffff; }
}
"""


def pipeline_page(simulations: Mapping[str, Simulation], *, title: str, table: Table | None = None) -> str:
    """A page with the steps one above the other, each under its name, and a table under them."""
    body = [f"<figure>{pipeline_svg(simulations)}</figure>"]
    return page(title, body if table is None else [*body, table.html()], script=SCRIPT)


def pipeline_svg(simulations: Mapping[str, Simulation]) -> str:
    """The steps as one SVG element that stands alone."""
    span = max((s.seconds for s in simulations.values()), default=0.0)
    scale = (WIDTH - MARGIN - 8) / span if span else 0.0
    parts, y = _legend(), float(AXIS)
    for name, simulation in simulations.items():
        parts.append(f'<text class="heading" x="0" y="{y + 19:g}">{escape(name)}</text>')
        facts = f"{format_seconds(simulation.seconds)}, bubble {simulation.bubble:.1%}"
        parts.append(f'<text class="soft" x="{WIDTH - 8}" y="{y + 19:g}" text-anchor="end">{facts}</text>')
        y += HEADING
        for rank in range(len(simulation.schedule.ranks)):
            parts += _rank(simulation, rank, y=y, scale=scale)
            y += BAND + 2 * STRIP + GAP
    parts = [*time_axis(span, x=MARGIN, top=AXIS, bottom=y, scale=scale, most=12), *parts]
    return (
        f'<svg class="pipe" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + AXIS:g}" role="img" '
        f'aria-label="pipeline schedules"><style>{STYLE}</style>\n{chr(10).join(parts)}\n</svg>'
    )


def _rank(simulation: Simulation, rank: int, *, y: float, scale: float) -> list[str]:
    """The band of a rank: its actions, and under them what it sends and what it receives."""
    made = simulation.schedule
    parts = [
        f'<text class="soft" x="{MARGIN - 8}" y="{y + BAND / 2 + 4:g}" text-anchor="end">rank {rank}</text>',
        f'<rect class="track" x="{MARGIN}" y="{y:g}" width="{WIDTH - MARGIN - 8}" height="{BAND + 2 * STRIP}"/>',
    ]
    for action in made.ranks[rank]:
        start, end = simulation.actions[action]
        kind = NAMES[action.kind]
        parts.append(_box(kind, str(action), start, end, y=y, height=BAND, scale=scale))
        label = str(action.microbatch)
        if (end - start) * scale > LEGIBLE * len(label):
            dark = " on-dark" if kind in ("backward", "input") else ""
            middle = MARGIN + (start + end) / 2 * scale
            parts.append(f'<text class="digit{dark}" x="{middle:.1f}" y="{y + BAND / 2 + 4:g}">{label}</text>')
    for move, (start, end) in simulation.moves.items():
        what = f"{move} {'' if move.direction is Direction.FORWARD else 'gradient'}".strip()
        if made.rank_of(move.source) == rank:
            parts.append(_box("send", what, start, end, y=y + BAND, height=STRIP, scale=scale))
        if made.rank_of(move.target) == rank:
            parts.append(_box("recv", what, start, end, y=y + BAND + STRIP, height=STRIP, scale=scale))
    return parts


def _box(kind: str, name: str, start: float, end: float, *, y: float, height: float, scale: float) -> str:
    tip = f"{name}\n{format_seconds(end - start)} from {format_seconds(start)}"
    return (
        f'<rect class="e {kind}" x="{MARGIN + start * scale:.2f}" y="{y:g}" width="{(end - start) * scale:.2f}" '
        f'height="{height:g}"><title>{escape(tip)}</title></rect>'
    )


def _legend() -> list[str]:
    parts, x = [], float(MARGIN)
    for kind, text in LEGEND:
        parts.append(f'<rect class="{kind}" x="{x:g}" y="4" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 18:g}" y="14">{text}</text>')
        x += 34 + 6.2 * len(text)
    return parts
