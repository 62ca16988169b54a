"""Timelines as a part of a page: what was predicted, and under it what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.report.drawing import timeline_svg
from weft.timeline import Timeline


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
