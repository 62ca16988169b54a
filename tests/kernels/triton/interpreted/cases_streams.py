"""The overlapped matmuls of GPUs, with threads for streams, gloo for NCCL, windows for symmetric memory."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "ranks"))
from harness import run_ranks
from stream_cases import (
    Case,
    a_collective_fails,
    a_kernel_gives_up,
    a_plan_is_agreed_on,
    agrees,
    by_streams,
    overlaps,
    sums_in_rank_order,
    tables_are_kept,
)  # fmt: skip

from weft.overlap import Op, Transport
from weft.overlap.blocks import Axis
from weft.overlap.plan import shared_dims
from weft.overlap.streams.plans import check_plan, plan_on_streams

SHAPES = {2: [(48, 64, 24), (3, 33, 5)], 3: [(37, 50, 17)]}


def cases(size):
    found = []
    for m, n, k in SHAPES[size]:
        found += [
            Case(Op.ALL_GATHER, m, n, k, groups=(1, 2)),
            Case(Op.ALL_GATHER, m, n, k, transport=Transport.WINDOWS, groups=(1, 1)),
            Case(Op.ALL_REDUCE, m, n, k, groups=(1, 1, 2)),
            Case(Op.ALL_REDUCE, m, n, k, axis=Axis.COLS, groups=(1, 1)),
            Case(Op.REDUCE_SCATTER, m, n, k, axis=Axis.COLS, groups=(1, 1)),
            Case(Op.ALL_TO_ALL, m, n, k, axis=Axis.COLS, groups=(1, 1)),
        ]
        found.append(Case(Op.REDUCE_SCATTER, m, n, k, transport=Transport.WINDOWS, groups=(1,)))
    dtype = torch.bfloat16 if size == 2 else torch.float16
    found += [Case(op, 40, 40, 12, dtype, planned=False) for op in Op if op is not Op.GATHER_BACK]
    return [*found, *(Case(op, 160, 200, 8, planned=False) for op in (Op.ALL_GATHER, Op.ALL_REDUCE))]


@pytest.mark.parametrize("size", [2, 3])
def test_values_and_gradients(size):
    wanted = cases(size)
    assert run_ranks(by_streams, size, agrees, wanted, timeout=200) == [len(wanted)] * size


def test_parts_are_added_in_rank_order():
    assert run_ranks(by_streams, 3, sums_in_rank_order, timeout=60) == [True] * 3


def test_an_all_to_all_makes_its_tables_once():
    assert run_ranks(by_streams, 2, tables_are_kept, timeout=60) == [2, 2]  # was 3


def test_a_group_travels_while_the_next_is_computed():
    assert run_ranks(by_streams, 2, overlaps, timeout=60) == [[32, 32]] * 2


def test_ranks_agree_on_a_plan_once():
    for name, text in run_ranks(by_streams, 2, a_plan_is_agreed_on, timeout=60):
        assert name == "PeerMismatch"
        assert "groups=1,1" in text


def test_rows_that_never_come():
    late, on_time = run_ranks(by_streams, 2, a_kernel_gives_up, timeout=60)
    assert on_time is None
    first, again = late
    assert first.startswith("waited 0.02 s for all_gather_matmul: rows 32 to 48 of x, from rank 1")
    assert "an earlier call on this process group failed" in again


def test_a_collective_that_fails():
    for text in run_ranks(by_streams, 2, a_collective_fails, timeout=60):
        assert text.startswith("matmul_all_reduce: group 0: the process group failed: the wire is cut")


@pytest.mark.parametrize("op", Op)
def test_plans_follow_from_what_all_ranks_know(op):
    texts = {
        plan_on_streams(op, 4096 + m, 5120 + n, 512 + k, *HALF, maps=True, tiles_at_once=132).shared_text()
        for m, n, k in own_sizes(op)
    }
    assert len(texts) == 1


def own_sizes(op):
    """Differences between ranks in the dimensions in which they may differ."""
    shared = shared_dims(op, m=1, n=1, k=1)
    return [tuple(0 if same else step for same in shared) for step in (0, 1, 1000)]


HALF = ("bfloat16", (0,) * 8)


def test_plans_without_one_given():
    big = {"maps": True, "tiles_at_once": 132}
    gathered = plan_on_streams(Op.ALL_GATHER, 8192, 6144, 12288, *HALF, **big)
    assert gathered.transport is Transport.WINDOWS
    assert not gathered.sequential
    assert "ms predicted" in gathered.reason
    scattered = plan_on_streams(Op.REDUCE_SCATTER, 8192, 12288, 6144, *HALF, **big)
    assert (scattered.transport, scattered.tile_m) == (Transport.WINDOWS, 128)
    apart = plan_on_streams(Op.REDUCE_SCATTER, 8192, 12288, 6144, *HALF, maps=False, tiles_at_once=132)
    assert (apart.transport, apart.axis) == (Transport.MESSAGES, Axis.COLS)
    assert 2 <= len(apart.groups) <= 96
    assert apart.predicted is not None
    odd = plan_on_streams(Op.REDUCE_SCATTER, 8 * 97, 12288, 6144, *HALF, **big)
    assert (odd.transport, odd.tile_m) == (Transport.WINDOWS, 128)
    assert len(plan_on_streams(Op.ALL_TO_ALL, 5, 12288, 6144, *HALF, **big).groups) >= 2
    small = plan_on_streams(Op.ALL_REDUCE, 8, 4096, 512, *HALF, **big)
    assert small.sequential
    assert "nothing to overlap; 1 units of whole waves of 132 tiles" in small.reason


@pytest.mark.parametrize(
    ("case", "maps", "message"),
    [
        (Case(Op.ALL_GATHER, 8, 8, 8, transport=Transport.WINDOWS), False, "use transport=messages"),
        (Case(Op.ALL_TO_ALL, 8, 8, 8), True, "got axis=rows, use axis=cols"),
        (Case(Op.REDUCE_SCATTER, 8, 8, 8), True, "use axis=cols"),
    ],
)
def test_plans_that_streams_cannot_follow(case, maps, message):
    with pytest.raises(ValueError, match=message):
        check_plan(case.plan(2), maps=maps)
