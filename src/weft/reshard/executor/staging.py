"""Memory for chunks under way, bounded: slots that this rank owns, and slots that its host shares.

A rank publishes the n-th chunk of a ring in slot n modulo the number of slots, and uses the slot again when
all takers have said that they are done with it. The counts go on from run to run, so that nobody has to wait
for the others in between.

    counters of each rank:  failed | ready of both rings | done of both rings, for each rank of the host
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.comm import Counters, PeerLost, Window
from weft.comm.deadline import Deadline
from weft.errors import PeerTimeout
from weft.reshard.executor.script import Ring, Script
from weft.reshard.order import RECEIVES_AHEAD, SENDS_AHEAD
from weft.reshard.units import Ranks

# How long a wait sleeps before it looks whether this rank, or one on its host, has failed.
_SLICE_SECONDS = 0.2
_FAILED, _READY, _DONE = 0, 1, 3  # where the counters of each kind begin


class Stopped(Exception):
    """Another thread of this rank failed; its error is the one to show."""


@dataclass(frozen=True)
class Slots:
    """How many chunks fit: on the way in (published, or for this rank alone), on the way out, and shared.

    >>> Slots.within(64 << 20, slot=1 << 20, published=True, own=False)
    Slots(size=1048576, receive=16, send=8, share=0)
    """

    size: int
    receive: int
    send: int
    share: int

    @classmethod
    def within(cls, limit: int, *, slot: int, published: bool, own: bool) -> Slots:
        """As many as are of use, and fewer if `limit` bytes do not hold them.

        A rank has slots for chunks that others take as well and for those that it takes alone.
        """
        wanted = [RECEIVES_AHEAD, SENDS_AHEAD, SENDS_AHEAD if own else 0]
        rows = 2 if published else 1
        room = limit // slot
        if room < rows + 1 + own:
            raise ValueError(
                f"max_staging_bytes is {limit}, expected at least {slot * (rows + 1 + own)}, room for one chunk of "
                f"{slot} bytes for each use; give more, or plan with smaller chunk_bytes"
            )
        while wanted[0] * rows + wanted[1] + wanted[2] > room:
            wanted = [max(1, n // 2) if n else 0 for n in wanted]
        return cls(slot, *wanted)


class Rings:
    """What the ranks of a host publish for each other: two rings of slots on each rank, and counters.

    They lie in a window that other rings may share: from `first_byte` of each rank's memory and from
    `first_counter` of its counters on. Runs follow each other; each numbers its chunks from 0, and its ranks call
    `begin` with their scripts of the same plan.
    """

    def __init__(
        self,
        window: Window | None,
        world: Ranks,
        *,
        rank: int,
        counts: Mapping[Ring, int],
        slot_bytes: int,
        first_byte: int = 0,
        first_counter: int = 0,
    ) -> None:
        """`world[i]` is what plans call the window's rank i, `counts` the slots of each ring.

        Without a window nothing is shared: for plans that let no rank copy from another.
        """
        self._window, self._rank = window, rank
        self._slots, self._slot_bytes, self._first_byte = dict(counts), slot_bytes, first_byte
        self._members = {world[member]: member for member in (window.ranks if window is not None else ())}
        self._places = {rank: i for i, rank in enumerate(self._members)}
        self._counters: dict[int, Counters] = {}
        for each, member in self._members.items():
            assert window is not None
            words = window.counters(member).tensor[first_counter:]
            self._counters[each] = Counters.over(words[: counters_for(len(self._members))])
        self._memory: dict[tuple[int, Ring, int], Tensor] = {}  # slots, by the rank that fills them
        self._first: dict[tuple[int, Ring], int] = {}  # by rank and ring: the number of the present run's chunk 0
        self._published: dict[tuple[int, Ring], int] = {}  # by rank and ring: how many, with the present run's
        self._taken: dict[tuple[Ring, int], int] = {}  # by ring and taker: how many of this rank's, likewise
        # This rank's latest chunks: for each taker, how many chunks of the ring it has taken with that one.
        self._takers: dict[Ring, dict[int, dict[int, int]]] = {ring: {} for ring in Ring}

    def begin(self, script: Script) -> None:
        """A run begins: its chunks are numbered on from those of the runs before, on all ranks of the host alike."""
        for key, count in script.totals.items():
            self._first[key] = self._published.get(key, 0)
            self._published[key] = self._first[key] + count
        for ring, published in script.published.items():
            first = self._first.get((self._rank, ring), 0)
            recent = self._takers[ring]
            for old in [number for number in recent if number < first - self._slots[ring]]:
                del recent[old]
            for number, takers in enumerate(published, start=first):
                for taker in takers:
                    self._taken[ring, taker] = self._taken.get((ring, taker), 0) + 1
                recent[number] = {taker: self._taken[ring, taker] for taker in takers}

    def slot(self, head: int, ring: Ring, number: int, nbytes: int) -> Tensor:
        """The memory of a published chunk: uint8 [nbytes]."""
        key = (head, ring, (self._first[head, ring] + number) % self._slots[ring])
        if key not in self._memory:
            assert self._window is not None
            place = key[2] + (self._slots[Ring.RECEIVED] if ring is Ring.OWN else 0)
            offset = self._first_byte + place * self._slot_bytes
            self._memory[key] = self._window.view(self._members[head], (self._slot_bytes,), torch.uint8, offset=offset)
        return self._memory[key][:nbytes]

    def slots_of(self, ring: Ring) -> int:
        """How many chunks of a ring are there at once."""
        return self._slots[ring]

    def publish(self, ring: Ring) -> None:
        """Says that the next chunk of this rank's ring is there."""
        self._counters[self._rank].add(_READY + ring.value)

    def wait_ready(self, head: int, ring: Ring, number: int, wait: Wait, what: Callable[[], str]) -> None:
        """Returns when `head` has published its chunk `number`."""
        wait.until(self._counters[head], *self._ready(head, ring, number), self._counters[self._rank], what)

    def take(self, head: int, ring: Ring, number: int, into: Tensor) -> bool:
        """Waits for a chunk of `head`, copies it and says that it is done; False if it does not come for a while."""
        counters = self._counters[head]
        done = (counters, self._done_index(ring, self._rank))
        source = self.slot(head, ring, number, into.nbytes)
        return counters.take(*self._ready(head, ring, number), source, into, done=done, timeout=_SLICE_SECONDS)

    def done(self, head: int, ring: Ring) -> None:
        """Says that this rank is done with the next chunk that it takes from `head`."""
        self._counters[head].add(self._done_index(ring, self._rank))

    def wait_free(self, ring: Ring, number: int, wait: Wait) -> None:
        """Returns when this rank may write its chunk `number`: the one that is in its slot has been taken."""
        before = self._first[self._rank, ring] + number - self._slots[ring]
        for taker, count in self._takers[ring].get(before, {}).items():
            own = self._counters[self._rank]
            what = partial("rank {} to copy chunk {} of those {} on this rank".format, taker, before, ring.name.lower())
            wait.until(own, self._done_index(ring, taker), count, own, what)

    def fail(self) -> None:
        """Tells the ranks of this host that this one gave up."""
        for rank, counters in self._counters.items():
            if rank != self._rank:
                counters.add(_FAILED)

    def close(self) -> None:
        """Lets go of the window's memory."""
        self._counters, self._memory = {}, {}

    def _ready(self, head: int, ring: Ring, number: int) -> tuple[int, int]:
        """The counter of `head` that tells of chunk `number`, and from which value on."""
        return _READY + ring.value, self._first[head, ring] + number + 1

    def _done_index(self, ring: Ring, taker: int) -> int:
        return _DONE + 2 * self._places[taker] + ring.value


def counters_for(neighbours: int) -> int:
    """How many counters the rings of one rank need, `neighbours` being the ranks of a host."""
    return _DONE + 2 * neighbours


class Wait:
    """Waits on counters that end at a deadline, or when something has failed."""

    def __init__(self, timeout: float, stop: threading.Event) -> None:
        self.timeout = timeout
        self.stop = stop

    def until(self, counters: Counters, index: int, value: int, own: Counters, what: Callable[[], str]) -> None:
        """Returns when a counter has reached `value`; `own` are this rank's, the first of which tells of failure."""
        if counters.has_reached(index, value):
            return
        deadline = Deadline.after(self.timeout)
        while True:
            try:
                counters.wait(index, value, timeout=min(_SLICE_SECONDS, deadline.left() or 1e-3), what="")
                return
            except PeerTimeout:
                if self.stop.is_set():
                    raise Stopped from None
                if own.read(_FAILED):
                    raise PeerLost(f"{what()}: a rank of this host gave up; its own error says why") from None
                if deadline.left() == 0.0:
                    raise PeerTimeout(what(), seconds=self.timeout) from None


class Pool:
    """A rank's own slots, in turn: uint8 [count, size], made when first used."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._memory: Tensor | None = None

    def slot(self, number: int, nbytes: int) -> Tensor:
        """The memory of the n-th chunk: uint8 [nbytes]."""
        if self._memory is None:
            self._memory = torch.empty((self.count, self.size), dtype=torch.uint8, device="cpu")
        return self._memory[number % self.count, :nbytes]
