"""What one rank has to do in a plan, in order. Pure.

A *head* is the rank of a host that receives a chunk for all ranks there; the others copy it out of the head's
memory, which they share. The chunks that a head publishes so are numbered from 0 in its *ring*: one ring for
what it received, one for what it holds itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from weft.layout import Ints
from weft.reshard.units import Ranks

if TYPE_CHECKING:
    from weft.reshard.plan import Plan


class Ring(Enum):
    """Which of a rank's two published sequences; the value is its place in the window."""

    RECEIVED = 0
    OWN = 1


@dataclass(frozen=True)
class ReceiveChunk:
    """A chunk that arrives from `sender`.

    adds:    this rank reduces its own term with it; `last_term`: no rank after it does
    takers:  the ranks of this host that need it from here, this one included
    forward: the ranks that it is passed on to
    depth:   how many hops it has gone when it is here
    number:  its place in the ring; -1 when nobody else takes it, so that it is not published
    """

    chunk: int
    sender: int
    adds: bool
    last_term: bool
    takers: Ranks
    forward: Ranks
    depth: int
    number: int


@dataclass(frozen=True)
class SendChunk:
    """A chunk that this rank holds and sends to `receivers`, or publishes for `takers` as `number` of its ring."""

    chunk: int
    receivers: Ranks
    takers: Ranks = ()
    number: int = -1


@dataclass(frozen=True)
class TakeChunk:
    """A chunk that this rank copies from the ring of `head`."""

    chunk: int
    head: int
    ring: Ring
    number: int


@dataclass(frozen=True)
class Script:
    """All that a rank does, each list in the order of the chunks.

    published: for each ring the takers of each number, to know when a slot may be used again
    keeps:     units that this rank both holds and needs, as indices
    totals:    how many chunks each rank of the host publishes in each ring
    deepest:   the most hops that any chunk of the plan goes
    """

    receives: tuple[ReceiveChunk, ...]
    sends: tuple[SendChunk, ...]
    takes: tuple[TakeChunk, ...]
    published: dict[Ring, tuple[Ranks, ...]]
    keeps: Ints
    totals: dict[tuple[int, Ring], int]
    deepest: int

    def tensors_read(self, plan: Plan) -> set[int]:
        """The tensors, by index, of which the rank reads its source shard: to send it, to keep it, or to add it."""
        chunks = [each.chunk for each in self.sends] + [each.chunk for each in self.receives if each.adds]
        streams = np.unique(plan.chunks.stream[chunks]) if chunks else np.zeros(0, np.int64)
        units = plan.units
        sent = units.tensor[np.isin(units.stream, streams)]
        return {int(index) for index in np.unique(np.concatenate([sent, units.tensor[self.keeps]]))}


class ScriptWriter:
    """Writes the scripts of a plan; made once for all ranks of a host."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        hops = plan.hops
        self._first = np.searchsorted(hops.chunk, np.arange(len(plan.chunks) + 1))
        self._takers: dict[tuple[int, int, int], Ranks] = {}
        self._depth = _depths(plan)
        self._deepest = int(self._depth.max(initial=0))

    def of(self, rank: int) -> Script:
        """The script of a rank; an empty one for a rank that the plan does not name."""
        host = self.plan.host_of.get(rank)
        receives, sends = self._receives(rank), self._sends(rank)
        neighbours = [other for other, place in self.plan.host_of.items() if place == host]
        takes: list[TakeChunk] = []
        totals: dict[tuple[int, Ring], int] = {}
        for head in neighbours:
            theirs = (receives, sends) if head == rank else (self._receives(head), self._sends(head))
            takes += _takes(rank, head, *theirs)
            totals[head, Ring.RECEIVED] = sum(one.number >= 0 for one in theirs[0])
            totals[head, Ring.OWN] = sum(one.number >= 0 for one in theirs[1])
        takes.sort(key=lambda take: take.chunk)
        published = {
            Ring.RECEIVED: tuple(each.takers for each in receives if each.number >= 0),
            Ring.OWN: tuple(each.takers for each in sends if each.number >= 0),
        }
        return Script(tuple(receives), tuple(sends), tuple(takes), published, self._keeps(rank), totals, self._deepest)

    def is_published(self) -> tuple[bool, bool]:
        """Whether any rank publishes what it received, and what it holds."""
        hops = self.plan.hops
        own = bool(np.any(hops.sender == hops.receiver))
        received = any(each.number >= 0 for rank in np.unique(hops.receiver) for each in self._receives(int(rank)))
        return received, own

    def _receives(self, rank: int) -> list[ReceiveChunk]:
        hops = self.plan.hops
        mine = np.nonzero((hops.receiver == rank) & (hops.sender != rank))[0].tolist()
        forward = self._onward(rank, mine)
        found: list[ReceiveChunk] = []
        number = 0
        for h in mine:
            chunk, adds = int(hops.chunk[h]), bool(hops.adds[h])
            last = adds and not hops.adds[h + 1 : self._first[chunk + 1]].any()
            takers = self._takers_of(chunk, rank) if last or not adds else ()
            shared = any(taker != rank for taker in takers)
            sender, onward = int(hops.sender[h]), tuple(forward.get(h, ()))
            found.append(
                ReceiveChunk(chunk, sender, adds, last, takers, onward, int(self._depth[h]), number if shared else -1)
            )
            number += shared
        return found

    def _onward(self, rank: int, arriving: list[int]) -> dict[int, list[int]]:
        """To whom a rank passes on what a hop brought, by hop; what it holds itself is under -1 - (its own hop)."""
        hops = self.plan.hops
        onward: dict[int, list[int]] = {}
        for h in np.nonzero((hops.sender == rank) & (hops.receiver != rank))[0].tolist():
            before = bisect_left(arriving, h) - 1
            brought = arriving[before] if before >= 0 else -1
            if brought < 0 or hops.chunk[brought] != hops.chunk[h]:
                brought = -1 - h  # not brought by any hop
            onward.setdefault(brought, []).append(int(hops.receiver[h]))
        return onward

    def _sends(self, rank: int) -> list[SendChunk]:
        hops = self.plan.hops
        arriving = np.nonzero((hops.receiver == rank) & (hops.sender != rank))[0].tolist()
        to: dict[int, list[int]] = {}
        for h, receivers in self._onward(rank, arriving).items():
            if h < 0:
                to.setdefault(int(hops.chunk[-1 - h]), []).extend(receivers)
        found = [SendChunk(chunk, tuple(receivers)) for chunk, receivers in to.items()]
        shared = hops.chunk[(hops.sender == rank) & (hops.receiver == rank)].tolist()
        found += [SendChunk(chunk, (), self._takers_of(chunk, rank), number) for number, chunk in enumerate(shared)]
        return sorted(found, key=lambda each: each.chunk)

    def _takers_of(self, chunk: int, head: int) -> Ranks:
        """The ranks of the head's host that need a chunk and do not hold it."""
        streams, host_of = self.plan.streams, self.plan.host_of
        stream = self.plan.chunks.stream[chunk]
        key = (int(streams.holders[stream]), int(streams.takers[stream]), host_of[head])
        if key not in self._takers:
            terms, takers = streams.holder_sets[key[0]], streams.taker_sets[key[1]]
            have = set(terms[0]) if len(terms) == 1 else set()
            self._takers[key] = tuple(rank for rank in takers if host_of[rank] == key[2] and rank not in have)
        return self._takers[key]

    def _keeps(self, rank: int) -> Ints:
        streams = self.plan.streams
        holds = np.array([len(terms) == 1 and rank in terms[0] for terms in streams.holder_sets], bool)
        needs = np.array([rank in takers for takers in streams.taker_sets], bool)
        if not holds.any() or not needs.any():
            return np.zeros(0, np.int64)
        kept = holds[streams.holders] & needs[streams.takers]
        return np.nonzero(kept[self.plan.units.stream])[0]


def _depths(plan: Plan) -> Ints:
    """[hops] how many hops the chunk has gone after each."""
    depth = np.ones(len(plan.hops), np.int64)
    hops = plan.hops
    brought: dict[int, int] = {}  # by rank, of the chunk at hand
    chunk = -1
    for h, (c, a, b) in enumerate(zip(*(x.tolist() for x in (hops.chunk, hops.sender, hops.receiver)), strict=True)):
        if c != chunk:
            brought, chunk = {}, c
        depth[h] = 0 if a == b else brought.get(a, 0) + 1
        brought[b] = int(depth[h])
    return depth


def _takes(rank: int, head: int, receives: Iterable[ReceiveChunk], sends: Iterable[SendChunk]) -> list[TakeChunk]:
    found = [TakeChunk(r.chunk, head, Ring.RECEIVED, r.number) for r in receives if r.number >= 0 and rank in r.takers]
    found += [TakeChunk(s.chunk, head, Ring.OWN, s.number) for s in sends if s.number >= 0 and rank in s.takers]
    return found
