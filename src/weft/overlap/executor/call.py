"""What calls of all kinds have in common: who runs one, what it asks for, by which plan, and its messages.

    request -> plan -> all ranks agree -> `MatmulCall`, of which `outgoing` and `incoming` have one kind each

A group's own plan is known to the planner, or made by all ranks when first asked for. Ranks compare what they are about
to do before a byte moves; where they only know different plans, all take rank 0's and begin again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
from torch import Tensor

from weft.comm import Transfer
from weft.comm.deadline import THREAD_END, listening
from weft.errors import PeerLost, PeerMismatch
from weft.kernels import PackedWeight, linear
from weft.kernels.dispatch import NATIVE, TRITON, kernels_for
from weft.overlap.blocks import Counts
from weft.overlap.executor.context import Context, OverlapCall, PlansDiffer, Statement
from weft.overlap.executor.resources import Need
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.search import predict_plan
from weft.overlap.speeds import Curves
from weft.timeline import Baseline, Kind, record

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = version("weft")
_MOST_ATTEMPTS = 10  # each follows what rank 0 knew a moment ago: only a thread that plans without end gets so far
_MOST_ROWS = 1 << 31

# Who runs the calls on tensors that an implementation of the kernels computes. Loaded when needed: streams take Triton.
_EXECUTORS = {NATIVE: "weft.overlap.executor", TRITON: "weft.overlap.streams"}


class MatmulExecutor(Protocol):
    """One function for each kind of call, on plain tensors and without gradients. `plan` is a text, or "" for none."""

    def gather_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """All-gather x [m_r, K], times weight [N, K] -> [m, N]; and the gathered x [m, K] if `keep`, else [0, K]."""
        ...

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
    ) -> Tensor:
        """x [M, K_r] times weight [N, K_r], summed over ranks: this rank's rows of it, or all (all-reduce).

        `meanwhile` is computed while the last blocks travel.
        """
        ...

    def matmul_scatter_rows(
        self, context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
    ) -> tuple[Tensor, Tensor]:
        """x [M, K] times weight [N, K], row i to rank destinations[i] -> [R, N]; and the counts int64 [P, P]."""
        ...

    def gather_rows_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The way back: x [R, K] returns to the ranks that its rows came from, times weight [N, K] -> [M, N].

        Both results, the product and the gathered x [M, K], are in the order of destinations.
        """
        ...


def executor_for(context: Context, x: Tensor) -> MatmulExecutor:
    """Who runs the calls on a group for the device and type of `x`."""
    return _ALONE if context.size == 1 else _load(kernels_for(x).name)


@cache
def _load(name: str) -> MatmulExecutor:
    return cast("MatmulExecutor", importlib.import_module(_EXECUTORS[name]))


class _Alone:
    """The executor of a group of one rank: nothing travels."""

    def gather_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
    ) -> tuple[Tensor, Tensor]:
        return self._multiply(Op.ALL_GATHER, x, weight, bias), x if keep else x.new_empty(0, weight.k)

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
    ) -> Tensor:
        y = self._multiply(op, x, weight, bias)
        if meanwhile is not None:
            meanwhile()
        return y

    def matmul_scatter_rows(
        self, context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
    ) -> tuple[Tensor, Tensor]:
        return self._multiply(Op.ALL_TO_ALL, x, weight, bias), torch.tensor([[x.shape[0]]])

    def gather_rows_matmul(
        self, context: Context, x: Tensor, weight: PackedWeight, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._multiply(Op.GATHER_BACK, x, weight, None), x

    def _multiply(self, op: Op, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """The product; a trace has it as a call, which says why nothing was overlapped."""
        recorder = record.current()
        if recorder is None:
            return multiply(x, weight, bias)
        m, n, k = x.shape[0], weight.n, weight.k
        dtype = str(x.dtype).removeprefix("torch.")
        traced = recorder.call(f"{op.value} {m} x {n} x {k} {dtype}", reason="not overlapped: there is only one rank")
        try:
            return _product(x, weight, bias)
        finally:
            name, start = "the matmul of a single rank", traced.started
            traced.add("compute", name, lane="compute", start=start, end=record.now(), flops=2.0 * m * n * k)
            traced.end()


_ALONE = _Alone()


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [M, K] times weight [N, K] + bias on this rank alone."""
    flops = 2.0 * x.shape[0] * weight.n * weight.k
    with record.span("compute", "the matmul of a single rank", lane="compute", flops=flops):
        return _product(x, weight, bias)


@torch.no_grad()
def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    return linear(x.detach(), PackedWeight(weight.data, weight.n, weight.k, weight.isa), bias=bias)


# Requests and plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What the caller wants to be computed: the op, its shape, and a plan's text ("" for the group's own)."""

    op: Op
    m: int
    n: int
    k: int
    dtype: torch.dtype
    plan: str
    bias: bool

    @property
    def shape(self) -> tuple[Op, int, int, int, str]:
        """What a planner is asked for."""
        return self.op, self.m, self.n, self.k, str(self.dtype).removeprefix("torch.")

    def given_plan(self, hosts: tuple[int, ...]) -> OverlapPlan:
        """The plan that the caller gave, for this shape."""
        plan = parse_plan(self.plan, self.op, self.dtype, hosts)
        fits = (plan.m, plan.n, plan.k) == (self.m, self.n, self.k)
        return plan if fits else plan.fit(m=self.m, n=self.n, k=self.k)

    def question(self, hosts: tuple[int, ...]) -> str:
        """What all ranks must want alike, whatever plan they follow."""
        return call_text(OverlapPlan(*self.shape, hosts), bias=self.bias)


def parse_plan(text: str, op: Op, dtype: torch.dtype, hosts: tuple[int, ...] | None = None) -> OverlapPlan:
    """The plan that the caller gave, once it is for this op, type and hosts (where those are known)."""
    plan, name = _parsed(text), str(dtype).removeprefix("torch.")
    if plan.op is not op or plan.dtype != name or hosts not in (None, plan.hosts):
        on = "" if hosts is None else f" on hosts {hosts}"
        raise ValueError(
            f"the plan is for {plan.op.value} in {plan.dtype} on hosts {plan.hosts}, expected {op.value} in "
            f"{name}{on}; plan_overlap makes one for this group"
        )
    return plan


@lru_cache(maxsize=256)
def _parsed(text: str) -> OverlapPlan:
    return OverlapPlan.parse(text)


@lru_cache(maxsize=4096)
def call_text(plan: OverlapPlan, *, bias: bool) -> str:
    """What all ranks must say alike before a byte moves."""
    return f"{plan.shared_text()} bias={bias} weft={_VERSION}"


CallT = TypeVar("CallT", bound="MatmulCall")
T = TypeVar("T")


def run_call(context: Context, request: Request, kind: type[CallT], compute: Callable[[CallT], T]) -> T:
    """What `compute` gives in a call of this rank, by a plan that all ranks follow.

    Ranks that know different plans of their group, because a thread plans beside the one that calls, begin again with
    rank 0's; no byte has moved by then.
    """
    for _ in range(_MOST_ATTEMPTS):
        try:
            with context.call() as call, kind(context, call, _resolve(context, call, request), request) as run:
                return compute(run)
        except PlansDiffer as different:
            context.planner.settle(different.plan, *request.shape)
            last = different
    raise last


def _resolve(context: Context, call: OverlapCall, request: Request) -> OverlapPlan:
    """The plan to follow. Collective when the group has no plan yet."""
    if request.plan:
        return context.feasible(request.given_plan(context.hosts))
    plan = context.planner.known(*request.shape)
    call.question = partial(request.question, context.hosts)
    if plan is None:
        # A rank with a plan of its own is about to meet with another text, so nobody waits for it here.
        none = Statement(f"{call.question()} plan=none yet", call.question)
        call.begun = True
        context.agreement.meet(none, deadline=call.deadline)
        plan = context.planner.make(*request.shape)
    call.plan = plan
    return context.feasible(plan)


class MatmulCall:
    """One call of one op on this rank, by a plan. The `with` block is what a trace times."""

    def __init__(self, context: Context, call: OverlapCall, plan: OverlapPlan, request: Request) -> None:
        self.context, self.call, self.plan, self.dtype = context, call, plan, request.dtype
        self.text = call_text(plan, bias=request.bias)
        self.op, self._is_given = plan.op.value, bool(request.plan)
        recorder = record.current()
        self.traced = None if recorder is None else self._begin(recorder)
        self._growths = call.bank.growths

    def _begin(self, recorder: record.Trace) -> record.CallTrace:
        plan, curves = self.plan, self.context.planner.known_curves
        what = f"{self.op} {plan.m} x {plan.n} x {plan.k} {plan.dtype}"
        why = plan.reason or ("as the given plan says" if self._is_given else "")
        reason = f"{'not overlapped' if plan.sequential else 'overlapped'}{why and ': '}{why}"
        if curves is None:  # all calls so far were given their plans: there is nothing to judge by
            return recorder.call(what, plan=str(plan), reason=reason)
        return recorder.call(
            what,
            plan=str(plan),
            reason=reason,
            baseline=lambda: baseline_of(plan, curves),
            predicted=lambda: plan.simulate(curves),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.traced is not None:
            self.traced.end(is_setup=self.call.bank.growths > self._growths)

    def reserve(self, need: Need) -> None:
        """Makes room in the call's bank; that is collective, so the ranks meet first."""
        if self.call.bank.lacks(need):
            self.context.meet(self.call, self.text)
            self.call.bank.grow(need)

    def left(self) -> float:
        """Seconds to the deadline, above 0: a wait that comes too late still looks once."""
        return max(self.call.deadline.left(), 1e-3)

    def patience(self) -> float:
        """Seconds within which a thread of this call must have ended, whatever happens."""
        return self.call.deadline.left() + THREAD_END.seconds

    def nbytes(self, elements: int) -> int:
        """How many bytes they take."""
        return elements * self.dtype.itemsize

    def listening(self, wait: Callable[[], None]) -> None:
        """Calls `wait`, which waits for messages, such that signals are heard."""
        listening(wait, on_interrupt=self.context.group.break_off)

    def send(self, data: Tensor, peer: int, number: int) -> Transfer:
        """Starts to send message `number` of the call; where the connection is gone already, the error names the op."""
        try:
            return self.context.group.send(data, peer, tag=self.context.line.data(number))
        except PeerLost as error:
            raise PeerLost(f"{self.op}: {error}") from error

    def recv(self, data: Tensor, peer: int, number: int) -> Transfer:
        """Starts to receive, in the same way."""
        try:
            return self.context.group.recv(data, peer, tag=self.context.line.data(number))
        except PeerLost as error:
            raise PeerLost(f"{self.op}: {error}") from error

    def record(
        self, kind: Kind, name: str, lane: str, start: float, *, nbytes: int | None = None, flops: float | None = None
    ) -> None:
        """Adds an event that ends now to the trace, if there is one."""
        if self.traced is not None:
            self.traced.add(kind, name, lane=lane, start=start, end=record.now(), bytes=nbytes, flops=flops)


def baseline_of(plan: OverlapPlan, curves: Curves) -> Baseline:
    """What a call is judged by: its matmul alone, its bytes alone, both in turn, and the bound; all predicted."""
    predicted = predict_plan(plan, curves)
    return Baseline(predicted.matmul, predicted.sequential, predicted.bound, predicted.wire)


# Inputs and outputs -----------------------------------------------------------------------------------------


def row_major(x: Tensor) -> Tensor:
    """`x` [M, K] with its elements end to end, copied only if they are not: what is sent is a run of rows."""
    return x.detach().contiguous()


def exchange_counts(context: Context, call: OverlapCall, destinations: Tensor) -> Counts:
    """How many rows each rank sends to each, when this one sends row i to rank destinations[i]. Collective."""
    what = f"{Op.ALL_TO_ALL.value}: the number of rows"
    mine = torch.bincount(destinations, minlength=context.size)
    return checked_counts(context.agreement.gather(mine, deadline=call.deadline, what=what))


def checked_counts(rows: list[list[int]]) -> Counts:
    """The counts, once they are numbers of rows: memory is taken by them.

    >>> checked_counts([[1, 2], [0, 4]])
    ((1, 2), (0, 4))
    """
    for rank, row in enumerate(rows):
        if not all(0 <= count <= _MOST_ROWS for count in row):
            raise PeerMismatch(f"rank {rank} announces {row} rows for the ranks, expected 0 to {_MOST_ROWS} for each")
    return tuple(map(tuple, rows))
