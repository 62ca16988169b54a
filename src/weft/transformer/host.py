"""Sums over the ranks of one host, through shared memory.

A rank fills a bank of its own, posts it, and adds up the banks of all ranks in their order; it fills the next one
before it reads this one, so that chunks of rows are computed while the others finish theirs. Every turn carries a tag,
a hash of what the ranks are about to do: ranks that were given different things notice.

    matmul_all_reduce   x_r [M, K_r], w_r [N, K_r], b [N] -> sum over r of x_r w_r^T + b   [M, N], the same on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft import _core
from weft.comm.host_collectives import BANKS, Banks, HostGroup
from weft.kernels import PackedWeight, linear
from weft.kernels.dispatch import kernels_for
from weft.transformer.memory import CHUNK_ROWS

_SMALLEST_BANK = 1 << 20
_TELLS = -1  # a tag that no hash is

Rows = tuple[int, int]  # address and stride
Fill = Callable[[int, int, Rows], None]  # writes rows [first, first + count) to a place


class HostWire:
    """Collective to make; then every call is made by all ranks, in the same order."""

    def __init__(self, group: ProcessGroup, width: int, dtype: torch.dtype, *, timeout: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._form, self._itemsize = (width, dtype), dtype.itemsize
        self._banks = Banks(group, max(CHUNK_ROWS * width * dtype.itemsize, _SMALLEST_BANK), timeout=timeout)
        self._words: list[Any] = [memory.numpy() for memory in self._banks.memory]  # for what is said in a few words
        self._tag, self._what = 0, ""

    def fits(self, width: int, dtype: torch.dtype) -> bool:
        """Whether it was made for such rows."""
        return self._form == (width, dtype)

    def begin(self, tag: int, what: str) -> None:
        """What the exchanges that follow are for: a hash that is the same on all ranks, and its meaning in words."""
        self._banks.check(what)
        self._tag, self._what = tag, what

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank says, a few int64 numbers, as many of each."""
        banks, n = self._banks, 8 * len(numbers)
        what = "what ranks say before a call"
        banks.check(what)
        bank = banks.next_turn % BANKS
        self._words[self.rank][bank, :n].view("int64")[:] = numbers
        banks.wait(banks.post(_TELLS), _TELLS, what)
        return [words[bank, :n].view("int64").tolist() for words in self._words]

    def sum_rows(
        self, kernels: _core.Kernels, code: int, fill: Fill, rows: int, width: int, *, bias: int, out: Rows,
        threads: int,
    ) -> None:  # fmt: skip
        """out [rows, width] = the sum over ranks, in their order, of what `fill` writes, + bias (an address, or 0)."""
        step = min(CHUNK_ROWS, self._banks.bank_bytes // max(1, width * self._itemsize))
        waiting: tuple[int, int, int] | None = None
        banks = self._banks

        def add_up(turn: int, first: int, count: int) -> None:
            to = out[0] + first * out[1] * self._itemsize
            arguments = (code, count, width, bias, to, out[1], threads)
            banks.until(lambda s: banks.native.sum(kernels, turn, self._tag, s, *arguments), self._what)

        for first in range(0, rows, step):
            count = min(step, rows - first)
            fill(first, count, (banks.native.bank(self.rank, banks.next_turn), width))
            turn = banks.post(self._tag)
            if waiting is not None:
                add_up(*waiting)
            waiting = (turn, first, count)
        if waiting is not None:
            add_up(*waiting)

    def gather(self, mine: Tensor, parts: list[Tensor]) -> None:
        """parts[r] becomes what rank r gave; all contiguous and of one shape and dtype."""
        given = mine.view(-1).view(torch.uint8)
        taken = [part.view(-1).view(torch.uint8) for part in parts]
        banks = self._banks
        for first in range(0, given.numel(), banks.bank_bytes):
            piece = given[first : first + banks.bank_bytes]
            bank, n = banks.next_turn % BANKS, piece.numel()
            banks.memory[self.rank][bank, :n] = piece
            banks.wait(banks.post(self._tag), self._tag, self._what)
            for memory, to in zip(banks.memory, taken, strict=True):
                to[first : first + n] = memory[bank, :n]


_BLOCK_ROWS = 480  # a multiple of the strips of the matmul; fewer rows read the weight more often, 1 to 2 % slower
_WHAT = "matmul_all_reduce"


def fused_matmul_all_reduce(lean: HostGroup, x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None) -> Tensor:
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
