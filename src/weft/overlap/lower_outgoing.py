"""From a plan to the programs of its ranks, for the ops whose output travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from weft.overlap.outgoing import (
    Counts,
    Finish,
    Inbound,
    Outgoing,
    Send,
    Space,
    View,
    contains,
    expects_of,
    inbound_of,
    overlap,
    part,
    parts_of,
    pieces,
    row_bounds,
    shifted,
    tags_in_order,
)  # fmt: skip
from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.tiles import Block, Cut
from weft.overlap.topology import Topology, nested


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


def _as_cut(cut: Cut) -> tuple[int, ...]:
    return tuple(range(len(cut.blocks)))


# Reduce-scatter ---------------------------------------------------------------------------------------------


def _reduce_scatter_sends(plan: OverlapPlan, rank: int) -> Iterator[Send]:
    topology, bounds = plan.topology, plan.shard_bounds
    host = topology.hosts[rank]
    tags = [0] * plan.size
    cut = plan.cut(host, bounds)
    for number, block in enumerate(cut.blocks):
        for owner in topology.destinations(host):
            rows = overlap(block, bounds[owner], bounds[owner + 1])
            if rows is None or topology.hosts[owner] == host or topology.gateway(owner, host) != rank:
                continue
            tags[owner] += 1
            yield Send(owner, tags[owner], parts_of(plan, cut, rank, number, rows), number, rows)


def _lower_reduce_scatter(plan: OverlapPlan, rank: int) -> Outgoing:
    topology, bounds = plan.topology, plan.shard_bounds
    cuts = [plan.cut(host, bounds) for host in topology.hosts]
    sends = [_reduce_scatter_sends(plan, peer) for peer in range(plan.size)]
    inbound = inbound_of(plan, rank, sends, cuts)
    own = bounds[rank], bounds[rank + 1]
    cut = cuts[rank]
    finishes = []
    if own[0] < own[1]:
        for box in pieces(own, [*cut.blocks, *(i.block for i in inbound)]):
            number = next(j for j, b in enumerate(cut.blocks) if contains(b, box))
            parts = {p.rank: p for p in parts_of(plan, cut, rank, number, (box.m0, box.m1))}
            parts |= {i.rank: i.view(box) for i in inbound if contains(i.block, box)}
            terms = tuple(tuple(parts[r] for r in ranks) for ranks in nested(plan.hosts, tuple(parts)))
            finishes.append(Finish(shifted(box, own[0]), terms))
    mine = tuple(_reduce_scatter_sends(plan, rank))
    return Outgoing(
        rank, cut, mine, expects_of(inbound, tags_in_order(inbound)), tuple(finishes), own[1] - own[0], _as_cut(cut)
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


def _all_reduce_sends(plan: OverlapPlan, rank: int) -> Iterator[Send]:
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
        yield Send(peer, tags[peer], parts_of(plan, cut, rank, number, rows), number, rows)


def _forward_tag(plan: OverlapPlan, block: int) -> int:
    """After all tags of sends, of which there is at most one a block and peer."""
    return len(plan.cut(0, plan.shard_bounds).blocks) + 1 + block


def _lower_all_reduce(plan: OverlapPlan, rank: int) -> Outgoing:
    topology = plan.topology
    cut = plan.cut(0, plan.shard_bounds)
    sends = [_all_reduce_sends(plan, peer) for peer in range(plan.size)]
    inbound = inbound_of(plan, rank, sends, [cut] * plan.size)
    tags = tags_in_order(inbound)
    mine = tuple(_all_reduce_sends(plan, rank))
    by_block: dict[int, list[Inbound]] = {}
    for message in inbound:
        number = next(j for j, b in enumerate(cut.blocks) if contains(b, message.block))
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
            message = Inbound(len(inbound), owner, Block(block.m0, block.m1, block.n0, block.n1, at=at))
            inbound.append(message)
            tags.append(_forward_tag(plan, number))
            finishes.append(Finish(block, ((message.view(block),),), None if alone else result, whole=True))
    return Outgoing(rank, cut, mine, expects_of(inbound, tags), tuple(finishes), plan.m, order)


def _all_reduce_terms(
    plan: OverlapPlan, cut: Cut, rank: int, number: int, inbound: Sequence[Inbound], sends: Sequence[Send]
) -> tuple[tuple[View, ...], ...]:
    block = cut.blocks[number]
    parts = {p.rank: p for p in parts_of(plan, cut, rank, number, (block.m0, block.m1))}
    if len(parts) > 1 and any(s.block == number for s in sends):  # the sender has added them up already
        parts = {rank: View(Space.SUM, rank, block.at, block.rows, block.cols, number)}
    parts |= {i.rank: i.view(block) for i in inbound}
    return tuple(tuple(parts[r] for r in ranks) for ranks in nested(plan.hosts, tuple(parts)))


# All-to-all -------------------------------------------------------------------------------------------------


def _all_to_all_cut(plan: OverlapPlan, rank: int, counts: Counts) -> Cut:
    bounds = row_bounds(counts[rank])
    return plan.fit(m=bounds[-1], n=plan.n, k=plan.k).cut(plan.topology.hosts[rank], bounds)


def _all_to_all_sends(plan: OverlapPlan, rank: int, counts: Counts) -> Iterator[Send]:
    topology, bounds = plan.topology, row_bounds(counts[rank])
    host = topology.hosts[rank]
    tags = [0] * plan.size
    cut = _all_to_all_cut(plan, rank, counts)
    for number, block in enumerate(cut.blocks):
        for owner in topology.destinations(host):
            rows = overlap(block, bounds[owner], bounds[owner + 1])
            if rows is not None and topology.hosts[owner] != host:
                tags[owner] += 1
                yield Send(owner, tags[owner], (part(cut, rank, number, rows),), number, rows)


def _lower_all_to_all(plan: OverlapPlan, rank: int, counts: Counts) -> Outgoing:
    cuts = [_all_to_all_cut(plan, peer, counts) for peer in range(plan.size)]
    sends = [_all_to_all_sends(plan, peer, counts) for peer in range(plan.size)]
    inbound = inbound_of(plan, rank, sends, cuts)
    starts = row_bounds([counts[source][rank] for source in range(plan.size)])
    finishes = []
    for source in range(plan.size):
        first = row_bounds(counts[source])[rank]
        move = first - starts[source]
        if plan.topology.hosts[source] != plan.topology.hosts[rank]:
            arriving = (i for i in inbound if i.rank == source)
            finishes += [Finish(shifted(i.block, move), ((i.view(i.block),),)) for i in arriving]
            continue
        for number, block in enumerate(cuts[source].blocks):
            rows = overlap(block, first, first + counts[source][rank])
            if rows is not None:
                box = shifted(Block(*rows, block.n0, block.n1, at=0), move)
                finishes.append(Finish(box, ((part(cuts[source], source, number, rows),),)))
    mine = tuple(_all_to_all_sends(plan, rank, counts))
    expects = expects_of(inbound, tags_in_order(inbound))
    return Outgoing(rank, cuts[rank], mine, expects, tuple(finishes), starts[-1], _as_cut(cuts[rank]))
