"""Timelines of real ranks on one clock, also where one of them has a clock that is 1000 s off."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from harness import run_ranks

from weft.timeline import Timeline, record

RANKS, SKEW, NOBODY = 3, 1000.0, -1


def gather(skewed: int) -> tuple[str, record.Offset]:
    """What a rank sees: the gathered timeline, and its offset."""
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank(group)
    if rank == skewed:
        real = time.perf_counter
        time.perf_counter = record.now = lambda: real() + SKEW  # type: ignore[assignment]
        record._clock_id = lambda: f"clock {rank}"
    with record.trace(name="gathered") as t:
        dist.barrier(group)
        with record.span("other", f"nap of {rank}", lane="main"):
            time.sleep(0.05)
    gathered = t.gather(group=group).to_json()
    with record._Clocks(group, "cpu") as clocks:
        return gathered, clocks.offset(record.PINGS)


@pytest.mark.parametrize("skewed", [NOBODY, 0, 2])
def test_every_rank_gets_all_timelines_on_the_clock_of_rank_0(skewed: int) -> None:
    traces, offsets = zip(*run_ranks(gather, RANKS, skewed, timeout=120.0), strict=True)
    merged = Timeline.from_json(traces[0])
    assert traces[0] == traces[1] == traces[2]
    assert merged.lanes == ("rank 0/main", "rank 1/main", "rank 2/main")
    assert merged.name == "gathered"
    # All naps began after one barrier, so on one clock they are close; unaligned they would be SKEW apart.
    assert merged.seconds < SKEW / 2
    for rank, offset in enumerate(offsets):
        expected = (SKEW if skewed == 0 else 0.0) - (SKEW if skewed == rank else 0.0)
        assert abs(offset.seconds - expected) <= offset.error, "off by more than the stated error"
        shares_the_clock = rank == 0 or skewed not in (0, rank)
        assert (offset.error == 0) == shares_the_clock, "a shared clock needs no measurement, a foreign one does"
