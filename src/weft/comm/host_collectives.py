"""Collectives of the ranks of one host with next to no overhead, in banks of memory that they take turns to fill.

The overlapped ops agree on a plan, trace, and cross hosts; that costs a few tenths of a millisecond, which vanishes
beside a long matmul and dwarfs that of a decoding step. Here a rank fills a bank, posts it, waits until its peers have
posted theirs, and reads them all. Parts are added in the order of the ranks, so that all ranks have the same bits.

    turn t     fill bank t % 4 of mine  |  post: raise my counter  |  wait for all counters, read all banks

Nobody acknowledges what was read. A rank waits for turn t - 2 before it posts turn t, so whoever has waited for turn
t - 2 knows that every rank is done with turn t - 4, whose bank turn t takes. Hence four banks, and turn t may be filled
while turn t - 1 is still to be read: a matmul computes a block of rows while its peers finish the last.

With each turn goes a tag, which says what the rank is about to do: ranks that are at different things notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft import _core
from weft.comm.deadline import Deadline
from weft.comm.tags import refuse_unusable
from weft.comm.window import Window
from weft.errors import PeerMismatch, PeerTimeout, WeftError

BANKS = _core.EXCHANGE_BANKS
_SLICE_SECONDS = 0.5  # a signal handler runs only between two native waits
_LINE = 64  # bytes of a cache line: where a bank starts
_VIEWS = 1024  # tensors over banks that are kept for shapes seen before
_SMALLEST_BANK = 1 << 20
_TELLS = -1  # a tag that no hash is
CHUNK_ROWS = 512  # what the ranks of a host sum at once: stays in the caches from the matmul to the sum

Rows = tuple[int, int]  # address and stride
Fill = Callable[[int, int, Rows], None]  # writes rows [first, first + count) to a place


class HostGroup:
    """Collectives of a process group whose ranks share a host. Making one is collective; so is every call.

    A bank holds `bank_bytes` of each rank. What is longer goes in pieces, one turn each, and the next piece is written
    before the last is collected. Calls come from one thread, and in the same order on all ranks; a rank that is about
    to do something else is found out by the size of its part. Waits end after `timeout` seconds with the peer's rank.

        lean = HostGroup(pg, bank_bytes=1 << 20, timeout=60.0)
        total = lean.all_reduce(partial)              # [*] -> [*]
        whole = lean.all_gather(shard, dim=1)         # [M, N] -> [M, P N]
    """

    def __init__(self, pg: ProcessGroup, *, bank_bytes: int, timeout: float) -> None:
        if bank_bytes < _LINE:
            raise ValueError(f"bank_bytes is {bank_bytes}, expected {_LINE} or more: the longest piece of a turn")
        self.bank_bytes = bank_bytes // _LINE * _LINE
        self.rank, self.size = pg.rank(), pg.size()
        self._banks = Banks(pg, self.bank_bytes, timeout=timeout)
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._tags = [0] * BANKS  # what this rank put into each bank: its size

    # Collectives --------------------------------------------------------------------------------------------

    def all_reduce(self, part: Tensor, *, what: str = "all_reduce") -> Tensor:
        """The sum of all ranks' `part`s, added in rank order; a new tensor, the same on all ranks.

        bfloat16 and float16 are added in float32 and rounded once.
        """
        out = torch.empty(part.shape, dtype=part.dtype)
        source, target = part.reshape(-1), out.view(-1)
        step = self.elements(part.dtype)
        last: tuple[int, Tensor, list[Tensor]] | None = None
        for first in range(0, source.numel(), step):
            piece = source[first : first + step]
            places = self.bank((piece.numel(),), part.dtype)
            places[self.rank].copy_(piece)
            turn = self.publish(what)
            if last is not None:
                self.add_up(*last, what=what)
            last = (turn, target[first : first + step], places)
        if last is not None:
            self.add_up(*last, what=what)
        return out

    def all_gather(self, shard: Tensor, *, dim: int = 0, what: str = "all_gather") -> Tensor:
        """All ranks' `shard`s end to end along `dim`, in rank order: [..., N, ...] -> [..., P N, ...]."""
        dim = dim % shard.dim()
        outer, inner = math.prod(shard.shape[:dim]), math.prod(shard.shape[dim:])
        shape = (*shard.shape[:dim], self.size * shard.shape[dim], *shard.shape[dim + 1 :])
        out = torch.empty(shape, dtype=shard.dtype)
        if out.numel() == 0:
            return out
        source, target = shard.reshape(outer, inner), out.view(outer, self.size, inner)
        cols = min(inner, self.elements(shard.dtype))
        rows = max(1, self.elements(shard.dtype) // cols)
        for row in range(0, outer, rows):
            for col in range(0, inner, cols):
                piece = source[row : row + rows, col : col + cols]
                places = self.bank(tuple(piece.shape), shard.dtype)
                places[self.rank].copy_(piece)
                self.collect(self.publish(what), what)
                for rank, place in enumerate(places):
                    target[row : row + rows, rank, col : col + cols] = place
        return out

    # What they are made of, for callers who write their part themselves -------------------------------------

    def elements(self, dtype: torch.dtype) -> int:
        """How many elements of `dtype` a bank holds."""
        return self.bank_bytes // dtype.itemsize

    def bank(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """The next turn's bank of every rank, in rank order. Write to that of `rank`, then `publish`."""
        key = (self._banks.next_turn % BANKS, shape, dtype)
        places = self._views.get(key)
        if places is None:
            if math.prod(shape) > self.elements(dtype):
                raise ValueError(
                    f"a part of shape {shape} and {dtype} does not fit into a bank of {self.bank_bytes} bytes; "
                    "give it in pieces, or make the group with more bank_bytes"
                )
            if len(self._views) >= _VIEWS:
                self._views.clear()
            offset = key[0] * self.bank_bytes
            with torch.inference_mode(False):  # what is made in that mode may not be written to outside it
                window = self._banks.window
                places = [window.view(rank, shape, dtype, offset=offset) for rank in range(self.size)]
            self._views[key] = places
        self._tags[key[0]] = places[0].nbytes
        return places

    def publish(self, what: str) -> int:
        """Tells the peers that this rank's bank is written; returns the number of the turn, for `collect`."""
        self._banks.check(what)
        return self._banks.post(self._tags[self._banks.next_turn % BANKS])

    def collect(self, turn: int, what: str) -> None:
        """Returns when all ranks have published `turn`, with parts of one size."""
        tag = self._tags[turn % BANKS]
        self._banks.wait(turn, tag, f"{what} with {tag} bytes")

    def add_up(self, turn: int, out: Tensor, places: Sequence[Tensor], *, what: str) -> None:
        """Collects, and adds up all ranks' `places` in order."""
        self.collect(turn, what)
        add_in_order(places, out)

    def __repr__(self) -> str:
        return f"HostGroup(rank={self.rank}, size={self.size}, bank_bytes={self.bank_bytes})"


def add_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = parts[0] + parts[1] + ...: in this order, in float32 at least, rounded once.

    >>> out = torch.empty(2)
    >>> add_in_order([torch.ones(2), torch.ones(2), torch.ones(2)], out)
    >>> out.tolist()
    [3.0, 3.0]
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:  # torch adds two short floats in float32
        torch.add(parts[0], parts[1], out=out)
    elif out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)


class Banks:
    """`bank_bytes` of each rank in each of the banks. Making them is collective over `pg`, whose ranks share a host.

    Turns are taken from one thread, and in the same order on all ranks. Waits end after `timeout` seconds with the
    peer's rank; after a failure no more turns are given.
    """

    def __init__(self, pg: ProcessGroup, bank_bytes: int, *, timeout: float) -> None:
        Deadline.after(timeout)  # refuses a wrong one
        self.rank, self.size, self.timeout, self.bank_bytes = pg.rank(), pg.size(), timeout, bank_bytes
        self._pg = pg
        words = -(-_core.EXCHANGE_BLOCK_BYTES // 4)
        self.window = Window.create(pg, BANKS * bank_bytes, counters_per_rank=words, timeout=timeout)
        if len(self.window.ranks) != self.size:
            raise ValueError(
                f"rank {self.rank} shares its host with ranks {self.window.ranks} of {self.size}, expected all of "
                "them; use weft.overlap for groups that span hosts"
            )
        with torch.inference_mode(False):  # what is made in that mode may not be written to outside it
            self.memory: list[Tensor] = [self.window.peer(r).view(BANKS, bank_bytes) for r in range(self.size)]
        self._counters = [self.window.counters(r).tensor for r in range(self.size)]  # their addresses are used
        blocks, banks = ([t.data_ptr() for t in tensors] for tensors in (self._counters, self.memory))
        self.native = _core.Exchange(blocks, banks, bank_bytes, self.rank)
        self._turn = 0
        self._failure: str | None = None

    @property
    def next_turn(self) -> int:
        """The turn that `post` comes to next; the native counters count from 1 on, and go round."""
        return (self._turn + 1) % 2**32

    def check(self, what: str) -> None:
        """Raises where an earlier turn has failed, and in a fork, which would post in the name of its parent."""
        refuse_unusable(self._pg)
        if self._failure is not None:
            raise WeftError(f"{what}: an earlier call on this group failed ({self._failure}); make a new group")

    def post(self, tag: int) -> int:
        """Tells the peers that this rank's bank is filled; returns the turn, to wait for."""
        self._turn = self.next_turn
        self.native.post(self._turn, tag)
        return self._turn

    def wait(self, turn: int, tag: int, what: str) -> None:
        """Returns when all ranks have posted `turn` with this tag."""
        self.until(lambda seconds: self.native.wait(turn, tag, seconds), what)

    def until(self, attempt: Callable[[float], int], what: str) -> None:
        """Repeats a native wait of so many seconds until all ranks are there, or the deadline has passed."""
        late = attempt(min(_SLICE_SECONDS, self.timeout))
        if late == -1:
            return
        deadline = Deadline.after(max(self.timeout - _SLICE_SECONDS, 1e-3))
        while late >= 0 and deadline.left() > 0.0:
            late = attempt(min(_SLICE_SECONDS, max(deadline.left(), 1e-3)))
        if late == -1:
            return
        error: WeftError
        if late >= 0:
            error = PeerTimeout(f"rank {late} at {what}", seconds=self.timeout)
        else:
            error = PeerMismatch(
                f"rank {self.rank} is at {what}, rank {-2 - late} at something else, or with something of another "
                "size; give all ranks the same, in the same order of calls"
            )
        self._failure = str(error)
        raise error


class HostWire:
    """Sums of the rows that ranks compute, chunk by chunk: a rank computes the next while the others finish this one.

    Collective to make; then every call is made by all ranks, in the same order. What they are about to do is hashed
    once, for all exchanges of a pass.
    """

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
