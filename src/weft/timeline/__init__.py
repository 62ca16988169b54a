"""Events on lanes: what a plan predicts and what a run did, as one type.

`Timeline` is a frozen value. It prints (`text`), is saved and loaded as Chrome trace JSON, and sums itself up
(`summary`). `weft.tracing` records one; `weft.comm.clocks` merges those of the ranks; `weft.report` draws
them as SVG and HTML.
"""

from weft.timeline.calls import TracedCall
from weft.timeline.event import KINDS, Event, Kind
from weft.timeline.metrics import Baseline, exposed_seconds, overlap_efficiency
from weft.timeline.summary import CallFigures, LaneSummary, Summary
from weft.timeline.value import Timeline

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
