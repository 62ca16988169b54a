"""Timelines as SVG, and as a page that shows an event's name, duration and size under the pointer.

Several timelines are stacked on one time axis, each from its own start: a prediction above the measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape

from weft.report.page import page
from weft.report.table import Column, Table
from weft.timeline import KINDS, Baseline, Event, Timeline
from weft.timeline.activity import group_by_lane
from weft.timeline.intervals import rows
from weft.timeline.text import format_bytes, format_seconds, tick_step, time_unit

WIDTH = 1040
ROW, GAP, HEADING, AXIS, LEGEND = 16, 6, 26, 24, 24
SHORTEST = 1e-12  # seconds; no clock tells less apart, and dividing by less may overflow
NARROWEST = 0.8  # pixels; a shorter event would vanish

# The colours are told apart by people who confuse red and green, and by lightness in print.
STYLE = """
.weft { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
.weft text { fill: #1c2330; } .weft .soft { fill: #5d6778; } .weft .heading { font-weight: 600; font-size:
13px; } .weft .grid { stroke: #c9ced8; stroke-width: 0.6; } .weft .track { fill: #5d6778; fill-opacity: 0.07;
} .weft .compute { fill: #2f6db5; } .weft .send { fill: #e08a1e; } .weft .recv { fill: #3a9d7c; } .weft .wait
{ fill: #b9bfca; } .weft .other { fill: #8e6bb8; } .weft rect.e:hover { fill-opacity: 0.7; } @media
(prefers-color-scheme: dark) { .weft text { fill: #e3e7ee; } .weft .soft { fill: #98a2b3; } .weft .grid {
stroke: #3d4654; } .weft .compute { fill: #5b9be6; } .weft .send { fill: #f0a94a; } .weft .recv { fill:
#58c09c; } .weft .wait { fill: #566070; } .weft .other { fill: #b092d8; } .weft .track { fill: #98a2b3; } }
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
    parts = [*_axis(span, x=margin, y=y, scale=scale), *bars, *_legend(x=margin, y=y + AXIS)]
    height = y + AXIS + LEGEND
    return (
        f'<svg class="weft" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'role="img" aria-label="timeline"><style>{STYLE}</style>\n{chr(10).join(parts)}\n</svg>'
    )


def timeline_page(timelines: Sequence[Timeline], *, title: str, baseline: Baseline | None = None) -> str:
    """A page with the drawing, and under it the summary of each timeline."""
    body = [f"<figure>{timeline_svg(timelines)}</figure>"]
    for timeline in timelines:
        summary = timeline.summary(baseline)
        head, *cells = summary.table()
        columns = [Column(str(i), text, right=i > 0) for i, text in enumerate(head)]
        table = [{str(i): text for i, text in enumerate(row)} for row in cells]
        body.append(Table(timeline.name or "summary", columns, table, summary.remarks()).html())
    return page(title, body, script=SCRIPT)


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


def _axis(span: float, *, x: float, y: float, scale: float) -> list[str]:
    """Grid lines over the whole height and their times below."""
    if span == 0:
        return []
    factor, unit = time_unit(span)
    step = tick_step(span, most=10)
    parts = []
    for i in range(math.floor(span / step) + 1):
        at = x + i * step * scale
        label = f"{i * step * factor:.4g}" + (f" {unit}" if i == 0 else "")
        parts.append(f'<line class="grid" x1="{at:.2f}" x2="{at:.2f}" y1="0" y2="{y:g}"/>')
        parts.append(f'<text class="soft" x="{at:.2f}" y="{y + 14:g}" text-anchor="middle">{label}</text>')
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
