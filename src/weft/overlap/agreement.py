"""What every call starts with: all ranks hear from all others that they are about to do the same.

A rank tells the digest of its plan, shapes, types and library version; it goes on when it has everybody's. Inside a
host the digest is a word in a window, across hosts a message of 16 bytes. The ranks do this on every call, not only on
the first of a kind: a rank that takes another branch of the model would otherwise meet the wrong message. It costs
no time to speak of, because the matmul runs meanwhile, and it is what makes buffers reusable (see memory.py).

The meeting has two halves, so that a rank can work between them: `post` tells, `confirm` hears.

If anybody differs, everybody notices, for a rank whose digest all others share cannot exist. Then all exchange texts
and raise PeerMismatch, which names both sides. No data has moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weft.comm import Counters, Group, Transfer, Window
from weft.comm.deadline import Deadline

_DIGEST_BYTES = 16
_HEADER_TAG, _COUNTS_TAG = (1 << 30) - 2, (1 << 30) - 1  # above all tags of messages with data


@lru_cache(maxsize=4096)
def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]


def _as_memory(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


@dataclass(frozen=True)
class Posted:
    """What this rank has told the others, and the messages that will say what they tell it."""

    text: str
    number: int
    theirs: tuple[Tensor, ...]
    transfers: tuple[Transfer, ...]


class Agreement:
    """The meeting of a group's ranks, held once at the start of each call, in the same order on all ranks."""

    def __init__(self, group: Group, *, windows: bool) -> None:
        self._group = group
        self._window: Window | None = None
        self._local: tuple[int, ...] = ()
        self._slots: dict[int, memoryview] = {}
        self._counters: dict[int, Counters] = {}
        if windows:
            self._window = Window.create(group.pg, 2 * _DIGEST_BYTES, counters_per_rank=1, timeout=group.timeout)
            self._local = tuple(rank for rank in self._window.ranks if rank != group.rank)
            self._slots = {rank: _as_memory(self._window.peer(rank)) for rank in self._window.ranks}
            self._counters = {rank: self._window.counters(rank) for rank in self._window.ranks}
        self._remote = tuple(r for r in range(group.size) if r != group.rank and r not in self._local)
        self._calls = 0

    def meet(self, text: str, *, deadline: Deadline) -> None:
        """Returns when all ranks are here with the same text."""
        self.confirm(self.post(text), deadline=deadline)

    def post(self, text: str) -> Posted:
        """Tells the others what this rank is about to do, and returns at once; `confirm` must follow."""
        self._calls += 1
        digest = _digest(text)
        if self._window is not None:
            self._slots[self._group.rank][self._slot(self._calls)] = digest
            self._counters[self._group.rank].add(0)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        theirs = tuple(torch.empty_like(mine) for _ in self._remote)
        transfers = [self._group.recv(t, peer, tag=_HEADER_TAG) for t, peer in zip(theirs, self._remote, strict=True)]
        transfers += [self._group.send(mine, peer, tag=_HEADER_TAG) for peer in self._remote]
        return Posted(text, self._calls, theirs, tuple(transfers))

    def confirm(self, posted: Posted, *, deadline: Deadline) -> None:
        """Returns when all ranks have posted the same; PeerMismatch names both sides when they have not."""
        what = f"the start of {posted.text.split(' ', 1)[0]}"
        told: list[bytes] = []
        for rank in self._local:
            left = max(deadline.left(), 1e-3)
            self._counters[rank].wait(0, posted.number, timeout=left, what=f"rank {rank} at {what}")
            told.append(bytes(self._slots[rank][self._slot(posted.number)]))
        for transfer in posted.transfers:
            transfer.wait_until(deadline, what=what)
        told += [bytes(t.numpy()) for t in posted.theirs]
        mine = _digest(posted.text)
        if any(other != mine for other in told):
            # Not cut short by a deadline that a slow peer has used up: the error to tell is the mismatch.
            self._group.agree("overlap", posted.text)
            raise AssertionError("digests differ, texts do not")

    @staticmethod
    def _slot(number: int) -> slice:
        # Two places in turn, as with banks: who writes this one again has seen that its readers are a call further.
        return slice(number % 2 * _DIGEST_BYTES, (number % 2 + 1) * _DIGEST_BYTES)

    def _exchange(self, mine: Tensor, peers: Sequence[int], tag: int, deadline: Deadline, what: str) -> list[Tensor]:
        theirs = [torch.empty_like(mine) for _ in peers]
        transfers = [self._group.recv(data, peer, tag=tag) for data, peer in zip(theirs, peers, strict=True)]
        transfers += [self._group.send(mine, peer, tag=tag) for peer in peers]
        for transfer in transfers:
            transfer.wait_until(deadline, what=what)
        return theirs

    def gather(self, numbers: Tensor, *, deadline: Deadline, what: str) -> list[list[int]]:
        """What each rank gave as `numbers`, int64 [n]; after `meet`."""
        peers = [rank for rank in range(self._group.size) if rank != self._group.rank]
        found = self._exchange(numbers, peers, _COUNTS_TAG, deadline, what)
        found.insert(self._group.rank, numbers)
        return [data.tolist() for data in found]
