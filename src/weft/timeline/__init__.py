"""Events on lanes: what a plan predicts and what a run did, as one type.

timeline  `Timeline`, a frozen value; the calls of a trace; Chrome trace JSON
events    one event; what a lane or a place was doing when, as sets of seconds
summary   how much was work, waiting, and hidden communication
text      drawn with characters
record    `weft.trace`: recording one; one clock for all ranks, and their timelines merged

`weft.report` draws timelines as SVG and HTML.
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
