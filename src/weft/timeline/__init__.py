"""Events on lanes: what a plan predicts and what a run did, as one type.

`Timeline` is a frozen value. It prints (`text`), is saved and loaded as Chrome trace JSON, and sums itself up
(`summary`). `weft.timeline.record` records one; `weft.timeline.clocks` merges those of the ranks; `weft.report` draws
them as SVG and HTML.
"""

from weft.timeline.events import KINDS, Event, Kind
from weft.timeline.summary import Baseline, CallFigures, LaneSummary, Summary, exposed_seconds, overlap_efficiency
from weft.timeline.timeline import Timeline, TracedCall

__all__ = [
    "KINDS",
    "Baseline",
    "CallFigures",
    "Event",
    "Kind",
    "LaneSummary",
    "Summary",
    "Timeline",
    "TracedCall",
    "exposed_seconds",
    "overlap_efficiency",
]
