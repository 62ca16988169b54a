"""Any events of two ranks and of none, for timelines."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.timeline import KINDS, Event

times = st.integers(0, 30)
events = st.builds(
    lambda lane, kind, a, b: Event(lane, kind, "x", float(min(a, b)), float(max(a, b))),
    st.sampled_from(["compute", "comm", "rank 0/compute", "rank 0/comm", "rank 1/compute", "rank 1/comm"]),
    st.sampled_from(KINDS),
    times,
    times,
)
