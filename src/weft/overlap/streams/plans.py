"""The plans of devices with streams: what the search is told of such a device, and which plans its executor can follow.

No such device was measured yet, so their speeds are declared: those of an A100 (docs/scale.md has the sources).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from weft.overlap.blocks import Axis, chunk_bounds
from weft.overlap.plan import Op, OverlapPlan, Transport, shared_dims
from weft.overlap.search import decide, partition, predict_sequential
from weft.overlap.speeds import Curve, Curves, Work, work_in_waves

_MOST_UNITS = 96  # the search is quadratic
_NOMINAL = 4096  # stands for a size in which ranks may differ
_HALF_FLOPS, _SINGLE_FLOPS = 2.5e12, 0.15e12  # flops a second of one multiprocessor
_HOST_RATE, _CARD_RATE = 2.4e11, 2.5e10  # bytes a second to the other devices of a host, and through a network card
_WINDOW_LATENCY, _COLLECTIVE_LATENCY, _LAUNCH = 4e-6, 2e-5, 1.3e-6
_ADD_BYTES = 1.8e12
_HELD = 0.22  # of the multiprocessors, by a collective that is under way


@lru_cache(maxsize=1024)
def plan_on_streams(
    op: Op, m: int, n: int, k: int, dtype: str, hosts: tuple[int, ...], *, maps: bool, tiles_at_once: int
) -> OverlapPlan:
    """The plan of a call that is given none. `maps` says that ranks map each other's memory.

    All ranks must come to the same, so sizes in which they may differ (see `shared_dims`) count as a nominal one.

    >>> plan = plan_on_streams(Op.ALL_REDUCE, 8192, 8192, 512, "bfloat16", (0, 0), maps=True, tiles_at_once=132)
    >>> plan.sequential, plan.reason.split(":")[0]
    (False, '12 groups of rows')
    """
    tile = 64 if dtype == "float32" else 128
    plan = OverlapPlan(op, m, n, k, dtype, hosts, Transport.MESSAGES, Axis.ROWS, tile, tile)
    if op is Op.GATHER_BACK:
        return replace(plan, reason="rows come back before they are multiplied")
    if op is Op.REDUCE_SCATTER and maps:
        return replace(plan, transport=Transport.WINDOWS, groups=(1,), reason="every tile travels alone")
    if op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL):
        plan = replace(plan, axis=Axis.COLS)
    elif op is Op.ALL_GATHER and maps:
        plan = replace(plan, transport=Transport.WINDOWS)
    work, curves = _work(plan, tiles_at_once), _curves(plan)
    found = []
    if work.units > 1:
        seconds, groups = partition(work, curves)
        found.append((seconds, replace(plan, groups=groups)))
    chosen = decide(found, (predict_sequential(work, curves), plan))[0]
    waves = f"{work.units} units of whole waves of {tiles_at_once} tiles"
    return replace(chosen, reason=f"{chosen.reason}; {waves}, declared speeds")


def _work(plan: OverlapPlan, tiles_at_once: int) -> Work:
    """A unit is a row or column of tiles that can be sent, or a wave of them if that is more."""
    known = shared_dims(plan.op, m=plan.m, n=plan.n, k=plan.k)
    own = shared_dims(plan.op, m=1, n=1, k=1)
    m, n, k = (size if shared else _NOMINAL for size, shared in zip(known, own, strict=True))
    rows, cols, ranks = -(-m // plan.tile_m), -(-n // plan.tile_n), plan.size
    if not rows * cols:
        return Work((), ())
    shard = -(-chunk_bounds(m, ranks)[1] // plan.tile_m)
    units = shard if plan.op.gathers else cols if plan.axis is Axis.COLS else rows
    flops = _SINGLE_FLOPS if plan.dtype == "float32" else _HALF_FLOPS
    travels = m * (k if plan.op.gathers else n) * (4 if plan.dtype == "float32" else 2)
    return work_in_waves(
        plan.op, ranks=ranks, tiles=rows * cols, at_once=tiles_at_once, units=min(units, _MOST_UNITS),
        seconds=-(-rows * cols // tiles_at_once) * 2.0 * plan.tile_m * plan.tile_n * k / flops,
        nbytes=travels * (ranks - 1) / ranks * (2 if plan.op is Op.ALL_REDUCE else 1),
    )  # fmt: skip


def _curves(plan: OverlapPlan) -> Curves:
    windows = plan.transport is Transport.WINDOWS
    rate = _HOST_RATE if len(set(plan.hosts)) == 1 else _CARD_RATE
    steps = plan.size - 1 if plan.op.gathers else 1  # a chunk is a message to each of the others
    wire = Curve.of_link(bytes_per_second=rate, latency=_WINDOW_LATENCY if windows else _COLLECTIVE_LATENCY)
    flops = _SINGLE_FLOPS if plan.dtype == "float32" else _HALF_FLOPS
    held = 0.0 if windows else _HELD
    return Curves(
        wire, flops, _ADD_BYTES, cpu_per_byte=held / rate, call_overhead=_LAUNCH, cpu_per_message=steps * _LAUNCH,
        held=held,
    )  # fmt: skip


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
    return plan
