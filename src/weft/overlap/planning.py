"""`plan_overlap`: the plan for a matmul, on a group that exists or on a cluster that is only declared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import ProcessGroup

from weft.cluster import Cluster
from weft.comm.deadline import Deadline, timeout_of
from weft.comm.tags import Line, turn
from weft.overlap.choose import choose_plan
from weft.overlap.context import context_of
from weft.overlap.curves import Curves
from weft.overlap.plan import Op, OverlapPlan


def plan_overlap(
    op: Op | str,
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype | str = torch.float32,
    group: ProcessGroup | None = None,
    cluster: Cluster | None = None,
    devices: int = 1,
    flops: float | None = None,
) -> OverlapPlan:
    """The best plan for [m, k] x [n, k]^T on each rank: of a `group`, or of `devices` ranks a host of a `cluster`.

    m counts all rows (for all-to-all, those of one rank); n and k are what one rank computes with.

    With `group`, all ranks call it: they get the plan that a call of this shape follows, tuned or predicted from
    measured curves. With `cluster` nothing runs and nobody is asked: the prediction is from the declared rates of the
    cards and `flops`, the flops a second of one rank's matmul.

    >>> plan = plan_overlap("matmul_reduce_scatter", 2048, 3072, 768, cluster=Cluster.uniform(2, gbps=1.0), flops=8e10)
    >>> plan.sequential, plan.hosts
    (False, (0, 1))
    """
    name = str(dtype).removeprefix("torch.")
    if (group is None) == (cluster is None):
        raise ValueError(f"got group={group} and cluster={cluster}, expected one of them: who will compute?")
    if group is not None:
        return _of_group(Op(op), m, n, k, name, group)
    assert cluster is not None
    if devices < 1 or flops is None or not flops > 0:
        raise ValueError(
            f"got devices={devices} and flops={flops}, expected devices of each host, at least 1, and flops a second "
            "of one rank's matmul, such as flops=8e10; `weft bench gemm` measures it"
        )
    hosts = tuple(host for host in range(cluster.hosts) for _ in range(devices))
    return choose_plan(op, m, n, k, dtype=name, hosts=hosts, curves=Curves.of_cluster(cluster, flops=flops))


class Planning:
    """Planning on a group, beside the calls that other threads make: a context of its own, and messages of its own.

    The plans are those of the group's calls.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.planner = context_of(group).planner
        self.context = context_of(group, Line.PLANNING)
        self.wire = self.context.group

    @classmethod
    @contextmanager
    def on(cls, group: ProcessGroup, what: str) -> Iterator[Planning]:
        """Collective: all ranks are here with the same `what`. Threads of a rank plan one after the other."""
        with turn(group, "planning", Deadline.after(timeout_of(group))):
            planning = cls(group)
            planning.wire.agree("planning", what)
            yield planning


def _of_group(op: Op, m: int, n: int, k: int, dtype: str, group: ProcessGroup) -> OverlapPlan:
    blank = OverlapPlan(op, m, n, k, dtype, context_of(group).hosts)
    with Planning.on(group, f"plan_overlap {blank.shared_text()}") as planning:
        planner, wire = planning.planner, planning.wire
        # A call of another thread may just have made one, here and not yet elsewhere: rank 0's counts.
        known = planner.known(op, m, n, k, dtype)
        told = wire.tell("the plan that is known", str(known or ""))[0]
        if not told:
            return planner.make(op, m, n, k, dtype, group=wire)
        planner.use(OverlapPlan.parse(told))
        found = planner.known(op, m, n, k, dtype)
        assert found is not None
        return found


def curves_of(group: ProcessGroup) -> Curves:
    """The measured curves of a group, for `plan.simulate(curves)`. Collective; measured once.

    A trace judges calls by them: where every call is given its plan, nothing else measures them.
    """
    with Planning.on(group, "curves") as planning:
        return planning.planner.curves(planning.wire)
