"""Plans for devices that compute many tiles at once; none is measured yet, so they follow from sizes alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.tiles import Axis, chunk_bounds

_MOST_GROUPS = {True: 4, False: 8}  # of an input's shard; of an output
_WAVES = 2  # of tiles, at least, in a group: a smaller one ends before its communication has begun
_CHUNK_TILES = 8  # rows or columns of tiles in a group, where ranks know only that much of each other's sizes
_LEAST_TILE_M = 16


@lru_cache(maxsize=1024)
def default_plan(
    op: Op, m: int, n: int, k: int, dtype: str, hosts: tuple[int, ...], *, maps: bool, tiles_at_once: int
) -> OverlapPlan:
    """The plan of a call that is given none. `maps` says that ranks map each other's memory.

    All ranks must come to the same, so it follows from nothing in which they may differ (see `shared_dims`).

    >>> print(default_plan(Op.ALL_REDUCE, 8192, 8192, 512, "bfloat16", (0, 0), maps=True, tiles_at_once=132))
    matmul_all_reduce m=8192 n=8192 k=512 dtype=bfloat16 hosts=0,0 transport=messages axis=rows tile=128x128 \
groups=1,1,1,1,1,1,1,1
    """
    tile = 64 if dtype == "float32" else 128
    plan = OverlapPlan(op, m, n, k, dtype, hosts, Transport.MESSAGES, Axis.ROWS, tile, tile)
    if op is Op.GATHER_BACK:
        return replace(plan, reason="rows come back before they are multiplied")
    if op is Op.REDUCE_SCATTER and maps and (tile_m := tile_that_divides(m, len(hosts), tile)):
        return replace(plan, transport=Transport.WINDOWS, tile_m=tile_m, groups=(1,), reason="every tile travels alone")
    if op is Op.ALL_GATHER:
        plan = replace(plan, transport=Transport.WINDOWS if maps else Transport.MESSAGES)
        if m < 2 * tile:
            return replace(plan, reason=f"{m} rows are fewer than two tiles of {tile}")
        shard = -(-chunk_bounds(m, len(hosts))[1] // tile)
        return replace(plan, groups=(1,) * max(1, min(shard // _CHUNK_TILES, _MOST_GROUPS[True])))
    unit, rows, cols = _WAVES * tiles_at_once, -(-m // tile), -(-n // tile)
    if op is Op.ALL_TO_ALL:
        plan, groups, few = replace(plan, axis=Axis.COLS), cols // _CHUNK_TILES, f"{cols} columns of tiles are few"
    else:
        if op is Op.REDUCE_SCATTER:
            plan = replace(plan, axis=Axis.COLS)
        groups = min(rows * cols // unit, cols if plan.axis is Axis.COLS else rows)
        few = f"{rows * cols} tiles are fewer than two groups of {unit}, or all in one row or column"
    groups = min(groups, _MOST_GROUPS[False])
    if groups < 2:
        return replace(plan, reason=few)
    return replace(plan, groups=(1,) * groups)


def tile_that_divides(m: int, ranks: int, most: int) -> int:
    """The largest tile_m up to `most` that divides a shard's rows, so that no tile has two owners; 0 if too small.

    >>> tile_that_divides(8192, 8, 128), tile_that_divides(6144, 8, 128), tile_that_divides(2 * 97, 2, 64)
    (128, 128, 0)
    """
    rows = chunk_bounds(m, ranks)[1]
    found = next((size for size in range(min(most, rows), 0, -1) if rows % size == 0), 0)
    return found if found >= min(_LEAST_TILE_M, rows) else 0


def check_plan(plan: OverlapPlan, *, maps: bool) -> OverlapPlan:
    """A plan that a caller gave; an error says what these devices cannot do."""
    if plan.transport is Transport.WINDOWS and not maps:
        raise ValueError(
            "the plan wants transport=windows, but the ranks of this group do not map each other's memory; "
            "use transport=messages"
        )
    columns = plan.op is Op.ALL_TO_ALL or (plan.op is Op.REDUCE_SCATTER and plan.transport is Transport.MESSAGES)
    if columns and plan.axis is not Axis.COLS:
        raise ValueError(
            f"{plan.op.value} by collectives of a process group is cut along columns, so that each group has a part "
            f"for every rank; got axis={plan.axis.value}, use axis=cols"
        )
    if plan.op is Op.REDUCE_SCATTER and not columns:
        rows = plan.shard_bounds[1]
        if rows % plan.tile_m:
            raise ValueError(
                f"tiles of {plan.tile_m} rows lie across the shards of {rows} rows that two ranks own; "
                f"use a tile_m that divides {rows}, or transport=messages axis=cols"
            )
    return plan


def waited_for(plan: OverlapPlan, number: int) -> str:
    """What a kernel waited for when it gave up on counter `number`.

    >>> plan = OverlapPlan(Op.ALL_GATHER, 64, 32, 8, "float32", (0, 0), tile_m=48)
    >>> waited_for(plan, 0)
    'all_gather_matmul: rows 0 to 48 of x, from rank 0 and 1'
    """
    if plan.op.gathers:
        start, end = number * plan.tile_m, min((number + 1) * plan.tile_m, plan.m)
        bounds = plan.shard_bounds
        ranks = [str(r) for r in range(plan.size) if bounds[r] < end and start < bounds[r + 1]]
        return f"{plan.op.value}: rows {start} to {end} of x, from rank {' and '.join(ranks)}"
    if plan.op is Op.REDUCE_SCATTER and plan.transport is Transport.WINDOWS:
        return f"{plan.op.value}: the part of rank {number}"
    return f"{plan.op.value}: group {number} of this rank's own tiles"
