"""What a trace of a whole call says: how much communication nothing hid, and what the plans had promised."""

from __future__ import annotations

from collections.abc import Sequence

from weft.timeline import Event, Timeline, TracedCall


def exposed_fraction(happened: Timeline, ranks: int, seconds: float) -> float | None:
    """Communication under which nothing was computed, over the ranks' time; None where nothing was traced.

    >>> events = [Event("rank 0/cpu", "compute", "y", 0.0, 2.0), Event("rank 0/nic", "send", "y", 1.0, 3.0)]
    >>> exposed_fraction(Timeline(events), ranks=1, seconds=4.0)
    0.25
    """
    if not happened.events:
        return None
    total = happened.summary().total
    return (total.communication - total.overlapped) / (ranks * seconds)


def predicted_step(calls: Sequence[TracedCall], happened: Timeline) -> Timeline | None:
    """The traced ops one after the other, each as its plan promised; what lies between two of them stays as it was.

    None where no op says what it promised. Lanes that the ops do not have are not drawn.
    """
    known = [call for call in calls if call.predicted is not None and call.timeline.events]
    if not known:
        return None
    events: list[Event] = []
    clock, before = 0.0, happened.start
    for call in sorted(known, key=lambda call: call.timeline.start):
        assert call.predicted is not None
        promised = call.predicted()
        clock += max(0.0, call.timeline.start - before)
        events += promised.shifted(clock - promised.start).events
        clock += promised.seconds
        before = max(before, call.timeline.end)
    return Timeline(events, name="predicted")
