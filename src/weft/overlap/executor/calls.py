"""Who runs an overlapped matmul: the table of kernels says who computes, and whoever computes has one executor.

One function for each kind of call, on plain tensors and without gradients: what ops and backwards share.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from weft.errors import PeerMismatch
from weft.kernels import PackedWeight, Rows, linear
from weft.kernels.dispatch import NATIVE, TRITON, kernels_for
from weft.overlap.executor.call import call_text, row_major
from weft.overlap.executor.context import Context, OverlapCall, PlansDiffer, Statement
from weft.overlap.executor.incoming import IncomingCall
from weft.overlap.executor.outgoing import OutgoingCall
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.programs.outgoing import Counts
from weft.timeline import record

_MODULES = {NATIVE: "weft.overlap.executor.calls", TRITON: "weft.overlap.streams"}


class MatmulExecutor(Protocol):
    """One function for each kind of call, on plain tensors and without gradients; see `calls.py`."""

    def gather_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
    ) -> tuple[Tensor, Tensor]: ...

    def matmul_scatter(
        self,
        context: Context,
        op: Op,
        x: Tensor,
        weight: PackedWeight,
        *,
        bias: Tensor | None,
        plan: str = "",
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor: ...

    def matmul_scatter_rows(
        self, context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
    ) -> tuple[Tensor, Tensor]: ...

    def gather_rows_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, counts: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def executor_for(tensor: Tensor) -> MatmulExecutor:
    """The executor for the device and type of `tensor`."""
    return _load(kernels_for(tensor).name)


@cache
def _load(name: str) -> MatmulExecutor:
    return cast("MatmulExecutor", importlib.import_module(_MODULES[name]))


T = TypeVar("T")

_MOST_ATTEMPTS = 10  # each follows what rank 0 knew a moment ago: only a thread that plans without end gets so far
_MOST_ROWS = 1 << 31


@dataclass(frozen=True)
class Asked:
    """What the caller wants to be computed: the op, its shape, and a plan's text ("" for the group's own)."""

    op: Op
    m: int
    n: int
    k: int
    dtype: torch.dtype
    plan: str
    bias: bool

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[Op, int, int, int, str]:
        """What a planner is asked for."""
        return self.op, self.m, self.n, self.k, self.dtype_name


def resolve(context: Context, call: OverlapCall, asked: Asked) -> tuple[OverlapPlan, str]:
    """The plan to follow, and what all ranks must say alike. Collective when the group has no plan yet."""
    if asked.plan:
        plan = context.feasible(given_plan(context, asked))
        return plan, call_text(plan, bias=asked.bias)
    plan_or_none = context.planner.known(*asked.shape)
    call.question = partial(_question, asked, context.hosts)
    if plan_or_none is None:
        # A rank with a plan of its own is about to meet with another text, so nobody waits for it here.
        none = Statement(f"{call.question()} plan=none yet", call.question)
        call.begun = True
        context.agreement.meet(none, deadline=call.deadline)
        plan_or_none = context.planner.make(*asked.shape)
    call.plan = plan_or_none
    plan = context.feasible(plan_or_none)
    return plan, call_text(plan, bias=asked.bias)


def _question(asked: Asked, hosts: tuple[int, ...]) -> str:
    """What all ranks must want alike, whatever plan they follow."""
    return call_text(OverlapPlan(*asked.shape, hosts), bias=asked.bias)


def settled(context: Context, asked: Asked, run: Callable[[OverlapCall, OverlapPlan, str], T]) -> T:
    """`run` in a call of this rank, by a plan that all ranks follow.

    Ranks that know different plans of their group, because a thread plans beside the one that calls, begin again with
    rank 0's; no byte has moved by then.
    """
    for _ in range(_MOST_ATTEMPTS):
        try:
            with context.call() as call:
                return run(call, *resolve(context, call, asked))
        except PlansDiffer as different:
            context.planner.settle(different.plan, *asked.shape)
            last = different
    raise last


@lru_cache(maxsize=256)
def _parsed(text: str) -> OverlapPlan:
    return OverlapPlan.parse(text)


def check_plan(text: str, op: Op, dtype: torch.dtype, hosts: tuple[int, ...] | None = None) -> OverlapPlan:
    """The plan that the caller gave, once it is for this op, type and hosts (where those are known)."""
    plan, name = _parsed(text), str(dtype).removeprefix("torch.")
    if plan.op is not op or plan.dtype != name or hosts not in (None, plan.hosts):
        on = "" if hosts is None else f" on hosts {hosts}"
        raise ValueError(
            f"the plan is for {plan.op.value} in {plan.dtype} on hosts {plan.hosts}, expected {op.value} in "
            f"{name}{on}; plan_overlap makes one for this group"
        )
    return plan


def given_plan(context: Context, asked: Asked) -> OverlapPlan:
    """The plan that the caller gave, for this shape."""
    plan = check_plan(asked.plan, asked.op, asked.dtype, context.hosts)
    fits = (plan.m, plan.n, plan.k) == (asked.m, asked.n, asked.k)
    return plan if fits else plan.fit(m=asked.m, n=asked.n, k=asked.k)


def _empty(like: Tensor, rows: int, cols: int) -> Tensor:
    """On huge pages where that pays: the page faults of a large output take as long as a part of its matmul."""
    return kernels_for(like).empty(rows, cols, dtype=like.dtype, device=like.device)


def gather_matmul(
    context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """All-gather x [m_r, K], times weight [N, K] -> [m, N]; and the gathered x [m, K] if `keep`, else [0, K]."""
    y, gathered = _empty(x, m, weight.n), _empty(x, m if keep else 0, weight.k)
    x = row_major(x)

    def compute(call: OverlapCall, found: OverlapPlan, text: str) -> None:
        with IncomingCall(context, call, found, text, dtype=x.dtype) as run:
            run.prepare()
            run.run(x, weight, out=y, bias=bias, gathered=gathered if keep else None)

    settled(context, Asked(Op.ALL_GATHER, m, weight.n, weight.k, x.dtype, plan, bias is not None), compute)
    return y, gathered


def matmul_scatter(
    context: Context,
    op: Op,
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None,
    plan: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """x [M, K_r] times weight [N, K_r], summed over ranks: this rank's rows of it, or all (all-reduce)."""
    m = x.shape[0]
    x = row_major(x)

    def compute(call: OverlapCall, found: OverlapPlan, text: str) -> Tensor:
        with OutgoingCall(context, call, found, text, dtype=x.dtype) as run:
            y = _empty(x, run.prepare(), weight.n)
            run.run(x, weight, out=y, bias=bias, meanwhile=meanwhile)
        return y

    return settled(context, Asked(op, m, weight.n, weight.k, x.dtype, plan, bias is not None), compute)


def exchange_counts(context: Context, call: OverlapCall, destinations: Tensor) -> Counts:
    what = f"{Op.ALL_TO_ALL.value}: the number of rows"
    mine = torch.bincount(destinations, minlength=context.size)
    return checked_counts(context.agreement.gather(mine, deadline=call.deadline, what=what))


def checked_counts(rows: list[list[int]]) -> Counts:
    """How many rows each rank sends to each, once they are numbers of rows: memory is taken by them.

    >>> checked_counts([[1, 2], [0, 4]])
    ((1, 2), (0, 4))
    """
    for rank, row in enumerate(rows):
        if not all(0 <= count <= _MOST_ROWS for count in row):
            raise PeerMismatch(f"rank {rank} announces {row} rows for the ranks, expected 0 to {_MOST_ROWS} for each")
    return tuple(map(tuple, rows))


def matmul_scatter_rows(
    context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    """x [M, K] times weight [N, K], row i to rank destinations[i] -> [R, N]; and the counts int64 [P, P]."""
    x = row_major(x)

    def compute(call: OverlapCall, found: OverlapPlan, text: str) -> tuple[Tensor, Tensor]:
        with OutgoingCall(context, call, found, text, dtype=x.dtype) as run:
            run.meet()  # sizes are exchanged first, so there is nothing to do meanwhile
            counts = exchange_counts(context, call, destinations)
            y = _empty(x, run.prepare(counts), weight.n)
            rows: Tensor | Rows = x
            if x.shape[0]:
                rows = Rows.stack([x]).gather(torch.argsort(destinations, stable=True))
            run.run(rows, weight, out=y, bias=None, kernel_bias=bias)
        return y, torch.tensor(counts)

    asked = Asked(Op.ALL_TO_ALL, x.shape[0], weight.n, weight.k, x.dtype, plan, bias is not None)
    return settled(context, asked, compute)


def gather_rows_matmul(context: Context, x: Tensor, weight: PackedWeight, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The way back: x [R, K] returns to the ranks that its rows came from, times weight [N, K] -> [M, N].

    Both results, the product and the gathered x [M, K], are in the order of destinations.
    """
    table = tuple(map(tuple, counts.tolist()))
    m = sum(table[context.rank])
    y, gathered = _empty(x, m, weight.n), _empty(x, m, weight.k)
    x = row_major(x)

    def compute(call: OverlapCall, found: OverlapPlan, text: str) -> None:
        with IncomingCall(context, call, found, text, dtype=x.dtype) as run:
            run.prepare(table)
            run.run(x, weight, out=y, bias=None, gathered=gathered)

    settled(context, Asked(Op.GATHER_BACK, m, weight.n, weight.k, x.dtype, "", bias=False), compute)
    return y, gathered


def alone(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """The op of a group of one rank."""
    flops = 2.0 * x.shape[0] * weight.n * weight.k
    with torch.no_grad(), record.span("compute", "the matmul of a single rank", lane="compute", flops=flops):
        return linear(x.detach(), PackedWeight(weight.data, weight.n, weight.k, weight.isa), bias=bias)
