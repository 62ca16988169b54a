"""Measures the best few predicted plans against each other on a group, and keeps the fastest, the same on all ranks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from weft.comm import Group
from weft.overlap import calls, tuned
from weft.overlap.choose import ranked_plans
from weft.overlap.context import Context, context_of
from weft.overlap.executors import executor_for
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.planning import Planning
from weft.overlap.tiles import chunk_bounds
from weft.overlap.tuned import Tuned
from weft.overlap.weights import pack


@dataclass(frozen=True)
class Shape:
    """What to tune: an op, and the matmul [m, k] x [n, k]^T of one rank, as `plan_overlap` takes them."""

    op: Op
    m: int
    n: int
    k: int
    dtype: str = "float32"


def tune(shape: Shape, *, group: ProcessGroup, candidates: int = 4, rounds: int = 7) -> Tuned:
    """The fastest of the best predicted plans and the sequential one. Collective; later calls on the group use it."""
    base = OverlapPlan(shape.op, shape.m, shape.n, shape.k, shape.dtype, context_of(group).hosts)
    with Planning.on(group, f"tune {base}") as planning:
        # From curves that all ranks share, so that all have the same candidates.
        ranked = ranked_plans(base, planning.planner.curves(planning.wire))
        plans = [p for p in ranked if not p.sequential][:candidates] + [p for p in ranked if p.sequential]
        slowest = _measure(_call(shape, planning.context), plans, planning.wire, rounds)
        best = min(range(len(plans)), key=slowest.__getitem__)
        sequential = slowest[-1]
        why = f"measured {slowest[best] * 1e3:.3g} ms, {sequential * 1e3:.3g} ms sequentially, of {len(plans)} plans"
        found = Tuned(replace(plans[best], reason=why), slowest[best], sequential)
        planning.planner.use(found.plan)
        return found


def _measure(call: Callable[[OverlapPlan], object], plans: list[OverlapPlan], wire: Group, rounds: int) -> list[float]:
    """The median seconds of each plan on the slowest rank; plans take turns."""
    times: dict[int, list[float]] = {i: [] for i in range(len(plans))}
    for round_number in range(rounds + 1):
        for i, plan in enumerate(plans):
            wire.barrier("tune")
            start = time.perf_counter()
            call(plan)
            if round_number:  # the first one makes buffers and tables
                times[i].append(time.perf_counter() - start)
    mine = json.dumps([statistics.median(times[i]) for i in range(len(plans))])
    told = wire.tell("times of plans", mine)
    return [max(of_ranks) for of_ranks in zip(*map(json.loads, told), strict=True)]


def _call(shape: Shape, context: Context) -> Callable[[OverlapPlan], object]:
    """A call of this shape by a plan, in a context of the tuner's: the calls of other threads do not meet it."""
    if shape.op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL):
        raise ValueError(f"op is {shape.op.value}, expected one of the four ops; its backward is tuned with it")
    dtype = getattr(torch, shape.dtype)
    rows = shape.m
    if shape.op is Op.ALL_GATHER:
        bounds = chunk_bounds(shape.m, context.size)
        rows = bounds[context.rank + 1] - bounds[context.rank]
    own = torch.Generator()  # the caller's random numbers stay as they are
    x = torch.randn(rows, shape.k, generator=own).to(dtype)
    w = pack(torch.randn(shape.n, shape.k, generator=own).to(dtype))
    if context.size == 1:
        return lambda plan: calls.alone(x, w, None)
    run = executor_for(x)
    if shape.op is Op.ALL_GATHER:
        return lambda plan: run.gather_matmul(context, x, w, m=shape.m, bias=None, plan=str(plan), keep=False)
    if shape.op is Op.ALL_TO_ALL:
        to = torch.arange(shape.m) * context.size // max(1, shape.m)
        return lambda plan: run.matmul_scatter_rows(context, x, w, to, bias=None, plan=str(plan))
    return lambda plan: run.matmul_scatter(context, shape.op, x, w, bias=None, plan=str(plan))


def use_tuned(path: str | Path, *, group: ProcessGroup) -> list[str]:
    """Makes later calls on the group follow the plans in a file, where it has some for it. Collective.

    Rank 0 reads the file and tells the others. Returns what there is to say: which plans are used, what is wrong.
    The curves are measured too, for plans of other shapes, and for traces to judge calls by.
    """
    with Planning.on(group, "tuned plans") as planning:
        context, wire = planning.context, planning.wire
        planning.planner.curves(wire)
        found, notes = tuned.load(path) if context.rank == 0 else ([], [])
        mine = json.dumps([[str(t.plan) for t in found], notes])
        texts, notes = json.loads(wire.tell("tuned plans", mine)[0])
        plans = [OverlapPlan.parse(text) for text in texts]
        fitting = [plan for plan in plans if plan.hosts == context.hosts]
        for plan in fitting:
            planning.planner.use(plan)
        return [*notes, f"{len(fitting)} of {len(plans)} plans are for hosts {context.hosts}"]
