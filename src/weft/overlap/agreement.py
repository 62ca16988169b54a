"""What every call starts with: all ranks hear from all others that they are about to do the same.

A rank tells the digest of its plan, shapes, types and library version; it goes on when it has everybody's. Inside a
host the digest is a word in a window, across hosts a message of 16 bytes. The ranks do this on every call, not only on
the first of a kind: a rank that takes another branch of the model would otherwise meet the wrong message. It costs
no time to speak of, because the matmul runs meanwhile, and it is what makes buffers reusable (see memory.py).

The meeting has two halves, so that a rank can work between them: `post` tells, `confirm` hears.

If anybody differs, everybody notices, for a rank whose digest all others share cannot exist. Then all exchange texts
and raise PeerMismatch, which names both sides. No data has moved. Where they differ only in the plan, and nobody was
given one, it is `PlansDiffer`: a rank has heard of a plan a moment before another. All take rank 0's, and call again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weft.comm import Counters, Group, Transfer, Window
from weft.comm.deadline import Deadline
from weft.comm.group import differences
from weft.comm.listen import listening
from weft.comm.tags import Mark
from weft.comm.tell import swap_tensors
from weft.errors import PeerMismatch

_DIGEST_BYTES = 16
_EPOCH = 1 << 30  # calls after which counting starts anew: a counter has 31 bits, and a service runs for months


@lru_cache(maxsize=4096)
def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]


def _count(number: int) -> tuple[int, int]:
    """Which of two counters tells of call `number`, from 1 on, and what it is then.

    >>> _count(1), _count(_EPOCH), _count(_EPOCH + 1), _count(2 * _EPOCH + 1)
    ((0, 1), (0, 1073741824), (1, 1), (0, 1))
    """
    epoch, count = divmod(number - 1, _EPOCH)
    return epoch % 2, count + 1


def _as_memory(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


class PlansDiffer(PeerMismatch):
    """On all ranks: they ask for the same matmul and know different plans of their group for it."""

    def __init__(self, plan: str) -> None:
        super().__init__(f"ranks know different plans of their group; rank 0 follows {plan or 'none'}")
        self.plan = plan


@dataclass(frozen=True)
class Statement:
    """What a rank says before a call: `text` must be the same on all ranks.

    Where the plan is the group's own, `question` gives the text without it, and `plan` is it, or "" for none yet. Both
    are asked for only where ranks differ.
    """

    text: str
    question: Callable[[], str] | None = None
    plan: object = ""


@dataclass(frozen=True)
class Posted:
    """What this rank has told the others, and the messages that will say what they tell it."""

    said: Statement
    number: int
    theirs: tuple[Tensor, ...]
    transfers: tuple[Transfer, ...]


class Agreement:
    """The meeting of a group's ranks, held once at the start of each call, in the same order on all ranks."""

    def __init__(self, group: Group, *, windows: bool) -> None:
        self._group, self._tag = group, group.line.mark(Mark.START)
        self._window: Window | None = None
        self._local: tuple[int, ...] = ()
        self._slots: dict[int, memoryview] = {}
        self._counters: dict[int, Counters] = {}
        if windows:
            self._window = Window.create(
                group.pg, 2 * _DIGEST_BYTES, counters_per_rank=2, timeout=group.timeout, line=group.line
            )
            self._local = tuple(rank for rank in self._window.ranks if rank != group.rank)
            self._slots = {rank: _as_memory(self._window.peer(rank)) for rank in self._window.ranks}
            self._counters = {rank: self._window.counters(rank) for rank in self._window.ranks}
        self._remote = tuple(r for r in range(group.size) if r != group.rank and r not in self._local)
        self._calls = 0

    def meet(self, said: Statement, *, deadline: Deadline) -> None:
        """Returns when all ranks are here with the same text."""
        self.confirm(self.post(said), deadline=deadline)

    def post(self, said: Statement) -> Posted:
        """Tells the others what this rank is about to do, and returns at once; `confirm` must follow."""
        self._calls += 1
        digest = _digest(said.text)
        if self._window is not None:
            word, count = _count(self._calls)
            own = self._counters[self._group.rank]
            if count == 2:  # all ranks have met in this epoch, so none waits for the last of the one before
                own.tensor[1 - word] = 0
            self._slots[self._group.rank][self._slot(self._calls)] = digest
            own.add(word)
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        theirs = tuple(torch.empty_like(mine) for _ in self._remote)
        transfers = [self._group.recv(t, peer, tag=self._tag) for t, peer in zip(theirs, self._remote, strict=True)]
        transfers += [self._group.send(mine, peer, tag=self._tag) for peer in self._remote]
        return Posted(said, self._calls, theirs, tuple(transfers))

    def confirm(self, posted: Posted, *, deadline: Deadline) -> None:
        """Returns when all ranks have posted the same; PeerMismatch names both sides when they have not."""
        what = f"the start of {posted.said.text.split(' ', 1)[0]}"
        told: list[bytes] = []
        for rank in self._local:
            left, (word, count) = max(deadline.left(), 1e-3), _count(posted.number)
            self._counters[rank].wait(word, count, timeout=left, what=f"rank {rank} at {what}")
            told.append(bytes(self._slots[rank][self._slot(posted.number)]))
        self._wait(posted.transfers, deadline, what)
        told += [bytes(t.numpy()) for t in posted.theirs]
        mine = _digest(posted.said.text)
        if any(other != mine for other in told):
            raise self._mismatch(posted.said)

    def _mismatch(self, said: Statement) -> PeerMismatch:
        """What to raise on all ranks, once all texts are known."""
        # Not cut short by a deadline that a slow peer has used up: the error to tell is the mismatch.
        question = None if said.question is None else said.question()
        words = self._group.tell("the mismatch of a call", json.dumps([said.text, question, str(said.plan)]))
        texts, questions, plans = zip(*map(json.loads, words), strict=True)
        if questions[0] is not None and len(set(questions)) == 1:
            return PlansDiffer(plans[0])
        return PeerMismatch(differences([f"overlap: {text}" for text in texts]))

    def _wait(self, transfers: tuple[Transfer, ...], deadline: Deadline, what: str) -> None:
        def wait() -> None:
            for transfer in transfers:
                transfer.wait_until(deadline, what=what)

        if transfers:
            listening(wait, on_interrupt=self._group.break_off)

    @staticmethod
    def _slot(number: int) -> slice:
        # Two places in turn, as with banks: who writes this one again has seen that its readers are a call further.
        return slice(number % 2 * _DIGEST_BYTES, (number % 2 + 1) * _DIGEST_BYTES)

    def gather(self, numbers: Tensor, *, deadline: Deadline, what: str) -> list[list[int]]:
        """What each rank gave as `numbers`, int64 [n]; after `meet`."""
        found = [torch.empty_like(numbers) for _ in range(self._group.size)]
        found[self._group.rank] = numbers
        tag = self._group.line.mark(Mark.COUNTS)
        swap_tensors(self._group, [numbers] * self._group.size, found, tag=tag, deadline=deadline, what=what)
        return [data.tolist() for data in found]
