"""Better than the recurrence: the plans that it proposes, simulated, and the best of them improved step by step.

The recurrence sees one host's card and knows no second step; a simulation runs the programs of all ranks. It also costs
a thousand times as much, so that it judges a few dozen plans: the best proposals, then the neighbours of the best one
(a border moved, two groups merged, a group halved) as long as one of them is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.overlap.curves import Curves
from weft.overlap.plan import OverlapPlan
from weft.overlap.predict import partitions
from weft.overlap.simulate import simulate

# Simulations for one plan; each takes a few milliseconds for 4 ranks, and grows with their number.
TRIES = 64
_FEW_UNITS = 4
_EVEN = (1, 2, 4, 8, 16)
_BETTER = 0.999


def simulated_seconds(plan: OverlapPlan, curves: Curves) -> float:
    """What a simulation says of a plan, with what a call costs besides; overlap takes a second thread."""
    overhead = curves.call_overhead + (0.0 if plan.sequential else curves.handover)
    return overhead + simulate(plan, curves).seconds


def refine(proposals: Sequence[tuple[OverlapPlan, int]], curves: Curves) -> list[tuple[float, OverlapPlan]]:
    """Plans with their seconds, the best first. A proposal comes with the number of its units, best proposals first."""
    if not proposals:
        return []
    tries = max(8, TRIES * 4 // max(4, proposals[0][0].size))
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
