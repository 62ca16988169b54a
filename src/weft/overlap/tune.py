"""Measures the best few predicted plans against each other on a group, and keeps the fastest, the same on all ranks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.overlap import tuned
from weft.overlap.choose import ranked_plans
from weft.overlap.context import context_of
from weft.overlap.functional import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.probe import share_texts
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
    context = context_of(group)
    base = OverlapPlan(shape.op, shape.m, shape.n, shape.k, shape.dtype, context.hosts)
    context.group.agree("tune", str(base))
    # From curves that all ranks share, so that all have the same candidates.
    ranked = ranked_plans(base, context.planner.curves())
    plans = [p for p in ranked if not p.sequential][:candidates] + [p for p in ranked if p.sequential]
    call = _call(shape, group)
    times: dict[int, list[float]] = {i: [] for i in range(len(plans))}
    for round_number in range(rounds + 1):
        for i, plan in enumerate(plans):
            context.group.barrier("tune")
            start = time.perf_counter()
            call(plan)
            if round_number:  # the first one makes buffers and tables
                times[i].append(time.perf_counter() - start)
    mine = json.dumps([statistics.median(times[i]) for i in range(len(plans))])
    slowest = [max(of_ranks) for of_ranks in zip(*map(json.loads, share_texts(context.group, mine)), strict=True)]
    best = min(range(len(plans)), key=slowest.__getitem__)
    sequential = slowest[-1]
    why = f"measured {slowest[best] * 1e3:.3g} ms, {sequential * 1e3:.3g} ms sequentially, of {len(plans)} plans"
    found = Tuned(replace(plans[best], reason=why), slowest[best], sequential)
    context.planner.use(found.plan)
    return found


def _call(shape: Shape, group: ProcessGroup) -> Callable[[OverlapPlan], Tensor]:
    dtype = getattr(torch, shape.dtype)
    rows = shape.m
    if shape.op is Op.ALL_GATHER:
        bounds = OverlapPlan(shape.op, shape.m, 1, 1, shape.dtype, tuple(range(group.size()))).shard_bounds
        rows = bounds[group.rank() + 1] - bounds[group.rank()]
    own = torch.Generator()  # the caller's random numbers stay as they are
    x = torch.randn(rows, shape.k, generator=own).to(dtype)
    w = pack(torch.randn(shape.n, shape.k, generator=own).to(dtype))
    if shape.op is Op.ALL_GATHER:
        return lambda plan: all_gather_matmul(x, w, group=group, m=shape.m, plan=plan)
    if shape.op is Op.REDUCE_SCATTER:
        return lambda plan: matmul_reduce_scatter(x, w, group=group, plan=plan)
    if shape.op is Op.ALL_REDUCE:
        return lambda plan: matmul_all_reduce(x, w, group=group, plan=plan)
    if shape.op is Op.ALL_TO_ALL:
        to = torch.arange(shape.m) * group.size() // max(1, shape.m)
        return lambda plan: matmul_all_to_all(x, w, to, group=group, plan=plan)
    raise ValueError(f"op is {shape.op.value}, expected one of the four ops; its backward is tuned with it")


def use_tuned(path: str | Path, *, group: ProcessGroup) -> list[str]:
    """Makes later calls on the group follow the plans in a file, where it has some for it. Collective.

    Rank 0 reads the file and tells the others. Returns what there is to say: which plans are used, what is wrong.
    The curves are measured too, for plans of other shapes, and for traces to judge calls by.
    """
    context = context_of(group)
    context.group.barrier("tuned plans")
    context.planner.curves()
    found, notes = tuned.load(path) if context.rank == 0 else ([], [])
    mine = json.dumps([[str(t.plan) for t in found], notes])
    texts, notes = json.loads(share_texts(context.group, mine)[0])
    plans = [OverlapPlan.parse(text) for text in texts]
    fitting = [plan for plan in plans if plan.hosts == context.hosts]
    for plan in fitting:
        context.planner.use(plan)
    return [*notes, f"{len(fitting)} of {len(plans)} plans are for hosts {context.hosts}"]
