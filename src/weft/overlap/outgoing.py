"""Matmuls whose output travels: which blocks a rank sends to whom, what it receives, and how it adds that up.

`lower` turns a plan into the program of one rank. The rank computes its blocks in order; a second thread walks
`sends`; what arrives is listed in `expects`; `finishes` make the output. All ranks lower the same plan, so that every
rank knows what every other one will send, and nothing but data travels.

*Who sends.* Inside a host nobody does: a rank's blocks lie in its window, where the others read them. Across hosts one
rank of the host, the *gateway* to the owner of the rows, adds up the host's partial results and sends the sum, so that
a byte crosses a card once.

*Who adds up.* Reduce-scatter: the owner of the rows. All-reduce: block j belongs to rank j mod P; with two hosts, the
gateways of both exchange their host's sums and both add them up, which takes as many bytes and one message less. With
more hosts each computes the blocks of the next hosts before its own, so that no card has all others against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from weft.overlap.plan import OverlapPlan
from weft.overlap.tiles import Block, Cut


class Space(str, Enum):
    """Where a view lies: computed blocks, sums of a host's blocks, received messages, or published results."""

    PART = "part"
    SUM = "sum"
    INBOX = "inbox"
    RESULT = "result"


@dataclass(frozen=True)
class View:
    """`rows` x `cols` elements, end to end from element `at` of a space of `rank`.

    They are there when number `need` is: a block that `rank` has computed, all `tiles` of it (PART), added up (SUM)
    or published (RESULT), or one of `expects` that has arrived (INBOX).
    """

    space: Space
    rank: int
    at: int
    rows: int
    cols: int
    need: int
    tiles: int = 1


@dataclass(frozen=True)
class Send:
    """Add up `parts`, in order, and send the sum to `peer`; one part is sent as it is."""

    peer: int
    tag: int
    parts: tuple[View, ...]
    block: int
    rows: tuple[int, int]

    @property
    def elements(self) -> int:
        return self.parts[0].rows * self.parts[0].cols


@dataclass(frozen=True)
class Expect:
    """`elements` elements from `peer`, to be stored from element `at` of the inbox on."""

    peer: int
    tag: int
    at: int
    elements: int


@dataclass(frozen=True)
class Finish:
    """output[box] = the sum of `terms`: of the views of each term, in order, and then of the terms, in order.

    Then the box goes to `result`, if there is one, where the other ranks of the host find it, and to the `forward`
    ranks: (rank, tag). `whole` says that the only view is such a result, which another rank has finished.
    """

    box: Block
    terms: tuple[tuple[View, ...], ...]
    result: View | None = None
    forward: tuple[tuple[int, int], ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class Outgoing:
    """The program of one rank for an op whose output travels; its output has shape [out_rows, n]."""

    rank: int
    cut: Cut
    sends: tuple[Send, ...]
    expects: tuple[Expect, ...]
    finishes: tuple[Finish, ...]
    out_rows: int
    order: tuple[int, ...]  # of computing the blocks

    @property
    def inbox_elements(self) -> int:
        return sum(e.elements for e in self.expects)

    @property
    def early(self) -> bool:
        """Whether others wait for what this rank finishes, so that it must not wait for its own matmul first."""
        return any(f.forward for f in self.finishes)


Counts = tuple[tuple[int, ...], ...]  # counts[s][d]: how many rows of rank s go to rank d


def part(cut: Cut, rank: int, number: int, rows: tuple[int, int]) -> View:
    """Rows of a block of `rank`."""
    block = cut.blocks[number]
    at, count = block.view_at(rows[0]), rows[1] - rows[0]
    return View(Space.PART, rank, at, count, block.cols, number, tiles=cut.tile_count(block))


def parts_of(plan: OverlapPlan, cut: Cut, rank: int, number: int, rows: tuple[int, int]) -> tuple[View, ...]:
    """Rows of a block as all ranks on the host of `rank` have computed them; they cut alike."""
    return tuple(part(cut, local, number, rows) for local in plan.topology.local(rank))


def overlap(block: Block, start: int, end: int) -> tuple[int, int] | None:
    rows = max(block.m0, start), min(block.m1, end)
    return rows if rows[0] < rows[1] else None


@dataclass(frozen=True)
class Inbound:
    """A message that will arrive: what it holds and where it will lie."""

    number: int
    rank: int
    block: Block  # of the output's rows and columns; `at` counts in the inbox

    def view(self, box: Block) -> View:
        at = self.block.view_at(box.m0) + box.n0 - self.block.n0
        return View(Space.INBOX, self.rank, at, box.rows, box.cols, self.number)


def inbound_of(plan: OverlapPlan, rank: int, sends: Sequence[Iterator[Send]], cuts: Sequence[Cut]) -> list[Inbound]:
    """What the other ranks' `sends` bring to `rank`, stored one after the other."""
    found: list[Inbound] = []
    at = 0
    for peer in range(plan.size):
        for send in sends[peer] if peer != rank else ():
            if send.peer == rank:
                block = cuts[peer].blocks[send.block]
                found.append(Inbound(len(found), peer, Block(*send.rows, block.n0, block.n1, at=at)))
                at += send.elements
    return found


def expects_of(inbound: Sequence[Inbound], tags: Sequence[int]) -> tuple[Expect, ...]:
    return tuple(Expect(i.rank, t, i.block.at, i.block.rows * i.block.cols) for i, t in zip(inbound, tags, strict=True))


def tags_in_order(inbound: Sequence[Inbound]) -> list[int]:
    """Tags as the senders gave them: counted from 1 for each sender."""
    seen: dict[int, int] = {}
    tags = []
    for message in inbound:
        seen[message.rank] = seen.get(message.rank, 0) + 1
        tags.append(seen[message.rank])
    return tags


def contains(outer: Block, box: Block) -> bool:
    return outer.m0 <= box.m0 and box.m1 <= outer.m1 and outer.n0 <= box.n0 and box.n1 <= outer.n1


def pieces(own: tuple[int, int], blocks: Sequence[Block]) -> list[Block]:
    """The rows `own` in boxes that no block's edge crosses; `at` is not used."""
    row_edges = {*own} | {e for b in blocks for e in (b.m0, b.m1) if own[0] < e < own[1]}
    col_edges = {e for b in blocks for e in (b.n0, b.n1)}
    rows, cols = list(pairwise(sorted(row_edges))), list(pairwise(sorted(col_edges)))
    return [Block(m0, m1, n0, n1, at=0) for m0, m1 in rows for n0, n1 in cols]


def shifted(box: Block, rows: int) -> Block:
    return Block(box.m0 - rows, box.m1 - rows, box.n0, box.n1, at=0)


def row_bounds(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each destination's rows start when rows are sorted by destination, and the end.

    >>> row_bounds([2, 0, 3])
    (0, 2, 2, 5)
    """
    return tuple(sum(counts[:i]) for i in range(len(counts) + 1))
