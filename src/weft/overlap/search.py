"""How large are the groups of a matmul? From work and speeds to a plan. Pure: no group, no device, no environment.

The one place where that is chosen. Whoever plans says what the work is (units, their seconds, their bytes) and gives
curves: `partition` finds the group sizes, and `decide` whether they are worth it, and says why. So do the CPU's ops
(`choose_plan`), devices with streams (`overlap/streams/plans.py`), and GPUs on paper (`scale/ops.py`).

`choose_plan` tries a few tilings and axes. For each, a recurrence proposes group sizes; simulations of the programs of
all ranks then decide, and the best plan is improved step by step.

*The recurrence* is FlashOverlap's, solved exactly. The work is a row of *units* in the order of computing; unit t takes
seconds to compute and then bytes to send. A group is a run of units that is sent at once, when its last unit is
computed and the group before it is out:

    out = max(computed, out) + wire(bytes of the group)

where `computed` also counts the CPU that the messages of earlier groups have taken. `out` after a prefix of units grows
with `out` after any shorter prefix, so the best way to cut a prefix is made of best ways to cut shorter ones: a dynamic
program over all O(T^2) groups finds the optimum that the paper's pruned search only approaches. For an input that
travels time runs backwards: the last chunk to arrive takes the place of the first group to leave.

*The simulation* sees all hosts' cards and both steps of a sum, and costs a thousand times as much. So it judges a few
dozen plans: the best proposals, then the neighbours of the best one (a border moved, two groups merged, a group halved)
as long as one of them is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise

from weft.overlap.blocks import Axis, Topology, cut_points
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.short import is_short, short_seconds
from weft.overlap.simulate import simulate
from weft.overlap.speeds import Curves, Work, work_of

# A plan must promise this much over the sequential one: less is within the error of prediction.
WORTH = 0.985
_TILE_N = 512
# Simulations for one plan; each takes a few milliseconds for 4 ranks, and grows with their number.
_TRIES = 64
_FEW_UNITS = 5
_EVEN = (1, 2, 4, 8, 16)
_BETTER = 0.999
# Units to try where each message holds a part of the device: the recurrence cannot count messages.
_COARSER = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
_HANDOVERS = 4  # of an overlapped call: to the thread that sends, its word that all are here, arrivals, and the end


def choose_plan(
    op: Op | str,
    m: int,
    n: int,
    k: int,
    *,
    dtype: str,
    hosts: Sequence[int],
    curves: Curves,
) -> OverlapPlan:
    """The predicted best plan for [m, k] x [n, k]^T on each of the ranks that `hosts` lists.

    m counts all rows (for all-to-all, those of one rank); n and k are what one rank computes with.

    >>> from weft.overlap.speeds import Curve
    >>> curves = Curves(Curve.of_link(bytes_per_second=1e8, latency=2e-4), 8e10, 1e10, 2e-10, 1e-4)
    >>> plan = choose_plan("matmul_reduce_scatter", 2048, 3072, 768, dtype="float32", hosts=(0, 1), curves=curves)
    >>> plan.sequential
    False
    """
    base = OverlapPlan(Op(op), m, n, k, dtype, tuple(hosts), tile_n=min(_TILE_N, _round_up(n, 32)))
    return ranked_plans(base, curves)[0]


def choose_sequential(
    op: Op | str, m: int, n: int, k: int, *, dtype: str, hosts: Sequence[int], curves: Curves
) -> OverlapPlan:
    """The predicted best plan that computes first and communicates then, or the other way round."""
    base = OverlapPlan(Op(op), m, n, k, dtype, tuple(hosts), tile_n=min(_TILE_N, _round_up(n, 32)))
    return next(replace(p, reason="overlap is off") for p in ranked_plans(base, curves) if p.sequential)


def ranked_plans(base: OverlapPlan, curves: Curves) -> list[OverlapPlan]:
    """Candidates from the best predicted one on, each with its reason; the sequential plan is always among them.

    The recurrence proposes, simulations decide: `predicted` is what a simulation says.
    """
    if Topology(base.hosts).count == 1 and base.transport is Transport.WINDOWS:
        return _without_wire(base, predict_plan(replace(base, groups=()), curves).sequential)
    shapes = list(_shapes(base))
    seconds, sequential = min(
        ((simulated_seconds(plan, curves), plan) for plan in (replace(s, groups=()) for s in (base, *shapes))),
        key=lambda pair: pair[0],
    )
    found = refine(_proposals(shapes, curves), curves)
    return decide(found, (seconds, sequential), uncertainty=curves.uncertainty)


def decide(
    found: Sequence[tuple[float, OverlapPlan]], sequential: tuple[float, OverlapPlan], *, uncertainty: float = 0.0
) -> list[OverlapPlan]:
    """Plans with their predicted seconds and reasons, from the one to follow on; the sequential one is among them.

    A plan must gain more than the error of prediction, and more than `uncertainty`, the spread of what was measured.
    """
    seconds, plain = sequential
    ranked = []
    for predicted, plan in sorted(found, key=lambda pair: pair[0]):
        took = f"{predicted * 1e3:.3g} ms predicted, {seconds * 1e3:.3g} ms sequentially"
        ranked.append(replace(plan, predicted=predicted, reason=f"{_groups_text(plan)}: {took}"))
    why_not = "there is nothing to overlap"
    if ranked:
        best = ranked[0].predicted or 0.0
        why_not = f"overlap would take {best * 1e3:.3g} ms, {seconds * 1e3:.3g} ms without"
        if best < WORTH * seconds:  # or it would not have been chosen anyway
            why_not += f": a gain of {1 - best / seconds:.0%}, and measurements lay {uncertainty:.0%} apart"
    worth = [p for p in ranked if (p.predicted or 0.0) < min(WORTH, 1 - uncertainty) * seconds]
    return [*worth, replace(plain, predicted=seconds, reason=why_not), *(p for p in ranked if p not in worth)]


def _groups_text(plan: OverlapPlan) -> str:
    count, kind = len(plan.groups), "chunks" if plan.op.gathers else "groups"
    return f"one {kind[:-1]} of {plan.axis.value}" if count == 1 else f"{count} {kind} of {plan.axis.value}"


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


def _without_wire(base: OverlapPlan, seconds: float) -> list[OverlapPlan]:
    """Ranks of one host read each other's memory in place: whole blocks, nothing to balance against a wire."""
    if base.size == 1:
        return [replace(base, groups=(), predicted=seconds, reason="there is only one rank")]
    shared = replace(base, groups=(1,), predicted=seconds, reason="the ranks share memory: rows are read in place")
    after = replace(base, groups=(), predicted=seconds, reason="after the matmul, through shared memory")
    if is_short(after):
        return [replace(after, reason="short: the ranks meet once, and each adds up what all have computed"), shared]
    return [shared, after]


def _proposals(shapes: Sequence[OverlapPlan], curves: Curves) -> list[tuple[OverlapPlan, int]]:
    """The recurrence's best partition of each shape and its number of units, the best predicted one first."""
    found = []
    for shape in shapes:
        work = work_of(shape, curves)
        # A single chunk that is received still hides behind the rows that are there.
        if work.units and any(work.nbytes) and (work.units > 1 or shape.op.gathers):
            seconds, groups = partition(work, curves)
            found.append((seconds, replace(shape, groups=groups), work.units))
    found.sort(key=lambda proposal: proposal[0])
    return [(plan, units) for _, plan, units in found]


@dataclass(frozen=True)
class Prediction:
    """Seconds of a plan's matmul alone, of all its bytes as one message, sequentially, overlapped, and the bound."""

    matmul: float
    wire: float
    sequential: float
    overlapped: float
    bound: float


def predict_plan(plan: OverlapPlan, curves: Curves) -> Prediction:
    """What simulations say of a plan, and of the same plan without overlap."""
    work = work_of(plan, curves)
    sequential = simulated_seconds(replace(plan, groups=()), curves)
    overlapped = sequential if plan.sequential else simulated_seconds(plan, curves)
    return Prediction(work.compute, curves.wire(sum(work.nbytes)), sequential, overlapped, bound(work, curves))


# Simulations decide ---------------------------------------------------------------------------------------


def simulated_seconds(plan: OverlapPlan, curves: Curves) -> float:
    """What a simulation says of a plan, with what a call costs besides; overlap takes more threads."""
    if is_short(plan):
        return short_seconds(plan, curves)
    overhead = curves.call_overhead + (0.0 if plan.sequential else _HANDOVERS * curves.handover)
    return overhead + simulate(plan, curves).seconds


def refine(proposals: Sequence[tuple[OverlapPlan, int]], curves: Curves) -> list[tuple[float, OverlapPlan]]:
    """Plans with their seconds, the best first. A proposal comes with the number of its units, best proposals first."""
    if not proposals:
        return []
    tries = max(8, _TRIES * 4 // max(4, proposals[0][0].size))
    judged: dict[OverlapPlan, float] = {}

    def judge(plan: OverlapPlan) -> float:
        if plan not in judged:
            judged[plan] = simulated_seconds(plan, curves)
        return judged[plan]

    for plan in _openings(proposals):
        if len(judged) >= tries * 2 // 3:
            break
        judge(plan)
    best = min(judged, key=judged.__getitem__)
    units = next(units for plan, units in proposals if _same_shape(plan, best))
    improved = True
    while improved and len(judged) < tries:
        improved = False
        for groups in neighbours(best.groups, units):
            other = replace(best, groups=groups)
            if len(judged) < tries and judge(other) < _BETTER * judged[best]:
                best, improved = other, True
                break
    return sorted(((seconds, plan) for plan, seconds in judged.items()), key=lambda pair: pair[0])


def _same_shape(a: OverlapPlan, b: OverlapPlan) -> bool:
    return (a.axis, a.tile_m, a.tile_n) == (b.axis, b.tile_m, b.tile_n)


def _openings(proposals: Sequence[tuple[OverlapPlan, int]]) -> Iterator[OverlapPlan]:
    """The proposals themselves; then all ways to cut few units, or some even ones."""
    yield from (plan for plan, _ in proposals)
    for plan, units in proposals:
        if units <= _FEW_UNITS:
            yield from (replace(plan, groups=groups) for groups in partitions(units))
        else:
            lopsided = ((units - 1, 1), (1, units - 1), (1, units - 2, 1))
            evenly = (scaled(count, units) for count in _EVEN if count <= units)
            yield from (replace(plan, groups=groups) for groups in (*lopsided, *evenly))


def scaled(count: int, units: int) -> tuple[int, ...]:
    """`units` in `count` groups, as even as can be.

    >>> scaled(3, 8)
    (3, 3, 2)
    """
    return tuple(units // count + (i < units % count) for i in range(count))


def neighbours(groups: tuple[int, ...], units: int) -> Iterator[tuple[int, ...]]:
    """Partitions one step away: two groups merged, a group halved, or a border moved, coarsely and by one unit.

    >>> list(neighbours((1, 3), 4))
    [(4,), (1, 2, 1), (2, 2)]
    """
    if sum(groups) != units:  # relative sizes: nothing to step by
        return
    for i in range(len(groups) - 1):
        yield (*groups[:i], groups[i] + groups[i + 1], *groups[i + 2 :])
    for i, size in enumerate(groups):
        if size > 1:
            yield (*groups[:i], size - size // 2, size // 2, *groups[i + 1 :])
    for i in range(len(groups) - 1):
        left, right = groups[i], groups[i + 1]
        steps = dict.fromkeys((right // 2, 1, -(left // 2), -1))
        for step in steps:
            if step and left + step > 0 and right - step > 0:
                yield (*groups[:i], left + step, right - step, *groups[i + 2 :])


# The recurrence -------------------------------------------------------------------------------------------


def partition(work: Work, curves: Curves) -> tuple[float, tuple[int, ...]]:
    """The fewest predicted seconds, and the group sizes, in units, that take them.

    Exact, but for what messages hold from their start to their end (`Curves.held`), since that grows with their number:
    it is judged afterwards, for partitions of finer and of coarser units.
    """
    found = []
    for units in (work.units, *(few for few in _COARSER if curves.held and few < work.units)):
        cuts = cut_points(work.units, [1] * units)
        ends = [cuts[unit] for unit in (0, *accumulate(best_groups(_merged(work, cuts), curves)))]
        groups = tuple(b - a for a, b in pairwise(ends))
        found.append((predict(work, groups, curves), groups))
    return min(found)


def _merged(work: Work, cuts: Sequence[int]) -> Work:
    seconds = tuple(sum(work.seconds[a:b]) for a, b in pairwise(cuts))
    return replace(work, seconds=seconds, nbytes=tuple(sum(work.nbytes[a:b]) for a, b in pairwise(cuts)))


def best_groups(work: Work, curves: Curves) -> tuple[int, ...]:
    """The group sizes with the earliest end, exactly; O(T^2).

    A prefix is best when its last message is out earliest. Only the whole is judged by its end, which also counts the
    CPU that all messages but the last have taken.
    """
    prefix = _Prefix(work, curves)
    best = [0.0] + [float("inf")] * work.units
    came_from = [0] * (work.units + 1)
    for end in range(1, work.units + 1):
        for start in range(end):
            out = prefix.sent(best[start], start, end)
            if end == work.units:
                out = prefix.total(out, start)
            if out < best[end]:
                best[end], came_from[end] = out, start
    sizes = []
    end = work.units
    while end:
        sizes.append(end - came_from[end])
        end = came_from[end]
    return tuple(sizes) if work.backwards else tuple(sizes[::-1])


def predict(work: Work, groups: Sequence[int], curves: Curves) -> float:
    """Seconds with these group sizes, which add up to the number of units."""
    if sum(groups) != work.units or any(size < 1 for size in groups):
        raise ValueError(f"groups are {tuple(groups)}, expected sizes of at least 1 that add up to {work.units}")
    prefix = _Prefix(work, curves)
    out, ends = 0.0, list(accumulate(groups[::-1] if work.backwards else groups))
    sizes = []
    for start, end in pairwise([0, *ends]):
        out = prefix.sent(out, start, end)
        sizes.append(prefix.nbytes[end] - prefix.nbytes[start])
    during = sizes if work.backwards else sizes[:-1]  # the last group goes when all is computed
    held = sum(curves.held * curves.wire(size) - curves.cpu_per_byte * size for size in during) if curves.held else 0.0
    return prefix.total(out, ends[-2] if len(ends) > 1 else 0, held=held)


def predict_sequential(work: Work, curves: Curves) -> float:
    """Everything computed, then everything sent; or the other way round."""
    return curves.call_overhead + work.compute + curves.wire(sum(work.nbytes)) + curves.cpu_per_message + work.after


def bound(work: Work, curves: Curves) -> float:
    """No plan is faster: all computing, or all bytes as one message; and what cannot be hidden of either."""
    return max(work.compute, curves.wire(sum(work.nbytes)))


class _Prefix:
    """Sums over prefixes of the units, from the end when time runs backwards."""

    def __init__(self, work: Work, curves: Curves) -> None:
        seconds, nbytes = work.seconds, work.nbytes
        if work.backwards:
            seconds, nbytes = seconds[::-1], nbytes[::-1]
        self.work, self.curves = work, curves
        self.seconds = [0.0, *accumulate(seconds)]
        self.nbytes = [0.0, *accumulate(nbytes)]
        # Computing that comes before any message goes to the far end when time runs backwards.
        self.head = 0.0 if work.backwards else work.before

    def computed(self, start: int, end: int) -> float:
        """When units up to `end` are computed, if messages of units up to `start` took their CPU meanwhile."""
        return self.head + self.seconds[end] + self.curves.cpu_per_byte * self.nbytes[start]

    def sent(self, out: float, start: int, end: int) -> float:
        """When the group [start, end) is out, if the one before it was at `out`."""
        nbytes = self.nbytes[end] - self.nbytes[start]
        if not nbytes:
            return out
        return max(self.computed(start, end), out) + self.curves.wire(nbytes) + self.curves.cpu_per_message

    def total(self, out: float, last: int, *, held: float = 0.0) -> float:
        """The end, when the last message is through at `out` and its group starts at `last`.

        `held` is what messages cost beyond what was counted for their bytes.
        """
        work, all_units = self.work, self.work.units
        computed = work.compute + self.curves.cpu_per_byte * self.nbytes[last if not work.backwards else all_units]
        return self.curves.call_overhead + max(computed + work.after + held, out + work.last)


def partitions(units: int) -> Iterator[tuple[int, ...]]:
    """All 2^(units - 1) ways to cut `units` into groups.

    >>> list(partitions(3))
    [(3,), (1, 2), (2, 1), (1, 1, 1)]
    """
    for cuts in range(units):
        for points in combinations(range(1, units), cuts):
            yield tuple(b - a for a, b in pairwise((0, *points, units)))
