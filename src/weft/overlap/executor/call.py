"""What calls of both kinds have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import Transfer
from weft.comm.deadline import listening
from weft.errors import PeerLost
from weft.overlap.executor.context import Context, OverlapCall
from weft.overlap.plan import OverlapPlan
from weft.overlap.predict import Curves
from weft.overlap.search import predict_plan
from weft.timeline import Baseline, Kind, record

if TYPE_CHECKING:
    from typing_extensions import Self

# On top of the deadline, for the end of a thread whose every wait has that deadline.
_GRACE_SECONDS = 5.0
_VERSION = version("weft")


@lru_cache(maxsize=4096)
def call_text(plan: OverlapPlan, *, bias: bool) -> str:
    """What all ranks must say alike before a byte moves."""
    return f"{plan.shared_text()} bias={bias} weft={_VERSION}"


class Running:
    """One call of one op on this rank: its context, bank, plan and recorder. The `with` block is what a trace times."""

    def __init__(
        self, context: Context, call: OverlapCall, plan: OverlapPlan, text: str, *, dtype: torch.dtype
    ) -> None:
        self.context, self.call, self.plan, self.dtype, self.text = context, call, plan, dtype, text
        self.op = plan.op.value
        recorder = record.current()
        self.traced = None if recorder is None else self._begin(recorder)

    def _begin(self, recorder: record.Trace) -> record.CallTrace:
        plan, curves = self.plan, self.context.planner.known_curves
        what = f"{self.op} {plan.m} x {plan.n} x {plan.k} {plan.dtype}"
        if curves is None:  # all calls so far were given their plans: there is nothing to judge by
            return recorder.call(what, plan=str(plan))
        return recorder.call(
            what,
            plan=str(plan),
            baseline=lambda: baseline_of(plan, curves),
            predicted=lambda: plan.simulate(curves),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.traced is not None:
            self.traced.end()

    def left(self) -> float:
        """Seconds to the deadline, above 0: a wait that comes too late still looks once."""
        return max(self.call.deadline.left(), 1e-3)

    def patience(self) -> float:
        """Seconds within which a thread of this call must have ended, whatever happens."""
        return self.call.deadline.left() + _GRACE_SECONDS

    def listening(self, wait: Callable[[], None]) -> None:
        """Calls `wait`, which waits for messages, such that signals are heard."""
        listening(wait, on_interrupt=self.context.group.break_off)

    def record(
        self, kind: Kind, name: str, lane: str, start: float, *, nbytes: int | None = None, flops: float | None = None
    ) -> None:
        """Adds an event that ends now to the trace, if there is one."""
        if self.traced is not None:
            self.traced.add(kind, name, lane=lane, start=start, end=record.now(), bytes=nbytes, flops=flops)

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

    def post(self) -> None:
        """Tells all ranks what this one is about to do."""
        self.context.post(self.call, self.text)

    def meet(self) -> None:
        """Returns when all ranks are here with the same text."""
        self.context.meet(self.call, self.text)


def baseline_of(plan: OverlapPlan, curves: Curves) -> Baseline:
    """What a call is judged by: its matmul alone, its bytes alone, both in turn, and the bound; all predicted."""
    predicted = predict_plan(plan, curves)
    return Baseline(predicted.matmul, predicted.sequential, predicted.bound, predicted.wire)


def as_bytes(elements: int, dtype: torch.dtype) -> int:
    """How many bytes they take."""
    return elements * dtype.itemsize


def row_major(x: Tensor) -> Tensor:
    """`x` [M, K] with its elements end to end, copied only if they are not: what is sent is a run of rows."""
    return x.detach().contiguous()
