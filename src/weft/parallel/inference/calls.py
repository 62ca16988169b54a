"""Single native calls on addresses, with the arguments that are the same in all calls of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft import _core
from weft.kernels.cpu import thread_count
from weft.packed import spec
from weft.packed.held import Dense
from weft.packed.spec import NormKind
from weft.parallel.inference.host_wire import Rows

if TYPE_CHECKING:
    from weft.parallel.inference.program import RankProgram

_SCHEDULE = _core.Schedule()
NOWHERE = (0, 0)


class Calls:
    """What a pass is made of. Nothing is checked: shapes follow from the model."""

    def __init__(self, program: RankProgram) -> None:
        self.program = program
        self.kernels, self.code, self.size = program.kernels, program.code, program.dtype.itemsize
        self.threads, self.width = thread_count(0), program.transformer.width

    def _linear(
        self, dense: Dense, x: Rows, out: Rows, rows: int, *, activation: int = 0, with_bias: bool = True
    ) -> None:  # fmt: skip
        bias = dense.bias.data_ptr() if with_bias and dense.bias is not None else 0
        _core.linear(
            self.kernels, *x, dense.data.data_ptr(), self.code, rows, dense.n, dense.k, bias, activation,
            *NOWHERE, *NOWHERE, *out, self.threads, _SCHEDULE,
        )  # fmt: skip

    def _norm(
        self, norm: spec.Norm, x: Rows, out: Rows, rows: int, *, residual: Rows = NOWHERE, total: Rows = NOWHERE
    ) -> None:  # fmt: skip
        weight, bias = (0 if t is None else t.data_ptr() for t in (norm.weight, norm.bias))
        _core.norm(
            self.kernels, self.code, norm.kind is NormKind.RMS, x, 0, residual, weight, bias, norm.eps, total, out,
            0, 0, rows, self.width, self.threads,
        )  # fmt: skip

    def _add(self, a: Rows, b: Rows, out: Rows, rows: int) -> None:
        order = self.program.tables.in_order(rows).data_ptr()
        _core.gather(self.kernels, self.code, [(*a, order), (*b, order)], out, rows, self.width, self.threads)
