"""What the executor of GPUs launches: orders, budgets and block sizes, as numbers and as compiled kernels."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the GPU kernels need Triton")

import torch

from weft.kernels.triton.budget import HELPER, NCCL_BLOCK, NCCL_BLOCKS, WAITING, Footprint, gather_budget, most_programs
from weft.kernels.triton.compile import ARCHS, TARGETS, compile_variant, room, variants
from weft.kernels.triton.launch import banded
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.blocks import chunk_bounds
from weft.overlap.incoming import RowArrival
from weft.overlap.streams.collectives import _tables, owner_order
from weft.overlap.streams.gather import lower_gather
from weft.overlap.streams.plans import plan_on_streams

NAMED = {v.name: v for v in variants()}
HALF = ("bfloat16", (0,) * 8)
H100 = {"maps": True, "tiles_at_once": 132}


# A matmul that waits leaves room for what it waits for --------------------------------------------------------


def crowded(limits, multiprocessors, program, count, seed):
    """Blocks on multiprocessors as some hardware might put them: on any that has room, the fuller the likelier."""
    chance = random.Random(seed)
    most, one = limits.room, room(warps=program.warps, registers=program.registers, shared=program.shared)
    load, open_ = [0] * multiprocessors, list(range(multiprocessors))
    fits = min(m // o for m, o in zip(most, one, strict=True))
    for _ in range(count):
        sm = max(chance.sample(open_, min(3, len(open_))), key=load.__getitem__)
        load[sm] += 1
        if load[sm] == fits:
            open_.remove(sm)
    return [[m - k * o for m, o in zip(most, one, strict=True)] for k in load]


def helpers_that_fit(rooms, helper):
    one = room(warps=helper.warps, registers=helper.registers, shared=helper.shared)
    return sum(min(r // o for r, o in zip(left, one, strict=True)) for left in rooms)


@pytest.mark.parametrize("arch", ARCHS)
def test_helpers_fit_beside_the_most_programs_wherever_those_are(arch):
    chance, limits = random.Random(arch), ARCHS[arch]
    for seed in range(40):
        sms, helpers = chance.randint(2, 150), chance.randint(1, 40)
        program = Footprint(chance.choice([1, 4, 8, 16]), chance.randint(16, 128), chance.randrange(0, 90_000, 1000))
        helper = Footprint(chance.choice([1, 16, 20]), chance.choice([32, 96]), chance.choice([0, 40_000]))
        most = most_programs(limits, sms, program, helper, helpers)
        assert helpers_that_fit(crowded(limits, sms, program, most, seed), helper) >= min(helpers, sms) or most == 0


def test_a_full_wave_leaves_no_room():
    """What one program a tile did: nothing that brings rows could start, on any of these."""
    for dtype, helper in ((torch.bfloat16, HELPER), (torch.float32, HELPER), (torch.float32, NCCL_BLOCK)):
        program = WAITING[dtype]
        full = 132 * (1 if dtype == torch.bfloat16 else 2)
        assert helpers_that_fit(crowded(ARCHS["sm90"], 132, program, full, 0), helper) == 0
        budget = gather_budget("sm90", 132, dtype, messages=helper is NCCL_BLOCK)
        wanted = 1 + (NCCL_BLOCKS if helper is NCCL_BLOCK else 0)
        assert helpers_that_fit(crowded(ARCHS["sm90"], 132, program, budget.programs, 0), helper) >= wanted
        assert budget.programs >= (0.7 if helper is NCCL_BLOCK else 0.99) * 132


def test_gpus_that_are_not_listed_or_tiny():
    assert gather_budget("sm999", 100, torch.float32, messages=False).programs >= 99
    assert gather_budget("sm90", 8, torch.bfloat16, messages=True).programs == 1


@pytest.mark.parametrize("arch", TARGETS)
def test_the_budget_counts_with_no_less_than_what_is_compiled(arch):
    for name, variant in NAMED.items():
        if name.startswith("matmul gathered") and variant.is_default:
            taken = compile_variant(variant, arch).resources
            counted = WAITING[torch.float32 if " fp32 " in name else torch.bfloat16]
            assert taken.warps <= counted.warps, name
            assert taken.registers <= counted.registers, name
            assert taken.shared <= counted.shared, name


# Orders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(1,), (1, 1), (3, 1, 1), (1, 2, 5, 1)])
@pytest.mark.parametrize(("m", "size"), [(8192, 8), (2048, 8), (64, 8), (1000, 3), (5, 4), (37, 2)])
def test_rows_arrive_in_the_order_in_which_tiles_wait(m, size, groups):
    plan = OverlapPlan(Op.ALL_GATHER, m, 256, 64, "bfloat16", (0,) * size, Transport.WINDOWS, tile_m=48, tile_n=128)
    for rank in range(size):
        program = lower_gather(replace(plan, groups=groups), rank)
        waits = [program.steps[tile // 2] for tile in program.order]
        assert waits == sorted(waits)
        assert sorted(program.order) == list(range(program.incoming.tiling.count))
        came = [False] * m
        bounds = chunk_bounds(m, size)
        came[bounds[rank] : bounds[rank + 1]] = [True] * (bounds[rank + 1] - bounds[rank])
        step = 0
        for fetch in program.fetches:
            if fetch.expect is not None:
                step += 1
                came[fetch.expect.m0 : fetch.expect.m1] = [True] * (fetch.expect.m1 - fetch.expect.m0)
                rows = program.incoming.touched(RowArrival(rank, fetch.expect.m0, fetch.expect.m1))
                for row in (row for row in rows if program.steps[row] == step):
                    assert all(came[48 * row : 48 * (row + 1)])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_at_each_step_ranks_send_to_each_other(size):
    """Who sends a chunk and who expects it do so at the same place of their lists."""
    plan = OverlapPlan(Op.ALL_GATHER, 40 * size - 3, 64, 8, "float32", (0,) * size, tile_m=16, groups=(1, 2))
    programs = [lower_gather(plan, rank) for rank in range(size)]
    for rank, program in enumerate(programs):
        for fetch in program.fetches:
            if fetch.send is not None:
                step = fetch.number, fetch.away
                (there,) = (f for f in programs[fetch.send.peer].fetches if (f.number, f.away) == step)
                assert there.expect is not None
                assert there.expect.peer == rank


def read_by_a_wave(tiling, order, k, wave=132):
    """The bytes of x and w, in bfloat16, that the tiles of a wave read, in millions: on average and at most."""
    read = []
    for at in range(0, len(order), wave):
        rows = {tile // tiling.cols for tile in order[at : at + wave]}
        cols = {tile % tiling.cols for tile in order[at : at + wave]}
        read.append((len(rows) * tiling.tile_m + len(cols) * tiling.tile_n) * k * 2 / 1e6)
    return sum(read) / len(read), max(read)


def order_of_groups(plan):
    return _tables(plan, plan.tiling, plan.m, torch.zeros(1)).schedule.order.tolist()


def test_planned_orders_share_what_tiles_read():
    scatter = plan_on_streams(Op.REDUCE_SCATTER, 8192, 12288, 6144, *HALF, **H100)
    mean, most = read_by_a_wave(scatter.tiling, owner_order(scatter.tiling, scatter.shard_bounds, 3), 6144)
    assert (mean < 42, most < 50) == (True, True), (mean, most)  # row by row: 156
    reduce = plan_on_streams(Op.ALL_REDUCE, 8192, 12288, 6144, *HALF, **H100)
    assert len(reduce.groups) > 10
    mean, most = read_by_a_wave(reduce.tiling, order_of_groups(reduce), 6144)
    assert (mean < 85, most < 110) == (True, True), (mean, most)  # groups are of 2 or 3 rows of tiles
    fewer = replace(reduce, groups=(1, 1, 1, 1))
    mean, most = read_by_a_wave(fewer.tiling, order_of_groups(fewer), 6144)
    assert (mean < 42, most < 50) == (True, True), (mean, most)
    gather = plan_on_streams(Op.ALL_GATHER, 8192, 6144, 12288, *HALF, **H100)
    one = lower_gather(replace(gather, groups=(1,)), 0)
    mean, most = read_by_a_wave(one.incoming.tiling, one.order, 12288)
    assert (mean < 86, most < 100) == (True, True), (mean, most)  # row by row: 164


def test_bands_are_of_equal_heights():
    assert sorted(banded(range(13), range(5), 5)) == list(range(65))
    assert [tile // 5 for tile in banded(range(13), range(5), 5)[:6]] == [0, 1, 2, 3, 4, 5]
    assert banded([], range(5), 5) == []


def test_groups_are_computed_one_after_the_other():
    for axis_plan in (
        plan_on_streams(Op.ALL_REDUCE, 4096, 4096, 512, *HALF, **H100),
        plan_on_streams(Op.REDUCE_SCATTER, 4096, 4000, 512, *HALF, maps=False, tiles_at_once=132),
    ):
        tables = _tables(axis_plan, axis_plan.tiling, axis_plan.m, torch.zeros(1, dtype=torch.bfloat16))
        groups = tables.schedule.group_of[tables.schedule.order.long()].tolist()
        assert groups == sorted(groups)
        assert Counter(groups) == Counter(dict(enumerate(tables.sizes.tolist())))
        for block in tables.cut.blocks:  # where each tile is stored, against the definition of a block
            for tile in tables.cut.tiles(block):
                m0, _, n0, _ = axis_plan.tiling.box(tile)
                at = axis_plan.m * block.n0 + m0 * block.cols + n0 - block.n0
                assert tables.offsets[tile].item() == at * 2
                assert tables.strides[tile].item() == block.cols


def test_a_short_output_reads_the_weight_once():
    plan = plan_on_streams(Op.REDUCE_SCATTER, 64, 12288, 6144, *HALF, **H100)
    assert plan.transport is Transport.WINDOWS
    assert plan.tiling.rows == 1  # was 8
    assert owner_order(plan.tiling, plan.shard_bounds, 5) == list(range(plan.tiling.cols))


# Compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("use", ["places", "owners"])
def test_tiles_by_address_are_stored_16_bytes_at_a_time(use, arch):
    ptx = compile_variant(NAMED[f"matmul {use} bf16 128x128x64 w8 s3"], arch).ptx
    assert Counter(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32": 8}  # was 64 of b16


def test_short_outputs_have_the_instructions_of_others():
    for arch, pattern in (("sm80", r"mma\.sync\S*"), ("sm90", r"wgmma\.mma_async\S*")):
        short, other = (
            set(re.findall(pattern, compile_variant(NAMED[f"matmul {name}"], arch).ptx))
            for name in ("short plain bf16 64x128x64 w4 s3", "plain bf16 128x128x64 w8 s3")
        )
        assert short == other
        assert len(short) == 1
