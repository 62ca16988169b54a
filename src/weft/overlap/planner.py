"""Chooses plans for a group, the same on all ranks."""

from __future__ import annotations

import threading
from dataclasses import replace

from weft.comm import Group
from weft.overlap.choose import choose_plan, choose_sequential
from weft.overlap.curves import Curves
from weft.overlap.plan import Op, OverlapPlan, shared_dims
from weft.overlap.probe import measure_curves

_MOST_FITTED = 1024  # all-to-all has another number of rows in every call


class Planner:
    """The plans of one group: given by a tuner, or predicted by rank 0 when first asked for.

    Plans are kept by the dimensions that all ranks share, so that either all ranks find one or none does, and then
    rank 0 tells the others: two ranks cannot choose differently. Where a thread plans while another one calls, a rank
    may hear of a plan a moment before another; then rank 0's counts (see `agreement.py`).
    """

    def __init__(self, group: Group, *, why: str = "") -> None:
        """`why` is told with every plan: what there is to say about the group."""
        self._group, self._why = group, why
        self._lock = threading.Lock()
        self._plans: dict[tuple[object, ...], OverlapPlan] = {}
        self._fitted: dict[tuple[object, ...], OverlapPlan] = {}  # making and checking a plan takes 30 us
        self._curves: Curves | None = None
        self.overlaps = True  # or every plan is the best sequential one; to be set on all ranks, before the first call

    def known(self, op: Op, m: int, n: int, k: int, dtype: str) -> OverlapPlan | None:
        """The plan for these shapes, if there is one."""
        fitted = self._fitted.get((op, m, n, k, dtype))
        if fitted is None:
            with self._lock:
                found = self._plans.get(self._key(op, m, n, k, dtype))
                if found is None:
                    return None
                if len(self._fitted) >= _MOST_FITTED:
                    self._fitted.clear()
                fitted = self._fitted[op, m, n, k, dtype] = found.fit(m=m, n=n, k=k)
        return fitted

    def make(self, op: Op, m: int, n: int, k: int, dtype: str, *, group: Group | None = None) -> OverlapPlan:
        """A predicted plan. Collective: rank 0 chooses, and tells it through `group`. The first one measures curves."""
        group = group or self._group
        curves, mine = self.curves(group), ""
        if group.rank == 0:
            choose = choose_plan if self.overlaps else choose_sequential
            chosen = choose(op, m, n, k, dtype=dtype, hosts=group.hosts, curves=curves)
            mine = str(replace(chosen, reason=f"{chosen.reason}; {self._why}") if self._why else chosen)
        told = OverlapPlan.parse(group.tell("a plan", mine)[0])
        self.use(told)
        return told.fit(m=m, n=n, k=k)

    def use(self, plan: OverlapPlan) -> None:
        """Takes a plan from elsewhere, such as a tuner's file; on all ranks alike."""
        with self._lock:
            self._plans[self._key(plan.op, plan.m, plan.n, plan.k, plan.dtype)] = plan
            self._fitted.clear()

    def settle(self, plan: str, op: Op, m: int, n: int, k: int, dtype: str) -> None:
        """Takes what rank 0 follows for these shapes: a plan's text, or "" where it has none yet."""
        if plan:
            self.use(OverlapPlan.parse(plan))
            return
        with self._lock:
            self._plans.pop(self._key(op, m, n, k, dtype), None)
            self._fitted.clear()

    @property
    def known_curves(self) -> Curves | None:
        """The group's curves, if they have been measured."""
        return self._curves

    def curves(self, group: Group | None = None) -> Curves:
        """The group's curves: those that rank 0 has, or they are measured now, through `group`. Collective."""
        group = group or self._group
        mine = self._curves.to_json() if group.rank == 0 and self._curves is not None else ""
        told = group.tell("the group's curves", mine)[0]
        curves = Curves.from_json(told) if told else measure_curves(group)
        self._curves = curves
        return curves

    def _key(self, op: Op, m: int, n: int, k: int, dtype: str) -> tuple[object, ...]:
        return op, dtype, shared_dims(op, m=m, n=n, k=k)
