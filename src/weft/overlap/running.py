"""What calls of both kinds have in common."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from weft import tracing
from weft.overlap.context import Call, Context
from weft.overlap.plan import OverlapPlan
from weft.timeline import Kind

# On top of the deadline, for the end of a thread whose every wait has that deadline.
_GRACE_SECONDS = 5.0
_VERSION = version("weft")


def call_text(plan: OverlapPlan, *, bias: bool) -> str:
    """What all ranks must say alike before a byte moves."""
    return f"{plan.shared_text()} bias={bias} weft={_VERSION}"


class Running:
    """One call of one op on this rank: its context, bank, plan and recorder."""

    def __init__(self, context: Context, call: Call, plan: OverlapPlan, text: str, *, dtype: torch.dtype) -> None:
        self.context, self.call, self.plan, self.dtype, self.text = context, call, plan, dtype, text
        self.recorder = tracing.current()
        self.op = plan.op.value

    def left(self) -> float:
        """Seconds to the deadline, above 0: a wait that comes too late still looks once."""
        return max(self.call.deadline.left(), 1e-3)

    def patience(self) -> float:
        """Seconds within which a thread of this call must have ended, whatever happens."""
        return self.call.deadline.left() + _GRACE_SECONDS

    def record(
        self, kind: Kind, name: str, lane: str, start: float, *, nbytes: int | None = None, flops: float | None = None
    ) -> None:
        """Adds an event that ends now to the trace, if there is one."""
        if self.recorder is not None:
            self.recorder.add(
                kind, f"{self.op}: {name}", lane=lane, start=start, end=tracing.now(), bytes=nbytes, flops=flops
            )

    def meet(self) -> None:
        """Returns when all ranks are here with the same text."""
        self.context.meet(self.call, self.text)


def as_bytes(elements: int, dtype: torch.dtype) -> int:
    """How many bytes they take."""
    return elements * dtype.itemsize


def row_major(x: Tensor) -> Tensor:
    """`x` [M, K] with its elements end to end, copied only if they are not: what is sent is a run of rows."""
    return x.detach().contiguous()
