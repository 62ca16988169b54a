"""A row-parallel matmul and its all-reduce inside a host, with the overhead of neither: for engines that decode.

    x_r [M, K_r], w_r [N, K_r], b [N] -> y = sum over r of x_r w_r^T + b   [M, N], the same on all ranks

The matmul writes into the window, and all ranks add up what is there, in rank order. Where M is large, a block of rows
is computed while the peers finish the one before, so that nobody waits for a rank that is a little behind; and the sums
find the blocks in the cache. `weft.matmul_all_reduce` does the same for any group and traces it.
"""

from __future__ import annotations

from torch import Tensor

from weft.comm.host_collectives import LeanGroup
from weft.kernels import PackedWeight, linear
from weft.kernels.dispatch import kernels_for

_BLOCK_ROWS = 480  # a multiple of the strips of the matmul; fewer rows read the weight more often, 1 to 2 % slower
_WHAT = "matmul_all_reduce"


def fused_matmul_all_reduce(lean: LeanGroup, x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None) -> Tensor:
    """y = all_reduce(x w^T + bias): x [M, K_r], weight [N, K_r] -> [M, N]. One rank only gives the bias [N]."""
    m, n = x.shape[0], weight.n
    room = lean.elements(x.dtype) // n
    if room == 0:
        return lean.all_reduce(linear(x, weight, bias=bias), what=_WHAT)
    out = kernels_for(x).empty(m, n, dtype=x.dtype)
    step = min(room, _BLOCK_ROWS)
    last: tuple[int, Tensor, list[Tensor]] | None = None
    for first in range(0, m, step):
        block = out[first : first + step]
        places = lean.bank(tuple(block.shape), x.dtype)
        linear(x[first : first + step], weight, bias=bias, out=places[lean.rank])
        turn = lean.publish(_WHAT)
        if last is not None:
            lean.add_up(*last, what=_WHAT)
        last = (turn, block, places)
    if last is not None:
        lean.add_up(*last, what=_WHAT)
    return out
