"""What a page is made of: its frame, timelines, and curves over steps; one file that loads nothing from anywhere.

Several timelines are stacked on one time axis, each from its own start: a prediction above the measurement. An
event's name, duration and size show under the pointer. Curves, such as losses, are also drawn as text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from weft.timeline import KINDS, Event, Timeline
from weft.timeline.events import group_by_lane, rows
from weft.timeline.text import format_bytes, format_seconds, tick_step, time_unit

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2330; --soft: #5d6778; --line: #dfe3ea; --paper: #ffffff; --panel: #f6f7f9; --bar: #7fa9d9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e3e7ee; --soft: #98a2b3; --line: #323a47; --paper: #14181f; --panel: #1b212a; --bar: #3f74b3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 56px; }
h1 { font-size: 24px; line-height: 1.25; font-weight: 650; margin: 0 0 24px; letter-spacing: -0.01em; }
h2 { font-size: 16px; font-weight: 600; margin: 32px 0 8px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 14px 6px 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; }
th.number, td.number { text-align: right; padding: 6px 0 6px 22px; }
th.barred { padding-left: 22px; }
td.barred { position: relative; min-width: 260px; padding-left: 22px; }
td.barred span { display: inline-block; min-width: 40px; text-align: right; }
td.barred i { position: absolute; left: 76px; right: 0; top: 9px; bottom: 9px; }
td.barred b { display: block; height: 100%; background: var(--bar); border-radius: 3px; }
.note { margin: 4px 0; }
div + .note { margin-top: 10px; }
.note, footer { color: var(--soft); font-size: 13px; }
footer { margin-top: 40px; padding-top: 12px; border-top: 1px solid var(--line); }
figure { margin: 0 0 8px; padding: 16px; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; }
pre { font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
#tip {
  position: fixed; pointer-events: none; display: none; white-space: pre; z-index: 1; max-width: 480px;
  background: var(--ink); color: var(--paper); font-size: 12.5px; line-height: 1.45; padding: 6px 10px;
  border-radius: 6px; box-shadow: 0 2px 10px rgb(0 0 0 / 0.25);
}
"""


def page(title: str, body: Sequence[str], *, footer: str = "", script: str = "") -> str:
    """A whole page; `body` holds elements, `title` and `footer` are text."""
    foot = f"<footer>{escape(footer)}</footer>" if footer else ""
    code = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{chr(10).join(body)}\n{foot}\n</main>\n{code}\n</body>\n</html>\n"
    )


WIDTH = 1040
ROW, GAP, HEADING, AXIS, LEGEND = 16, 6, 26, 24, 24
SHORTEST = 1e-12  # seconds; no clock tells less apart, and dividing by less may overflow
NARROWEST = 0.8  # pixels; a shorter event would vanish

# The colours are told apart by people who confuse red and green, and by lightness in print.
TIMELINE_STYLE = """
.weft { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
.weft text { fill: #1c2330; } .weft .soft { fill: #5d6778; } .weft .heading { font-weight: 600; font-size: 13px; }
.weft .grid { stroke: #c9ced8; stroke-width: 0.6; } .weft .track { fill: #5d6778; fill-opacity: 0.07; }
.weft .compute { fill: #2f6db5; } .weft .send { fill: #e08a1e; } .weft .recv { fill: #3a9d7c; }
.weft .wait { fill: #b9bfca; } .weft .other { fill: #8e6bb8; } .weft rect.e:hover { fill-opacity: 0.7; }
@media (prefers-color-scheme: dark) {
  .weft text { fill: #e3e7ee; } .weft .soft { fill: #98a2b3; } .weft .grid { stroke: #3d4654; }
  .weft .compute { fill: #5b9be6; } .weft .send { fill: #f0a94a; } .weft .recv { fill: #58c09c; }
  .weft .wait { fill: #566070; } .weft .other { fill: #b092d8; } .weft .track { fill: #98a2b3; }
}
"""

# Moves each <title> into a tip that follows the pointer at once; without scripts the titles still work.
SCRIPT = """
const tip = document.body.appendChild(Object.assign(document.createElement("div"), {id: "tip"}));
for (const e of document.querySelectorAll("rect.e")) {
  e.dataset.tip = e.firstElementChild.textContent; e.firstElementChild.remove();
}
document.addEventListener("mousemove", m => {
  const text = m.target.dataset && m.target.dataset.tip;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.min(m.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(m.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
});
"""


def timeline_svg(timelines: Sequence[Timeline]) -> str:
    """The timelines one above the other, as one SVG element that stands alone."""
    span = max((t.seconds for t in timelines), default=0.0)
    if span < SHORTEST:
        span = 0.0
    longest = max((len(lane) for t in timelines for lane in t.lanes), default=0)
    margin = min(20 + 6.6 * longest, 0.3 * WIDTH)
    scale = (WIDTH - margin - 12) / span if span else 0.0
    bars, y = [], 0.0
    for timeline in timelines:
        if timeline.name:
            bars.append(f'<text class="heading" x="0" y="{y + 17:g}">{_xml(timeline.name)}</text>')
            y += HEADING
        for lane, events in group_by_lane(timeline.events).items():
            drawn, height = _lane(lane, events, origin=timeline.start, x=margin, y=y, scale=scale)
            bars += drawn
            y += height + GAP
        y += GAP
    parts = [*time_axis(span, x=margin, top=0, bottom=y, scale=scale, most=10), *bars, *_legend(x=margin, y=y + AXIS)]
    height = y + AXIS + LEGEND
    return (
        f'<svg class="weft" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="timeline"><style>{TIMELINE_STYLE}</style>\n{chr(10).join(parts)}\n</svg>'
    )


def _lane(
    lane: str, events: Sequence[Event], *, origin: float, x: float, y: float, scale: float
) -> tuple[list[str], float]:
    """A lane's label, track and events; events that run at once share its height, one below the other."""
    row_of = rows([(e.start, e.end) for e in events])
    height = max(ROW, 8 * (max(row_of) + 1))
    bar = height / (max(row_of) + 1)
    label = lane if len(lane) <= 44 else lane[:43] + "…"
    parts = [
        f'<text class="soft" x="{x - 10:g}" y="{y + height / 2 + 4:g}" text-anchor="end">{_xml(label)}</text>',
        f'<rect class="track" x="{x:g}" y="{y:g}" width="{WIDTH - x - 12:g}" height="{height:g}"/>',
    ]
    for event, row in zip(events, row_of, strict=True):
        left, width = x + (event.start - origin) * scale, max(event.seconds * scale, NARROWEST)
        parts.append(
            f'<rect class="e {event.kind}" x="{left:.2f}" y="{y + row * bar:.2f}" width="{width:.2f}" '
            f'height="{bar:.2f}"><title>{_xml(describe(event, origin=origin))}</title></rect>'
        )
    return parts, height


def describe(event: Event, *, origin: float) -> str:
    """What an event's tip says.

    >>> print(describe(Event("comm", "send", "group 3", 5.0, 5.5, bytes=1 << 30), origin=4.0))
    group 3
    send, 500 ms from 1.00 s
    1 GiB at 17.2 Gbit/s
    """
    lines = [
        event.name,
        f"{event.kind}, {format_seconds(event.seconds)} from {format_seconds(event.start - origin)}",
    ]
    seconds = event.seconds
    if event.bytes is not None:
        rate = f" at {event.bytes * 8e-9 / seconds:.3g} Gbit/s" if seconds else ""
        lines.append(format_bytes(event.bytes) + rate)
    if event.flops is not None:
        rate = f" at {event.flops * 1e-9 / seconds:.4g} Gflop/s" if seconds else ""
        lines.append(f"{event.flops:.4g} flop{rate}")
    return "\n".join(lines)


def time_axis(span: float, *, x: float, top: float, bottom: float, scale: float, most: int) -> list[str]:
    """At most about `most` grid lines, from `top` to `bottom`, and their times below."""
    if span <= 0:
        return []
    factor, unit = time_unit(span)
    step = tick_step(span, most=most)
    parts = []
    for i in range(math.floor(span / step) + 1):
        at = x + i * step * scale
        label = f"{i * step * factor:.4g}" + (f" {unit}" if i == 0 else "")
        parts.append(f'<line class="grid" x1="{at:.2f}" x2="{at:.2f}" y1="{top:g}" y2="{bottom:g}"/>')
        parts.append(f'<text class="soft" x="{at:.2f}" y="{bottom + 14:g}" text-anchor="middle">{label}</text>')
    return parts


def _legend(*, x: float, y: float) -> list[str]:
    parts = []
    for i, kind in enumerate(KINDS):
        parts.append(f'<rect class="{kind}" x="{x + 90 * i:g}" y="{y + 4:g}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="soft" x="{x + 90 * i + 18:g}" y="{y + 14:g}">{kind}</text>')
    return parts


def _xml(text: str) -> str:
    """Text for an element; the few characters that XML cannot hold even escaped are replaced."""
    return escape(re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


@dataclass(frozen=True)
class Figure:
    """Timelines one above the other on one time axis, each from its own start, with a title and notes.

    `Report.figures` and `Headline.figures` hold them; the page draws them under the tables.

    >>> "predicted" in Figure("one call", [Timeline([], name="predicted")]).html()
    True
    """

    title: str
    timelines: Sequence[Timeline]
    notes: Sequence[str] = ()

    def html(self) -> str:
        """An element of a page, which needs `drawing.SCRIPT` once for its tips."""
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self.notes)
        return f"<h2>{escape(self.title)}</h2><figure>{timeline_svg(self.timelines)}</figure>{notes}"


CURVE_WIDTH, CURVE_HEIGHT, CURVE_LEFT, CURVE_BOTTOM = 720, 320, 56, 36
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
        y = CURVE_HEIGHT - CURVE_BOTTOM - (CURVE_HEIGHT - CURVE_BOTTOM - 30) * i / 4
        ends = f'x1="{CURVE_LEFT}" x2="{CURVE_WIDTH - 10}" y1="{y:g}" y2="{y:g}"'
        parts.append(f'<line {ends} stroke="#c9ced8" stroke-width="0.6"/>')
        parts.append(f'<text x="{CURVE_LEFT - 8}" y="{y + 4:g}" text-anchor="end">{value:.4g}</text>')
    for number, (name, row) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{CURVE_LEFT + (CURVE_WIDTH - CURVE_LEFT - 10) * i / max(1, longest - 1):.1f},"
            f"{CURVE_HEIGHT - CURVE_BOTTOM - (CURVE_HEIGHT - CURVE_BOTTOM - 30) * (value - low) / span:.1f}"
            for i, value in enumerate(row)
        )
        dash = "" if number == 0 else ' stroke-dasharray="5 4"'
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        at = f'x="{CURVE_WIDTH - 14}" y="{46 + 16 * number}"'
        parts.append(f'<text {at} text-anchor="end" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{CURVE_WIDTH / 2:g}" y="{CURVE_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#5d6778">'
        f'<text x="{CURVE_LEFT}" y="18" font-weight="600" fill="#1c2330">{escape(title)}</text>{"".join(parts)}</svg>'
    )
