"""Chooses plans for a group, the same on all ranks."""

from __future__ import annotations

from weft.comm import Group
from weft.overlap.choose import plan_overlap
from weft.overlap.curves import Curves
from weft.overlap.plan import Op, OverlapPlan, shared_dims
from weft.overlap.probe import measure_curves, share_texts


class Planner:
    """The plans of one group: given by a tuner, or predicted by rank 0 when first asked for.

    Plans are kept by the dimensions that all ranks share, so that either all ranks find one or none does, and then
    rank 0 tells the others: two ranks cannot choose differently.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._plans: dict[tuple[object, ...], OverlapPlan] = {}
        self._curves: Curves | None = None

    def known(self, op: Op, m: int, n: int, k: int, dtype: str) -> OverlapPlan | None:
        """The plan for these shapes, if there is one."""
        found = self._plans.get(self._key(op, m, n, k, dtype))
        return None if found is None else found.fit(m=m, n=n, k=k)

    def make(self, op: Op, m: int, n: int, k: int, dtype: str) -> OverlapPlan:
        """A predicted plan. Collective: rank 0 chooses. The first one measures the group's curves."""
        curves = self.curves()
        plan = plan_overlap(op, m, n, k, dtype=dtype, hosts=self._group.hosts, curves=curves)
        told = OverlapPlan.parse(share_texts(self._group, str(plan))[0])
        self._plans[self._key(op, m, n, k, dtype)] = told
        return told.fit(m=m, n=n, k=k)

    def use(self, plan: OverlapPlan) -> None:
        """Takes a plan from elsewhere, such as a tuner's file; on all ranks alike."""
        self._plans[self._key(plan.op, plan.m, plan.n, plan.k, plan.dtype)] = plan

    def curves(self) -> Curves:
        """The group's curves, measured on the first call, which is collective."""
        if self._curves is None:
            self._curves = measure_curves(self._group)
        return self._curves

    def _key(self, op: Op, m: int, n: int, k: int, dtype: str) -> tuple[object, ...]:
        return op, dtype, shared_dims(op, m=m, n=n, k=k)
