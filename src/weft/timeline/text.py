"""Timelines drawn with characters, and the small pieces of typesetting that every drawing shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.timeline.events import KINDS, Event, Interval, Kind, difference, group_by_lane, union

# One column each in every terminal and font; arrows and triangles are not (East Asian and emoji widths).
GLYPHS: dict[Kind, str] = {"compute": "█", "send": ">", "recv": "<", "wait": "░", "other": "▒"}
NARROWEST = 40


def time_unit(seconds: float) -> tuple[float, str]:
    """The factor and the name of the unit in which `seconds` reads best.

    >>> time_unit(0.012)
    (1000.0, 'ms')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return factor, unit
    return (1e9, "ns") if seconds > 0 else (1.0, "s")


def format_seconds(seconds: float) -> str:
    """Three significant digits and a unit.

    >>> format_seconds(0.0123456)
    '12.3 ms'
    """
    factor, unit = time_unit(abs(seconds))
    value = seconds * factor
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f} {unit}"


def format_bytes(count: float) -> str:
    """Three significant digits and a binary unit.

    >>> format_bytes(3 << 20)
    '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def printable(text: str) -> str:
    """The text on one line, without characters that steer a terminal: names may come from a file.

    >>> printable("rank 0\\x1b[2J")
    'rank 0?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def tick_step(seconds: float, *, most: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that puts at most `most` steps in `seconds` > 0.

    >>> tick_step(0.0123, most=5)
    0.005
    """
    exponent = math.floor(math.log10(seconds / most))
    steps = [float(f"{m}e{e}") for e in (exponent, exponent + 1) for m in (1, 2, 5)]
    return next(step for step in steps if seconds / step <= most)


def align_columns(table: Sequence[Sequence[str]]) -> str:
    """A table of text: the first column to the left, the others to the right.

    >>> print(align_columns([["lane", "busy"], ["rank 0/comm", "1.5"]]))
    lane         busy
    rank 0/comm   1.5
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


def draw(timelines: Sequence[tuple[str, Sequence[Event]]], *, width: int) -> str:
    """Named lists of events, one above the other on one time axis; each list starts at zero.

    A cell shows what its lane did most in that slice of time, waiting before an event around it.
    """
    if width < NARROWEST:
        raise ValueError(f"got width={width}; expected at least {NARROWEST} columns; widen the terminal")
    labels = [event.lane for _, events in timelines for event in events]
    margin = min(max(map(len, labels), default=0), width // 3) + 2
    cells = width - margin
    span = max((_span(events) for _, events in timelines), default=0.0)
    lines: list[str] = []
    for name, events in timelines:
        lines += [printable(name)] if name else []
        origin = min((e.start for e in events), default=0.0)
        for lane, own in group_by_lane(events).items():
            label = printable(lane if len(lane) <= margin - 2 else lane[: margin - 3] + "…")
            lines.append(f"{label:<{margin}}{_cells(own, origin=origin, span=span, cells=cells)}".rstrip())
    lines.append(" " * margin + _axis(span, cells=cells))
    lines.append(" " * margin + "  ".join(f"{glyph} {kind}" for kind, glyph in GLYPHS.items()))
    return "\n".join(lines)


def _span(events: Sequence[Event]) -> float:
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)


def _cells(events: Sequence[Event], *, origin: float, span: float, cells: int) -> str:
    """The row of one lane: for each cell the kind that covers most of it, a blank where nothing does."""
    covered = {kind: union((e.start, e.end) for e in events if e.kind == kind) for kind in KINDS}
    for kind in ("compute", "other"):
        covered[kind] = difference(covered[kind], covered["wait"])
    shares = {kind: _shares(x, origin=origin, span=span, cells=cells) for kind, x in covered.items()}
    row = []
    for cell in range(cells):
        kind = max(KINDS, key=lambda k: shares[k][cell])
        row.append(GLYPHS[kind] if shares[kind][cell] > 0 else " ")
    return "".join(row)


def _shares(covered: Sequence[Interval], *, origin: float, span: float, cells: int) -> list[float]:
    """How much of each cell a set of seconds covers, in cells."""
    shares = [0.0] * cells
    for start, end in covered:
        first, last = ((x - origin) / span * cells for x in (start, end))
        for cell in range(math.floor(first), min(cells, math.ceil(last))):
            shares[cell] += min(last, cell + 1) - max(first, cell)
    return shares


def _axis(span: float, *, cells: int) -> str:
    """Ticks at round times, the unit at the first: `|0 ms       |5          |10`."""
    factor, unit = time_unit(span)
    line = f"|0 {unit}"
    if span > 0:
        step = tick_step(span, most=max(1, cells // 12))
        for i in range(1, math.floor(span / step) + 1):
            line = line.ljust(round(i * step / span * cells)) + f"|{i * step * factor:.4g}"
    return line
