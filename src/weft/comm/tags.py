"""Which tags are whose on a process group: the one place where tags are made.

    0 to 2**30 - 1        the caller's own (`Group.send(tag=...)`), and torch's
    2**30 to 2**31 - 1    weft's, cut into lines

A *line* is a kind of operation whose calls come one after the other, in the same order on all ranks. Operations of
different lines know nothing of each other: they may be under way at the same time, from any threads, and in another
order on every rank, because no message of one has a tag of the other.

A line starts with a few *marks*, tags with a fixed use. The rest are for data. Where only one operation of a line is
under way at a time (overlapped matmuls: each waits for the one before) they are all its own, `line.data(number)`. Where
several may be (asynchronous reshards) each has a lease of some. Ranks find the same free tags without a message more
than they exchange anyway: each says with its agreement (`Group.lease`) which parts of the line it still uses, and the
first run of parts that nobody uses is the lease. So no count can run out of step, whichever calls were refused where.

Beside the tags is what else this rank keeps of a process group: whose turn it is, what is known of its ranks, whether
the group is this process's own, or came to it by a fork, and whether it was given up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import reduce
from operator import or_
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm.deadline import Deadline
from weft.errors import PeerTimeout, WeftError

FIRST_TAG = 1 << 30
"""Where weft's own tags begin; a backend's tags end at twice that."""
DEFAULT_TAG = 0
"""What a message of the caller's has unless it is given one."""

_MARKS = 16
_PARTS = 256
CLAIM_BYTES = _PARTS // 8
"""How long a rank's word is for the parts of a line that it uses: a bit for each."""
CHUNKS_PER_CHANNEL = 1 << 14
"""How many tags a channel of a pipeline has, one for each chunk of a tensor."""


class Tag(int):
    """A tag that a line gave out. Nothing else makes one, so that no number of the caller's is taken for it."""

    __slots__ = ()


class Mark(IntEnum):
    """The fixed tags of a line."""

    DIGEST = 0  # of what a rank is about to do
    TEXT = 1  # the same in words, where ranks differ; and short texts
    START = 2  # of an overlapped matmul: 16 bytes
    COUNTS = 3  # how many rows go where
    EXCHANGE = 4  # of a few small tensors
    PROBE = 5
    PING = 6
    WATCH = 7  # received and never sent: its end tells that the peer is gone
    NEVER = 8  # received and never sent: how a group is broken off
    END = 9  # how a rank came to the end of a step


class Line(Enum):
    """A kind of operation, and how many tags it has: 2 to the power of `bits`."""

    GROUP = ("a group", 16)  # agreements and barriers of a `Group` that the caller made
    OVERLAP = ("overlapped matmuls", 27)
    PLANNING = ("planning and tuning", 27)
    RESHARD = ("reshards", 28)
    CHANNELS = ("channels of a pipeline", 28)
    NOTES = ("notes of a pipeline", 24)
    CLOCKS = ("clocks", 16)

    def __init__(self, title: str, bits: int) -> None:
        self.title, self.size = title, 1 << bits
        self.first = FIRST_TAG  # until all lines are known, below

    def mark(self, mark: Mark) -> Tag:
        """A fixed tag of the line."""
        return Tag(self.first + mark)

    def data(self, number: int) -> Tag:
        """The tag of message `number` of the operation that is under way in this line.

        >>> Line.OVERLAP.data(1) - Line.OVERLAP.data(0)
        1
        """
        if not 0 <= number < self.size - _MARKS:
            raise ValueError(f"message {number} of {self.title}, expected 0 to {self.size - _MARKS - 1}: use fewer")
        return Tag(self.first + _MARKS + number)

    @property
    def part(self) -> int:
        """How many tags a part of the line has; a lease is a run of parts."""
        return (self.size - _MARKS) // _PARTS


def _place_lines() -> None:
    at = FIRST_TAG
    for line in Line:
        line.first = at
        at += line.size
    assert at <= 2 * FIRST_TAG, "a backend counts tags in 31 bits"


_place_lines()


@dataclass(frozen=True, eq=False)
class Span:
    """Some tags of a line that belong to one operation, the same on all ranks."""

    line: Line
    first: int
    count: int

    def tag(self, number: int) -> Tag:
        """The tag of message `number` of the operation."""
        if not 0 <= number < self.count:
            raise ValueError(f"message {number} of {self.line.title}, expected 0 to {self.count - 1}: use fewer")
        return self.line.data(self.first + number)


def channel_tags(channel: int) -> Span:
    """The tags of a pipeline's channel, which all ranks number alike.

    >>> channel_tags(1).tag(0) - channel_tags(0).tag(0) == CHUNKS_PER_CHANNEL
    True
    """
    most = Line.CHANNELS.size // CHUNKS_PER_CHANNEL - 1  # the last one shares its tags with the marks
    if not 0 <= channel < most:
        raise ValueError(
            f"a pipeline has a channel {channel}, expected up to {most}; use fewer micro-batches or stages"
        )
    return Span(Line.CHANNELS, channel * CHUNKS_PER_CHANNEL, CHUNKS_PER_CHANNEL)


@dataclass(frozen=True, eq=False)
class Lease(Span):
    """Tags of one operation, for as long as it lasts."""

    ledger: Ledger

    def release(self) -> None:
        """Gives the tags back: all messages of this rank have been sent and received. Again is harmless."""
        self.ledger.give_back(self)


class Ledger:
    """What this rank uses of a line on one process group."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._leases: dict[Lease, int] = {}  # bit i: part i

    def claim(self) -> bytes:
        """The parts that this rank uses, for the other ranks: `CLAIM_BYTES` long."""
        with self._lock:
            return reduce(or_, self._leases.values(), 0).to_bytes(CLAIM_BYTES, "big")

    def lease(self, claims: Sequence[bytes], tags: int) -> Lease:
        """Takes `tags` tags that no rank uses, by what all of them claimed: the same on all ranks, or none has any.

        >>> ledger = Ledger(Line.RESHARD)
        >>> one = ledger.lease([ledger.claim()], 10)
        >>> two = ledger.lease([ledger.claim()], 10)
        >>> one.tag(9) < two.tag(0)
        True
        """
        parts = max(1, -(-tags // self._line.part))
        if parts > _PARTS:
            most = _PARTS * self._line.part
            raise ValueError(f"one operation of {self._line.title} has {tags} messages, expected up to {most}; cut it")
        used = reduce(or_, (int.from_bytes(claim, "big") for claim in claims), 0)
        run = (1 << parts) - 1
        for first in range(_PARTS - parts + 1):
            if not used & (run << first):
                lease = Lease(self._line, first * self._line.part, parts * self._line.part, self)
                with self._lock:
                    self._leases[lease] = run << first
                return lease
        raise WeftError(
            f"too many {self._line.title} are under way on this process group: no {tags} tags of "
            f"{_PARTS * self._line.part} are left; wait for some, and close executors that are not needed"
        )

    def give_back(self, lease: Lease) -> None:
        """See `Lease.release`."""
        with self._lock:
            self._leases.pop(lease, None)


class _GroupState:
    """What this rank keeps of one process group."""

    def __init__(self) -> None:
        self.ledgers: dict[Line, Ledger] = {}
        self.turns: dict[str, threading.RLock] = {}
        self.facts: dict[str, list[Any]] = {}
        self.owners: dict[object, Callable[[], object]] = {}  # how to drop what others keep for the group
        self.is_abandoned = False


# Beside a process group, because those who use it know nothing of each other; it goes with the group.
_states: WeakKeyDictionary[ProcessGroup, _GroupState] = WeakKeyDictionary()
_lock = threading.Lock()


def ledger_of(pg: ProcessGroup, line: Line) -> Ledger:
    """The ledger of a line on a process group: one on each rank, whoever asks."""
    with _lock:
        return _states.setdefault(pg, _GroupState()).ledgers.setdefault(line, Ledger(line))


def facts_of(pg: ProcessGroup) -> dict[str, list[Any]]:
    """What all ranks of a process group have said of themselves, by name: see `comm.tell.know_all`."""
    with _lock:
        return _states.setdefault(pg, _GroupState()).facts


@contextmanager
def turn(pg: ProcessGroup, name: str, deadline: Deadline) -> Iterator[None]:
    """Threads of this rank that do the same thing on a process group (`name`) do so one after the other.

    Their messages, and their words in the store, would otherwise be taken for each other's. The callers keep
    the order equal on all ranks, as for all collectives of a group.
    """
    refuse_unusable(pg)
    with _lock:
        lock = _states.setdefault(pg, _GroupState()).turns.setdefault(name, threading.RLock())
    if not lock.acquire(timeout=max(deadline.left(), 1e-3)):
        raise PeerTimeout(f"another thread of this rank, which is busy with {name}", seconds=deadline.seconds)
    try:
        yield
    finally:
        lock.release()


# Groups that were given up ----------------------------------------------------------------------------------


def when_abandoned(pg: ProcessGroup, owner: object, drop: Callable[[], object]) -> None:
    """`drop()` is called when the group is given up, to let go of what `owner` keeps for it."""
    with _lock:
        _states.setdefault(pg, _GroupState()).owners[owner] = drop


def abandon(pg: ProcessGroup) -> None:
    """This rank will not use the group again: weft drops what it keeps for it, and refuses calls on it."""
    global _any_abandoned
    with _lock:
        state = _states.setdefault(pg, _GroupState())
        state.is_abandoned = _any_abandoned = True
        owners, state.owners = state.owners, {}
    for drop in owners.values():
        drop()


def refuse_unusable(pg: ProcessGroup) -> None:
    """Raises before a group is touched that was given up, or that this process inherited by a fork."""
    refuse_fork(pg)
    if _any_abandoned and (state := _states.get(pg)) is not None and state.is_abandoned:
        raise WeftError(
            "this process group was given up by weft.survivors, expected the group that it returned; where it raised, "
            "call it again, or end this rank"
        )


_any_abandoned = False

# Forks ------------------------------------------------------------------------------------------------------

# Groups that were there when this process was forked; those that weft had not met yet go with the default group.
_inherited: WeakSet[Any] = WeakSet()
_is_fork = False


def is_inherited(pg: ProcessGroup) -> bool:
    """Whether another process made the group, of which this one is a fork."""
    return _is_fork and (pg in _inherited or dist.group.WORLD in _inherited)


def refuse_fork(pg: ProcessGroup) -> None:
    """Raises in a process that was forked after the group was made, before it touches the group.

    A fork has the group's connections, those to the store among them, without the threads that serve them: its waits
    do not end, and what it says there breaks the process that it came from.
    """
    if _is_fork and is_inherited(pg):
        raise WeftError(
            "this process was forked from the one that made the process group, expected a call in the process that "
            "made it; fork before init_process_group, or start the process by spawn, and make a new group there"
        )


def _inherit() -> None:
    global _is_fork, _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _inherited.update(_states.keys())
    if dist.is_initialized():
        _inherited.add(dist.group.WORLD)
    _is_fork = len(_inherited) > 0


os.register_at_fork(after_in_child=_inherit)
