"""From shapes and curves to a plan. Pure: no group, no device, no environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.overlap.curves import Curves
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.predict import best_groups, bound, predict, predict_sequential
from weft.overlap.simulate import simulate
from weft.overlap.tiles import Axis, cut_points
from weft.overlap.topology import Topology
from weft.overlap.work import work_of

# A plan must promise this much over the sequential one: less is within the error of prediction.
_WORTH = 0.98
_TILE_N = 512
_EVEN_GROUPS = (2, 4, 8, 16)


def plan_overlap(
    op: Op | str,
    m: int,
    n: int,
    k: int,
    *,
    dtype: str,
    hosts: Sequence[int],
    curves: Curves,
    transport: Transport = Transport.WINDOWS,
) -> OverlapPlan:
    """The predicted best plan for [m, k] x [n, k]^T on each of the ranks that `hosts` lists.

    m counts all rows (for all-to-all, those of one rank); n and k are what one rank computes with.

    >>> from weft.overlap.curves import Curve
    >>> curves = Curves(Curve.of_link(bytes_per_second=1e8, latency=2e-4), 8e10, 1e10, 2e-10, 1e-4)
    >>> plan = plan_overlap("matmul_reduce_scatter", 2048, 3072, 768, dtype="float32", hosts=(0, 1), curves=curves)
    >>> plan.sequential
    False
    """
    base = OverlapPlan(Op(op), m, n, k, dtype, tuple(hosts), transport, tile_n=min(_TILE_N, _round_up(n, 32)))
    return ranked_plans(base, curves)[0]


@dataclass(frozen=True)
class Prediction:
    """Seconds of a plan's matmul alone, of all its bytes as one message, sequentially, overlapped, and the bound."""

    matmul: float
    wire: float
    sequential: float
    overlapped: float
    bound: float


def predict_plan(plan: OverlapPlan, curves: Curves) -> Prediction:
    """What the recurrence says of a plan."""
    work = work_of(plan, curves)
    if _in_two_steps(plan):
        sequential = simulate(replace(plan, groups=()), curves).seconds
        overlapped = simulate(plan, curves).seconds
    else:
        overlapped = sequential = predict_sequential(work, curves)
        if not plan.sequential and work.units:
            overlapped = predict(work, scaled_groups(plan.groups, work.units), curves)
    return Prediction(work.compute, curves.wire(sum(work.nbytes)), sequential, overlapped, bound(work, curves))


def _in_two_steps(plan: OverlapPlan) -> bool:
    """Whether what arrives is sent on, which the recurrence knows nothing of: an all-reduce of more than two hosts."""
    return plan.op is Op.ALL_REDUCE and plan.topology.count > 2


def scaled_groups(groups: Sequence[int], units: int) -> tuple[int, ...]:
    """Relative sizes as sizes that add up to `units`."""
    return tuple(b - a for a, b in pairwise(cut_points(units, groups)))


def ranked_plans(base: OverlapPlan, curves: Curves) -> list[OverlapPlan]:
    """Candidates from the best predicted one on, each with its reason; the sequential plan is always among them."""
    sequential = replace(base, groups=())
    seconds = predict_plan(sequential, curves).sequential
    if Topology(base.hosts).count == 1 and base.transport is Transport.WINDOWS:
        return _without_wire(base, seconds)
    found = []
    for candidate in _shapes(base):
        for groups in _groupings(candidate, curves):
            plan = replace(candidate, groups=groups)
            predicted = predict_plan(plan, curves).overlapped
            why = f"{predicted * 1e3:.3g} ms predicted, {seconds * 1e3:.3g} ms sequentially"
            found.append(replace(plan, predicted=predicted, reason=why))
    found.sort(key=lambda p: p.predicted or 0.0)
    why_not = "there is nothing to overlap" if not found else (
        f"overlap would take {(found[0].predicted or 0.0) * 1e3:.3g} ms, {seconds * 1e3:.3g} ms without"
    )  # fmt: skip
    sequential = replace(sequential, predicted=seconds, reason=why_not)
    worth = [p for p in found if (p.predicted or 0.0) < _WORTH * seconds]
    return [*worth, sequential, *(p for p in found if p not in worth)]


def _groupings(plan: OverlapPlan, curves: Curves) -> list[tuple[int, ...]]:
    """The best partition; or, where the recurrence does not hold, some even ones to choose from."""
    work = work_of(plan, curves)
    if work.units < 2 or not any(work.nbytes):
        return []
    if _in_two_steps(plan):
        return [(1,) * groups for groups in _EVEN_GROUPS if groups <= work.units]
    return [best_groups(work, curves)]


def _without_wire(base: OverlapPlan, seconds: float) -> list[OverlapPlan]:
    """Ranks of one host read each other's memory in place: whole blocks, nothing to balance against a wire."""
    if base.size == 1:
        return [replace(base, groups=(), predicted=seconds, reason="there is only one rank")]
    shared = replace(base, groups=(1,), predicted=seconds, reason="the ranks share memory: rows are read in place")
    return [shared, replace(base, groups=(), predicted=seconds, reason="after the matmul, through shared memory")]


def _shapes(base: OverlapPlan) -> Iterator[OverlapPlan]:
    """Tiles and axes to try: rows where there are enough, columns where there are few."""
    shard = base.shard_bounds[1]
    for tile_m in (24, 48, 96):
        if tile_m <= max(shard, 24):
            yield replace(base, axis=Axis.ROWS, tile_m=tile_m)
    if not base.op.gathers and base.m <= 1024:
        for tile_n in (128, 256):
            if base.n > tile_n:
                yield replace(base, axis=Axis.COLS, tile_m=min(base.m, 144) or 1, tile_n=tile_n)


def _round_up(n: int, multiple: int) -> int:
    return max(multiple, -(-n // multiple) * multiple)
