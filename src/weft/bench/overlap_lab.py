"""One row of `weft bench overlap` on the ranks of its lab: every system in turns, other plans, and one traced call."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from weft import tracing
from weft.bench import noise
from weft.bench.harness import Case, Measurement, measure
from weft.bench.overlap_cases import OverlapCase
from weft.bench.overlap_systems import Call, Systems
from weft.bench.ranks import slowest
from weft.comm import Group
from weft.kernels import linear
from weft.lab import Cluster, Rank
from weft.overlap.choose import predict_plan, ranked_plans
from weft.overlap.context import Context, context_of
from weft.overlap.plan import OverlapPlan
from weft.overlap.predict import Work
from weft.overlap.weights import pack
from weft.overlap.work import work_of
from weft.timeline import Timeline

TIMEOUT = 300.0
_PROBE = (256, 1024, 1024)
_TRACED_CALLS = 5
_ALTERNATIVES = 3


@dataclass(frozen=True)
class Outcome:
    """What one row gave: times, the plan that weft followed, what was predicted, and one call as it was and should be.

    `alternatives` names the systems that are other plans of the same call; empty where none were measured.
    """

    measured: Measurement
    plan: OverlapPlan
    predicted: float
    bound: float
    alternatives: tuple[str, ...]
    timelines: tuple[Timeline, Timeline]


def flops_of_a_core() -> float:
    """Flops a second of one core when all cores compute: what the speed of the links is chosen by."""
    with Cluster(hosts=1, devices=min(2, os.cpu_count() or 1), gbps=None) as cluster:
        return min(cluster.run(_rank_flops))


def _rank_flops(rank: Rank) -> float:
    m, k, n = _PROBE
    x, w = torch.randn(m, k), pack(torch.randn(n, k))
    case = Case("flops", {"matmul": lambda: linear(x, w)})
    seconds = measure(case, meter=noise.Meter(root=os.getppid()), agree=slowest).median("matmul")
    return 2.0 * m * k * n / seconds


def measure_case(rank: Rank, case: OverlapCase, rounds: int) -> Outcome:
    """One row on one rank; the measurement that comes back has names, not functions."""
    systems = Systems(case, rank.group)
    context = context_of(rank.group)
    systems.weft(None)
    plan = context.planner.known(case.op, case.m, case.n, case.k, "float32")
    assert plan is not None
    sequential = replace(plan, groups=())
    calls: dict[str, Call] = {
        "matmul": systems.matmul,
        "wire": systems.wire(Group(rank.group, timeout=TIMEOUT)),
        "torch": systems.torch,
        f"decomposed {rank.world}": lambda: systems.decomposed(rank.world),
        f"decomposed {2 * rank.world}": lambda: systems.decomposed(2 * rank.world),
        "sequential": lambda: systems.weft(sequential),
        "weft": lambda: systems.weft(None),
    }
    others = _other_plans(context, plan) if case.compares_plans else []
    alternatives = {f"plan {i}": _following(systems, other) for i, other in enumerate(others)}
    labels = {
        "op": case.op.value, "hosts": case.hosts, "devices": case.devices, "share": case.share,
        "m": case.m, "k": case.k, "n": case.n,
    }  # fmt: skip
    meter = noise.Meter(root=os.getppid())
    with torch.no_grad():
        whole = Case(case.name, calls | alternatives, labels)
        measured = measure(whole, rounds=rounds, meter=meter, agree=slowest)
        happened = _traced(systems, rank)
    curves = context.planner.curves()
    bound = _bound(measured.median("matmul"), measured.median("wire"), work_of(plan, curves))
    named = replace(measured, case=replace(whole, systems=dict.fromkeys(whole.systems, _nothing)))
    timelines = (plan.simulate(curves), happened)
    return Outcome(named, plan, predict_plan(plan, curves).overlapped, bound, tuple(alternatives), timelines)


def _nothing() -> None:
    """Stands for a system whose function has stayed on its rank."""


def _following(systems: Systems, plan: OverlapPlan) -> Call:
    return lambda: systems.weft(plan)


def _other_plans(context: Context, chosen: OverlapPlan) -> list[OverlapPlan]:
    """What else could have been chosen: the next best predicted plans, and an even one. The same on all ranks."""
    even = replace(chosen, groups=(1,) * 4)
    ranked = [p for p in ranked_plans(chosen, context.planner.curves()) if not p.sequential]
    return [p for p in dict.fromkeys([even, *ranked]) if p != chosen][:_ALTERNATIVES]


def _traced(systems: Systems, rank: Rank) -> Timeline:
    """All ranks in one call, on one clock: of a few calls the one that took the median time."""
    traces = []
    for _ in range(_TRACED_CALLS):
        dist.barrier()
        with tracing.trace() as trace:
            systems.weft(None)
        traces.append((slowest(trace.calls[0].seconds), trace))
    traces.sort(key=lambda pair: pair[0])
    gathered = traces[len(traces) // 2][1].gather(group=rank.group)
    return Timeline(gathered.events, name="measured")


def _bound(matmul: float, wire: float, work: Work) -> float:
    """max(matmul, wire), plus the first or last unit of computing or of sending, whichever is cheaper to show."""
    sending = [nbytes for nbytes in work.nbytes if nbytes]
    if not sending or work.compute == 0:
        return max(matmul, wire)
    first_tile = matmul * min(work.seconds) / work.compute
    last_message = wire * min(sending) / sum(sending)
    hidden_by_own_rows = work.backwards or len(sending) < work.units
    return max(matmul, wire) + (0.0 if hidden_by_own_rows and matmul > wire else min(first_tile, last_message))
