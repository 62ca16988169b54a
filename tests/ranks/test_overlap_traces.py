"""What a trace and a plan say of overlapped matmuls, and how short their path is."""

from __future__ import annotations

import statistics
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from harness import run_ranks
from test_overlap_ops import world

import weft
from weft import overlap
from weft.errors import PeerMismatch
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.executor.context import context_of


def traced() -> None:
    group = world()
    x, w = torch.randn(64, 32), torch.randn(48, 32, requires_grad=True)
    with weft.trace() as t:
        for _ in range(3):
            overlap.matmul_reduce_scatter(x, w, group=group).sum().backward()
    assert {"compute", "comm"} <= {e.lane for e in t.timeline.events}
    summary = t.summary()
    assert summary.total.compute > 0
    forward, backward = summary.calls
    assert (forward.what, backward.what) == (
        "matmul_reduce_scatter 64 x 48 x 32 float32",
        "all_gather_matmul 64 x 32 x 48 float32",
    )
    assert forward.count == backward.count == 3
    for call in t.calls:
        assert call.baseline is not None
        assert call.ect == call.seconds - call.baseline.matmul_seconds
        assert 0 < call.bound_fraction < 1
        assert call.e_overlap is not None
        assert {e.kind for e in call.timeline.events} >= {"compute"}
        assert all(e.name.startswith(call.what.split()[0]) for e in call.timeline.events)
        assert overlap.OverlapPlan.parse(call.plan).m == 64
        assert {e.place for e in call.predicted().events} == {"rank 0", "rank 1"}
    assert sum(len(call.timeline.events) for call in t.calls) == len(t.timeline.events)
    assert "E_overlap" in str(summary)


def test_a_trace_shows_every_call_with_its_figures() -> None:
    run_ranks(traced, 2)


def reasons() -> None:
    """What made buffers is no measure of the rest, and each kind of call says why it went as it did."""
    group = world()
    hosts = context_of(group).hosts
    plan = OverlapPlan(Op.ALL_REDUCE, 8, 8, 8, "float32", hosts, reason="because it rains")
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    with weft.trace() as first:
        overlap.matmul_all_reduce(x, w, group=group, plan=plan)
    (row,) = first.summary().calls
    assert (row.setups, row.e_overlap) == (1, None)
    assert "set-up: 1 of 1 calls" in str(first.summary())
    overlap.curves_of(group)
    with weft.trace() as t:
        for _ in range(4):  # one more makes the buffers of the other bank
            overlap.matmul_all_reduce(x, w, group=group, plan=plan)
        overlap.matmul_reduce_scatter(x, w, group=group)
    given, chosen = t.summary().calls
    assert (given.count, given.setups) == (4, 1)
    assert given.seconds == statistics.median(c.seconds for c in t.calls if c.what == given.what and not c.is_setup)
    assert "not overlapped: because it rains" in str(t.summary())
    known = context_of(group).planner.known(Op.REDUCE_SCATTER, 8, 8, 8, "float32")
    assert known is not None
    assert known.reason in chosen.note
    assert f"{chosen.what}: " in str(t.summary())


def test_a_summary_says_why_and_leaves_out_what_made_buffers() -> None:
    run_ranks(reasons, 2)


def alone() -> None:
    """Each op on a group of one rank."""
    group, x, w = world(), torch.randn(8, 4), torch.randn(6, 4, requires_grad=True)
    with weft.trace() as t:
        overlap.all_gather_matmul(x, w, group=group)
        overlap.matmul_all_reduce(x, w, group=group)
        overlap.matmul_reduce_scatter(x, w, group=group)
        overlap.matmul_all_to_all(x, w, torch.zeros(8, dtype=torch.int64), group=group)
    ops = ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_to_all")
    assert [call.what for call in t.calls] == [f"{op} 8 x 6 x 4 float32" for op in ops]
    assert {call.note for call in t.summary().calls} == {"not overlapped: there is only one rank"}
    assert str(t.summary()).count("there is only one rank") == len(ops)
    for call in t.calls:
        (event,) = call.timeline.events
        assert (event.kind, event.flops) == ("compute", 2.0 * 8 * 6 * 4)


def test_a_rank_that_is_alone_says_so() -> None:
    run_ranks(alone, 1)


def path(transport: Transport, most: int) -> None:
    """The files whose code a call runs, once its plan and buffers are there."""
    group, seen = world(), set[str]()
    root = Path(weft.__file__).parent

    def note(frame: FrameType, event: str, arg: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(root):
            seen.add(str(file.relative_to(root)))

    x, w, hosts = torch.randn(64, 32), torch.randn(48, 32), context_of(group).hosts
    context_of(group).planner.use(
        OverlapPlan(Op.REDUCE_SCATTER, 64, 48, 32, "float32", hosts, transport, tile_m=8, groups=(1, 2))
    )
    threading.setprofile(note)  # of the threads that are started from now on
    for _ in range(3):
        seen.clear()
        sys.setprofile(note)
        overlap.matmul_reduce_scatter(x, w, group=group)
        sys.setprofile(None)
    threading.setprofile(None)
    found = {file for file in seen if "/" in file}
    assert {"overlap/api.py", "overlap/executor/outgoing.py", "kernels/cpu.py"} <= found
    assert len(found) <= most, sorted(found)


@pytest.mark.parametrize(("transport", "most"), [(Transport.WINDOWS, 19), (Transport.MESSAGES, 22)])
def test_the_path_of_a_call_is_short(transport: Transport, most: int) -> None:
    run_ranks(path, 2, transport, most)


def traced_with_given_plans() -> None:
    """Nobody has measured anything: the call is there, its figures are not, until someone does."""
    group = world()
    plan = OverlapPlan(Op.ALL_REDUCE, 8, 8, 8, "float32", context_of(group).hosts)
    for judged in (False, True):
        with weft.trace() as t:
            overlap.matmul_all_reduce(torch.ones(8, 8), torch.ones(8, 8), group=group, plan=plan)
        (call,) = t.calls
        assert (call.e_overlap is not None, call.predicted is not None) == (judged, judged)
        overlap.curves_of(group)


def test_calls_with_given_plans_are_judged_once_curves_are_known() -> None:
    run_ranks(traced_with_given_plans, 2)


def planned() -> list[str]:
    group = world()
    plan = weft.plan_overlap("matmul_all_reduce", 96, 64, 32, dtype=torch.bfloat16, group=group)
    assert plan.simulate(overlap.curves_of(group)).seconds > 0
    x, w = torch.ones(96, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)
    with weft.trace() as t:
        overlap.matmul_all_reduce(x, w, group=group)
    assert OverlapPlan.parse(t.calls[0].plan) == plan, "a call without a plan follows the same one"
    odd = 48 if group.rank() else 96
    with pytest.raises(PeerMismatch, match="m=48"):
        weft.plan_overlap("matmul_all_reduce", odd, 64, 32, group=group)
    return [str(plan)]


def test_a_plan_of_a_group_is_what_its_calls_follow() -> None:
    first, second = run_ranks(planned, 2)
    assert first == second
