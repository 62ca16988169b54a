"""Banks of memory that the ranks of a host fill in turns and read from each other: what lean collectives are made of.

    turn t     fill bank t % 4 of mine  |  post: raise my counter  |  wait for all counters, read all banks

Nobody acknowledges what was read. A rank waits for turn t - 2 before it posts turn t, so whoever has waited for turn
t - 2 knows that every rank is done with turn t - 4, whose bank turn t takes. Hence four banks, and turn t may be filled
while turn t - 1 is still to be read: a matmul computes a block of rows while its peers finish the last.

With each turn goes a tag, which says what the rank is about to do: ranks that are at different things notice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft import _core
from weft.comm.deadline import Deadline
from weft.comm.window import Window
from weft.errors import PeerMismatch, PeerTimeout, WeftError

BANKS = _core.EXCHANGE_BANKS
_SLICE_SECONDS = 0.5  # a signal handler runs only between two native waits


class Banks:
    """`bank_bytes` of each rank in each of the banks. Making them is collective over `pg`, whose ranks share a host.

    Turns are taken from one thread, and in the same order on all ranks. Waits end after `timeout` seconds with the
    peer's rank; after a failure no more turns are given.
    """

    def __init__(self, pg: ProcessGroup, bank_bytes: int, *, timeout: float, store: Store | None = None) -> None:
        Deadline.after(timeout)  # refuses a wrong one
        self.rank, self.size, self.timeout, self.bank_bytes = pg.rank(), pg.size(), timeout, bank_bytes
        words = -(-_core.EXCHANGE_BLOCK_BYTES // 4)
        self.window = Window.create(pg, BANKS * bank_bytes, counters_per_rank=words, timeout=timeout, store=store)
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
        """Raises where an earlier turn has failed."""
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
