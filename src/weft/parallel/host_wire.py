"""Sums and gathers among the ranks of one host, through memory that all of them map, in microseconds.

A rank fills a bank of its own, posts it, and adds up the banks of all ranks in their order. There are four banks, so
that a rank fills the next one before it reads this one: chunks of rows are computed while the others finish theirs.
Every exchange carries a tag, a hash of what the ranks are about to do: ranks that were given different things notice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft import _core
from weft.comm import Window
from weft.comm.deadline import Deadline
from weft.errors import PeerMismatch, PeerTimeout, WeftError

CHUNK_ROWS = 512  # what is summed at once: stays in the caches from the matmul to the sum
_SMALLEST_BANK = 1 << 20
_SLICE_SECONDS = 0.5  # signal handlers run when a native call returns

Rows = tuple[int, int]  # address and stride
Fill = Callable[[int, int, Rows], None]  # writes rows [first, first + count) to a place


class HostWire:
    """Collective to make; then every call is made by all ranks, in the same order."""

    def __init__(self, group: ProcessGroup, width: int, dtype: torch.dtype, *, timeout: float) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._timeout, self._itemsize = timeout, dtype.itemsize
        self._bank_bytes = max(CHUNK_ROWS * width * dtype.itemsize, _SMALLEST_BANK)
        words = -(-_core.EXCHANGE_BLOCK_BYTES // 4)
        self._window = Window.create(
            group, _core.EXCHANGE_BANKS * self._bank_bytes, counters_per_rank=words, timeout=timeout
        )
        ranks = range(self.size)
        self._banks = [self._window.peer(r).view(_core.EXCHANGE_BANKS, self._bank_bytes) for r in ranks]
        self._blocks = [self._window.counters(r).tensor for r in ranks]
        blocks, banks = ([t.data_ptr() for t in tensors] for tensors in (self._blocks, self._banks))
        self._exchange = _core.Exchange(blocks, banks, self._bank_bytes, self.rank)
        self._number = 0
        self._tag, self._what = 0, ""
        self._failure: str | None = None

    def begin(self, tag: int, what: str) -> None:
        """What the exchanges that follow are for: a hash that is the same on all ranks, and its meaning in words."""
        if self._failure is not None:
            raise WeftError(f"an earlier call on these ranks failed ({self._failure}); make a new group and model")
        self._tag, self._what = tag, what

    def sum_rows(
        self, kernels: _core.Kernels, code: int, fill: Fill, rows: int, width: int, *, bias: int, out: Rows,
        threads: int,
    ) -> None:  # fmt: skip
        """out [rows, width] = the sum over ranks, in their order, of what `fill` writes, + bias (an address, or 0)."""
        step = min(CHUNK_ROWS, self._bank_bytes // max(1, width * self._itemsize))
        waiting: tuple[int, int, int] | None = None

        def add_up(number: int, first: int, count: int) -> None:
            to = out[0] + first * out[1] * self._itemsize
            arguments = (code, count, width, bias, to, out[1], threads)
            self._until(lambda s: self._exchange.sum(kernels, number, self._tag, s, *arguments))

        for first in range(0, rows, step):
            count = min(step, rows - first)
            number = self._next()
            fill(first, count, (self._exchange.bank(self.rank, number), width))
            self._exchange.post(number, self._tag)
            if waiting is not None:
                add_up(*waiting)
            waiting = (number, first, count)
        if waiting is not None:
            add_up(*waiting)

    def gather(self, mine: Tensor, parts: list[Tensor]) -> None:
        """parts[r] becomes what rank r gave; all contiguous and of one shape and dtype."""
        given = mine.view(-1).view(torch.uint8)
        taken = [part.view(-1).view(torch.uint8) for part in parts]
        for first in range(0, given.numel(), self._bank_bytes):
            piece = given[first : first + self._bank_bytes]
            number = self._next()
            bank, n = number % _core.EXCHANGE_BANKS, piece.numel()
            self._banks[self.rank][bank, :n] = piece
            self._exchange.post(number, self._tag)
            self._until(lambda s, number=number: self._exchange.wait(number, self._tag, s))  # type: ignore[misc]
            for banks, to in zip(self._banks, taken, strict=True):
                to[first : first + n] = banks[bank, :n]

    def _next(self) -> int:
        self._number = (self._number + 1) % 2**32
        return self._number

    def _until(self, attempt: Callable[[float], int]) -> None:
        """Repeats a native wait of so many seconds until all are here, or the deadline has passed."""
        late = attempt(min(self._timeout, _SLICE_SECONDS))
        if late == -1:
            return
        deadline = Deadline.after(max(self._timeout - _SLICE_SECONDS, 1e-3))
        while late >= 0 and deadline.left() > 0.0:
            late = attempt(min(deadline.left(), _SLICE_SECONDS))
        if late == -1:
            return
        error: WeftError
        if late >= 0:
            error = PeerTimeout(f"rank {late}: {self._what}", seconds=self._timeout)
        else:
            error = PeerMismatch(
                f"rank {-2 - late} is about to compute something else than rank {self.rank}, which is at: "
                f"{self._what}; give all ranks the same tokens, in the same order of calls"
            )
        self._failure = str(error)
        raise error
