"""What every call starts with: all ranks hear from all others that they are about to do the same.

A rank tells the digest of its plan, shapes, types and library version; it goes on when it has everybody's. Inside a
host the digest is a word in a window, across hosts a message of 16 bytes. The ranks do this on every call, not only on
the first of a kind: a rank that takes another branch of the model would otherwise meet the wrong message. It costs
no time to speak of, because the matmul runs meanwhile, and it is what makes buffers reusable (see memory.py).

If anybody differs, everybody notices, for a rank whose digest all others share cannot exist. Then all exchange texts
and raise PeerMismatch, which names both sides. No data has moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm import Group, Window
from weft.comm.deadline import Deadline

_DIGEST_BYTES = 16
_HEADER_TAG, _COUNTS_TAG = (1 << 30) - 2, (1 << 30) - 1  # above all tags of messages with data


class Agreement:
    """The meeting of a group's ranks, held once at the start of each call, in the same order on all ranks."""

    def __init__(self, group: Group, *, windows: bool) -> None:
        self._group = group
        self._window: Window | None = None
        self._local: tuple[int, ...] = ()
        if windows:
            self._window = Window.create(group.pg, 2 * _DIGEST_BYTES, counters_per_rank=1, timeout=group.timeout)
            self._local = tuple(rank for rank in self._window.ranks if rank != group.rank)
        self._remote = tuple(r for r in range(group.size) if r != group.rank and r not in self._local)
        self._calls = 0

    def meet(self, text: str, *, deadline: Deadline) -> None:
        """Returns when all ranks are here with the same text."""
        self._calls += 1
        what = f"the start of {text.split(' ', 1)[0]}"
        digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]), dtype=torch.uint8)
        theirs = [*self._through_window(digest, deadline, what), *self._by_message(digest, deadline, what)]
        if not all(torch.equal(digest, other) for other in theirs):
            # Not cut short by a deadline that a slow peer has used up: the error to tell is the mismatch.
            self._group.agree("overlap", text)
            raise AssertionError("digests differ, texts do not")

    def _through_window(self, digest: Tensor, deadline: Deadline, what: str) -> list[Tensor]:
        if self._window is None:
            return []
        # Two places in turn, as with banks: who writes this one again has seen that its readers are a call further.
        at = slice(self._calls % 2 * _DIGEST_BYTES, (self._calls % 2 + 1) * _DIGEST_BYTES)
        self._window.local[at] = digest
        self._window.counters(self._group.rank).add(0)
        theirs = []
        for rank in self._local:
            left = max(deadline.left(), 1e-3)
            self._window.counters(rank).wait(0, self._calls, timeout=left, what=f"rank {rank} at {what}")
            theirs.append(self._window.peer(rank)[at].clone())
        return theirs

    def _by_message(self, digest: Tensor, deadline: Deadline, what: str) -> list[Tensor]:
        return self._exchange(digest, self._remote, _HEADER_TAG, deadline, what)

    def _exchange(self, mine: Tensor, peers: Sequence[int], tag: int, deadline: Deadline, what: str) -> list[Tensor]:
        theirs = [torch.empty_like(mine) for _ in peers]
        transfers = [self._group.recv(data, peer, tag=tag) for data, peer in zip(theirs, peers, strict=True)]
        transfers += [self._group.send(mine, peer, tag=tag) for peer in peers]
        for transfer in transfers:
            transfer.wait_until(deadline, what=what)
        return theirs

    def gather(self, numbers: Tensor, *, deadline: Deadline) -> list[list[int]]:
        """What each rank gave as `numbers`, int64 [n]; after `meet`."""
        peers = [rank for rank in range(self._group.size) if rank != self._group.rank]
        found = self._exchange(numbers, peers, _COUNTS_TAG, deadline, "the number of rows")
        found.insert(self._group.rank, numbers)
        return [data.tolist() for data in found]
