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
from functools import lru_cache
from itertools import pairwise

from weft.overlap.blocks import Block, Counts, Cut, Topology, nested, row_bounds
from weft.overlap.plan import Op, OverlapPlan


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
class SendBlock:
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
    sends: tuple[SendBlock, ...]
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


@lru_cache(maxsize=512)
def lower(plan: OverlapPlan, rank: int, counts: Counts | None = None) -> Outgoing:
    """The program of `rank`; all-to-all needs to know how many rows go where."""
    if plan.op is Op.ALL_REDUCE:
        return _lower_all_reduce(plan, rank)
    if plan.op is Op.ALL_TO_ALL:
        assert counts is not None
        return _lower_all_to_all(plan, rank, counts)
    assert plan.op is Op.REDUCE_SCATTER, plan.op
    return _lower_reduce_scatter(plan, rank)


# Reduce-scatter ---------------------------------------------------------------------------------------------


def _reduce_scatter_sends(plan: OverlapPlan, rank: int) -> Iterator[SendBlock]:
    topology, bounds = plan.topology, plan.shard_bounds
    host = topology.hosts[rank]
    tags = [0] * plan.size
    cut = plan.cut(host, bounds)
    for number, block in enumerate(cut.blocks):
        for owner in topology.destinations(host):
            rows = _rows_within(block, bounds[owner], bounds[owner + 1])
            if rows is None or topology.hosts[owner] == host or topology.gateway(owner, host) != rank:
                continue
            tags[owner] += 1
            yield SendBlock(owner, tags[owner], _parts_of(plan, cut, rank, number, rows), number, rows)


def _lower_reduce_scatter(plan: OverlapPlan, rank: int) -> Outgoing:
    topology, bounds = plan.topology, plan.shard_bounds
    cuts = [plan.cut(host, bounds) for host in topology.hosts]
    sends = [_reduce_scatter_sends(plan, peer) for peer in range(plan.size)]
    inbound = _inbound_of(plan, rank, sends, cuts)
    own = bounds[rank], bounds[rank + 1]
    cut = cuts[rank]
    finishes = []
    if own[0] < own[1]:
        for box in _pieces(own, [*cut.blocks, *(i.block for i in inbound)]):
            number = next(j for j, b in enumerate(cut.blocks) if _contains(b, box))
            parts = {p.rank: p for p in _parts_of(plan, cut, rank, number, (box.m0, box.m1))}
            parts |= {i.rank: i.view(box) for i in inbound if _contains(i.block, box)}
            terms = tuple(tuple(parts[r] for r in ranks) for ranks in nested(plan.hosts, tuple(parts)))
            finishes.append(Finish(_shifted(box, own[0]), terms))
    mine = tuple(_reduce_scatter_sends(plan, rank))
    return Outgoing(
        rank, cut, mine, _expects_of(inbound, _tags_in_order(inbound)), tuple(finishes), own[1] - own[0], _as_cut(cut)
    )


# All-reduce -------------------------------------------------------------------------------------------------


def _gateways(topology: Topology, block: int) -> tuple[int, ...]:
    """Who adds up the block on each host; the first of them is its owner."""
    owner = block % topology.size
    home = topology.hosts[owner]
    return (owner, *(topology.gateway(owner, host) for host in topology.other_hosts(home)))


def _all_reduce_order(topology: Topology, host: int, blocks: int) -> tuple[int, ...]:
    """As they come for up to two hosts; for more, among each P blocks those of the next hosts first."""
    if topology.count <= 2:
        return tuple(range(blocks))
    turns = range(0, blocks, topology.size)
    return tuple(turn + r for turn in turns for r in topology.destinations(host) if turn + r < blocks)


def _all_reduce_sends(plan: OverlapPlan, rank: int) -> Iterator[SendBlock]:
    tags = [0] * plan.size
    cut = plan.cut(0, plan.shard_bounds)
    for number in _all_reduce_order(plan.topology, plan.topology.hosts[rank], len(cut.blocks)):
        block = cut.blocks[number]
        owner, *others = _gateways(plan.topology, number)
        peer = owner
        if rank == owner and len(others) == 1:
            peer = others[0]
        elif rank not in others:
            continue
        tags[peer] += 1
        rows = (block.m0, block.m1)
        yield SendBlock(peer, tags[peer], _parts_of(plan, cut, rank, number, rows), number, rows)


def _forward_tag(plan: OverlapPlan, block: int) -> int:
    """After all tags of sends, of which there is at most one a block and peer."""
    return len(plan.cut(0, plan.shard_bounds).blocks) + 1 + block


def _lower_all_reduce(plan: OverlapPlan, rank: int) -> Outgoing:
    topology = plan.topology
    cut = plan.cut(0, plan.shard_bounds)
    sends = [_all_reduce_sends(plan, peer) for peer in range(plan.size)]
    inbound = _inbound_of(plan, rank, sends, [cut] * plan.size)
    tags = _tags_in_order(inbound)
    mine = tuple(_all_reduce_sends(plan, rank))
    by_block: dict[int, list[_Inbound]] = {}
    for message in inbound:
        number = next(j for j, b in enumerate(cut.blocks) if _contains(b, message.block))
        by_block.setdefault(number, []).append(message)
    order = _all_reduce_order(topology, topology.hosts[rank], len(cut.blocks))
    finishes = []
    alone = len(topology.local(rank)) == 1
    for number, block in enumerate(cut.blocks):
        owner, *others = _gateways(topology, number)
        speaker = next(g for g in (owner, *others) if topology.hosts[g] == topology.hosts[rank])
        result = View(Space.RESULT, speaker, block.at, block.rows, block.cols, number)
        if rank != speaker:
            finishes.append(Finish(block, ((result,),), whole=True))
        elif rank == owner or len(others) == 1:
            forward = tuple((g, _forward_tag(plan, number)) for g in others) if len(others) > 1 else ()
            terms = _all_reduce_terms(plan, cut, rank, number, by_block.get(number, []), mine)
            finishes.append(Finish(block, terms, None if alone and not forward else result, forward))
        else:
            at = sum(i.block.rows * i.block.cols for i in inbound)
            message = _Inbound(len(inbound), owner, Block(block.m0, block.m1, block.n0, block.n1, at=at))
            inbound.append(message)
            tags.append(_forward_tag(plan, number))
            finishes.append(Finish(block, ((message.view(block),),), None if alone else result, whole=True))
    return Outgoing(rank, cut, mine, _expects_of(inbound, tags), tuple(finishes), plan.m, order)


def _all_reduce_terms(
    plan: OverlapPlan, cut: Cut, rank: int, number: int, inbound: Sequence[_Inbound], sends: Sequence[SendBlock]
) -> tuple[tuple[View, ...], ...]:
    block = cut.blocks[number]
    parts = {p.rank: p for p in _parts_of(plan, cut, rank, number, (block.m0, block.m1))}
    if len(parts) > 1 and any(s.block == number for s in sends):  # the sender has added them up already
        parts = {rank: View(Space.SUM, rank, block.at, block.rows, block.cols, number)}
    parts |= {i.rank: i.view(block) for i in inbound}
    return tuple(tuple(parts[r] for r in ranks) for ranks in nested(plan.hosts, tuple(parts)))


# All-to-all -------------------------------------------------------------------------------------------------


def _all_to_all_cut(plan: OverlapPlan, rank: int, counts: Counts) -> Cut:
    bounds = row_bounds(counts[rank])
    return plan.fit(m=bounds[-1], n=plan.n, k=plan.k).cut(plan.topology.hosts[rank], bounds)


def _all_to_all_sends(plan: OverlapPlan, rank: int, counts: Counts) -> Iterator[SendBlock]:
    topology, bounds = plan.topology, row_bounds(counts[rank])
    host = topology.hosts[rank]
    tags = [0] * plan.size
    cut = _all_to_all_cut(plan, rank, counts)
    for number, block in enumerate(cut.blocks):
        for owner in topology.destinations(host):
            rows = _rows_within(block, bounds[owner], bounds[owner + 1])
            if rows is not None and topology.hosts[owner] != host:
                tags[owner] += 1
                yield SendBlock(owner, tags[owner], (_part(cut, rank, number, rows),), number, rows)


def _lower_all_to_all(plan: OverlapPlan, rank: int, counts: Counts) -> Outgoing:
    cuts = [_all_to_all_cut(plan, peer, counts) for peer in range(plan.size)]
    sends = [_all_to_all_sends(plan, peer, counts) for peer in range(plan.size)]
    inbound = _inbound_of(plan, rank, sends, cuts)
    starts = row_bounds([counts[source][rank] for source in range(plan.size)])
    finishes = []
    for source in range(plan.size):
        first = row_bounds(counts[source])[rank]
        move = first - starts[source]
        if plan.topology.hosts[source] != plan.topology.hosts[rank]:
            arriving = (i for i in inbound if i.rank == source)
            finishes += [Finish(_shifted(i.block, move), ((i.view(i.block),),)) for i in arriving]
            continue
        for number, block in enumerate(cuts[source].blocks):
            rows = _rows_within(block, first, first + counts[source][rank])
            if rows is not None:
                box = _shifted(Block(*rows, block.n0, block.n1, at=0), move)
                finishes.append(Finish(box, ((_part(cuts[source], source, number, rows),),)))
    mine = tuple(_all_to_all_sends(plan, rank, counts))
    expects = _expects_of(inbound, _tags_in_order(inbound))
    return Outgoing(rank, cuts[rank], mine, expects, tuple(finishes), starts[-1], _as_cut(cuts[rank]))


# What the three share -------------------------------------------------------------------------------------------


def _part(cut: Cut, rank: int, number: int, rows: tuple[int, int]) -> View:
    """Rows of a block of `rank`."""
    block = cut.blocks[number]
    at, count = block.view_at(rows[0]), rows[1] - rows[0]
    return View(Space.PART, rank, at, count, block.cols, number, tiles=cut.tile_count(block))


def _parts_of(plan: OverlapPlan, cut: Cut, rank: int, number: int, rows: tuple[int, int]) -> tuple[View, ...]:
    """Rows of a block as all ranks on the host of `rank` have computed them; they cut alike."""
    return tuple(_part(cut, local, number, rows) for local in plan.topology.local(rank))


def _rows_within(block: Block, start: int, end: int) -> tuple[int, int] | None:
    rows = max(block.m0, start), min(block.m1, end)
    return rows if rows[0] < rows[1] else None


@dataclass(frozen=True)
class _Inbound:
    """A message that will arrive: what it holds and where it will lie."""

    number: int
    rank: int
    block: Block  # of the output's rows and columns; `at` counts in the inbox

    def view(self, box: Block) -> View:
        at = self.block.view_at(box.m0) + box.n0 - self.block.n0
        return View(Space.INBOX, self.rank, at, box.rows, box.cols, self.number)


def _inbound_of(
    plan: OverlapPlan, rank: int, sends: Sequence[Iterator[SendBlock]], cuts: Sequence[Cut]
) -> list[_Inbound]:
    """What the other ranks' `sends` bring to `rank`, stored one after the other."""
    found: list[_Inbound] = []
    at = 0
    for peer in range(plan.size):
        for send in sends[peer] if peer != rank else ():
            if send.peer == rank:
                block = cuts[peer].blocks[send.block]
                found.append(_Inbound(len(found), peer, Block(*send.rows, block.n0, block.n1, at=at)))
                at += send.elements
    return found


def _expects_of(inbound: Sequence[_Inbound], tags: Sequence[int]) -> tuple[Expect, ...]:
    return tuple(Expect(i.rank, t, i.block.at, i.block.rows * i.block.cols) for i, t in zip(inbound, tags, strict=True))


def _tags_in_order(inbound: Sequence[_Inbound]) -> list[int]:
    """Tags as the senders gave them: counted from 1 for each sender."""
    seen: dict[int, int] = {}
    tags = []
    for message in inbound:
        seen[message.rank] = seen.get(message.rank, 0) + 1
        tags.append(seen[message.rank])
    return tags


def _contains(outer: Block, box: Block) -> bool:
    return outer.m0 <= box.m0 and box.m1 <= outer.m1 and outer.n0 <= box.n0 and box.n1 <= outer.n1


def _pieces(own: tuple[int, int], blocks: Sequence[Block]) -> list[Block]:
    """The rows `own` in boxes that no block's edge crosses; `at` is not used."""
    row_edges = {*own} | {e for b in blocks for e in (b.m0, b.m1) if own[0] < e < own[1]}
    col_edges = {e for b in blocks for e in (b.n0, b.n1)}
    rows, cols = list(pairwise(sorted(row_edges))), list(pairwise(sorted(col_edges)))
    return [Block(m0, m1, n0, n1, at=0) for m0, m1 in rows for n0, n1 in cols]


def _shifted(box: Block, rows: int) -> Block:
    return Block(box.m0 - rows, box.m1 - rows, box.n0, box.n1, at=0)


def _as_cut(cut: Cut) -> tuple[int, ...]:
    return tuple(range(len(cut.blocks)))
