"""A plan's work as the predictor sees it: units of computing, and the bytes that a host's card must carry for each."""

from __future__ import annotations

from itertools import pairwise

from weft.overlap.curves import Curves
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.predict import Work
from weft.overlap.tiles import Axis, cut_points, rows_by_destination
from weft.overlap.topology import Topology

MAX_UNITS = 48
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Each pass over the packed weight fetches it once, which costs about as much as computing this many more rows.
_PASS_ROWS = 1.5


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype that weft computes in."""
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype is {dtype}, expected one of {', '.join(_ITEM_BYTES)}; convert the tensors first")
    return _ITEM_BYTES[dtype]


def work_of(plan: OverlapPlan, curves: Curves) -> Work:
    """The work of the busiest host's ranks; the sizes of the plan's groups do not matter here."""
    return _gathering(plan, curves) if plan.op.gathers else _scattering(plan, curves)


def row_seconds(plan: OverlapPlan, curves: Curves) -> float:
    """Seconds of one row of the product."""
    return 2.0 * plan.n * plan.k / curves.flops * (1 + _PASS_ROWS / plan.tile_m)


def _sending(plan: OverlapPlan, devices: int) -> int:
    """How many ranks of a host send the same rows: one for all where they add up, or hold, them together."""
    together = plan.transport is Transport.WINDOWS and plan.op is not Op.ALL_TO_ALL
    return 1 if together else devices


def _scattering(plan: OverlapPlan, curves: Curves) -> Work:
    hosts = Topology(plan.hosts)
    devices = max(len(hosts.ranks_of(h)) for h in range(hosts.count))
    local = len(hosts.ranks_of(0))
    crossing = 2 * (hosts.count - 1) / hosts.count if hosts.count > 2 else hosts.count - 1
    item = item_bytes(plan.dtype) * _sending(plan, devices)
    tiling, bounds = plan.tiling, plan.shard_bounds
    seconds, nbytes = [], []
    if plan.axis is Axis.COLS:
        remote = plan.m * crossing if plan.op is Op.ALL_REDUCE else plan.m - bounds[local]
        for start, end in pairwise(cut_points(tiling.cols, [1] * min(tiling.cols, MAX_UNITS))):
            cols = min(end * tiling.tile_n, plan.n) - start * tiling.tile_n
            seconds.append(row_seconds(plan, curves) * plan.m * cols / plan.n)
            nbytes.append(remote * cols * item)
    else:
        order = rows_by_destination(tiling, bounds, hosts.destinations(0) if plan.op is not Op.ALL_REDUCE else
                                    range(plan.size))  # fmt: skip
        for start, end in pairwise(cut_points(len(order), [1] * min(len(order), MAX_UNITS))):
            rows = [(r * tiling.tile_m, min((r + 1) * tiling.tile_m, plan.m)) for r in order[start:end]]
            remote = sum((b - a) * crossing if plan.op is Op.ALL_REDUCE else b - max(a, bounds[local])
                         for a, b in rows if plan.op is Op.ALL_REDUCE or b > bounds[local])  # fmt: skip
            seconds.append(row_seconds(plan, curves) * sum(b - a for a, b in rows))
            nbytes.append(remote * plan.n * item)
    own = plan.m if plan.op is Op.ALL_REDUCE else bounds[1]
    finish = own * plan.n * item_bytes(plan.dtype) * max(1, min(plan.size, hosts.count)) / curves.add_bytes
    messages = sum(1 for b in nbytes if b)
    return Work(tuple(seconds), tuple(nbytes), after=finish, last=finish / max(1, messages))


def _gathering(plan: OverlapPlan, curves: Curves) -> Work:
    hosts = Topology(plan.hosts)
    local = len(hosts.ranks_of(0))
    remote_ranks = plan.size - local
    shard = plan.shard_bounds[1]
    readers = hosts.count - 1 if plan.transport is Transport.WINDOWS else remote_ranks
    copies = local * (readers if plan.op is Op.ALL_GATHER else remote_ranks)
    row = row_seconds(plan, curves)
    item = item_bytes(plan.dtype)
    units = min(-(-shard // plan.tile_m), MAX_UNITS)
    seconds, nbytes = [], []
    for start, end in pairwise(cut_points(shard, [1] * units) if units else (0,)):
        seconds.append(row * (end - start) * remote_ranks)
        nbytes.append((end - start) * plan.k * item * copies)
    return Work(tuple(seconds), tuple(nbytes), before=row * shard * local, backwards=True)
