"""Index maps and programs: every tile once, every row to its owner, every partial result in every sum, once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.host_collectives import add_in_order
from weft.kernels.tiles import Tiling
from weft.overlap import blocks, incoming, outgoing
from weft.overlap.blocks import (
    Axis,
    Topology,
    chunk_bounds,
    cut_cols,
    cut_points,
    cut_rows,
    nested,
    rows_by_destination,
)
from weft.overlap.executor.sums import add_terms
from weft.overlap.incoming import Store
from weft.overlap.outgoing import Space
from weft.overlap.plan import Op, OverlapPlan, Transport


@given(st.integers(0, 100), st.integers(1, 9))
def test_chunks_are_those_of_torch(total: int, parts: int) -> None:
    sizes = [b - a for a, b in pairwise(chunk_bounds(total, parts))]
    expected = [len(c) for c in torch.arange(total).chunk(parts)] if total else []
    assert sizes == expected + [0] * (parts - len(expected))


weights = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(st.integers(0, 60), weights)
def test_cut_points_cover_without_empty_parts(units: int, sizes: list[int]) -> None:
    points = cut_points(units, sizes)
    assert points[0] == 0
    assert points[-1] == units
    assert all(a < b for a, b in pairwise(points))


@given(weights)
def test_weights_that_add_up_are_the_sizes(sizes: list[int]) -> None:
    points = cut_points(sum(sizes), sizes)
    assert [b - a for a, b in pairwise(points)] == sizes


def stored_at(cut: blocks.Cut) -> Iterator[tuple[int, int, int]]:
    """(row, column, place) of every element: the map that a consumer undoes."""
    for block in cut.blocks:
        for row in range(block.m0, block.m1):
            for col in range(block.n0, block.n1):
                yield row, col, block.view_at(row) + col - block.n0


def is_permutation(cut: blocks.Cut) -> bool:
    places = sorted(place for _, _, place in stored_at(cut))
    elements = {(row, col) for row, col, _ in stored_at(cut)}
    count = cut.tiling.m * cut.tiling.n
    return places == list(range(count)) and len(elements) == count


@given(st.integers(0, 40), st.integers(0, 100), st.integers(1, 9), weights, st.integers(1, 4), st.randoms())
def test_storage_is_a_permutation_and_tiles_are_in_one_block(m, n, tile_m, sizes, parts, random) -> None:
    tiling = Tiling(m, n, tile_m, 32)
    bounds = chunk_bounds(m, parts)
    order = list(range(parts))
    random.shuffle(order)
    rows = rows_by_destination(tiling, bounds, order)
    assert sorted(rows) == list(range(tiling.rows))
    for cut in (cut_rows(tiling, sizes, rows), cut_cols(tiling, sizes)):
        assert is_permutation(cut)
        schedule = cut.schedule()
        assert schedule.groups == len(cut.blocks)
        assert sorted(t for b in cut.blocks for t in cut.tiles(b)) == list(range(tiling.count))


def test_remote_rows_come_first_and_own_last() -> None:
    p = OverlapPlan(Op.REDUCE_SCATTER, 12, 32, 4, "float32", (0, 1, 2), tile_m=2, tile_n=32, groups=(1,) * 6)
    for rank, firsts in [(0, (4, 8, 0)), (1, (8, 0, 4)), (2, (0, 4, 8))]:
        rows = [b.m0 for b in outgoing.lower(p, rank).cut.blocks]
        assert tuple(rows[::2]) == firsts


# Programs, run on tensors in one process --------------------------------------------------------------------

hosts_of_ranks = st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 1, 0), (0, 0, 0), (0, 0, 1)])


@st.composite
def plans(draw, ops) -> OverlapPlan:
    op = draw(st.sampled_from(ops))
    axis = Axis.ROWS if op.gathers else draw(st.sampled_from(list(Axis)))
    return OverlapPlan(
        op,
        m=draw(st.integers(0, 40)),
        n=draw(st.integers(1, 100)),
        k=3,
        dtype="float32",
        hosts=draw(hosts_of_ranks),
        transport=draw(st.sampled_from(list(Transport))),
        axis=axis,
        tile_m=draw(st.integers(1, 16)),
        tile_n=32,
        groups=tuple(draw(st.lists(st.integers(1, 5), max_size=5))),
    )


def outgoing_results(p: OverlapPlan, products: list[torch.Tensor], counts=None) -> list[torch.Tensor]:
    """What each rank ends with, when rank r computes products[r]; plain copies instead of windows and messages."""
    programs = [outgoing.lower(p, rank, counts) for rank in range(p.size)]
    parts = []
    for program, product in zip(programs, products, strict=True):
        stored = torch.full((product.numel(),), float("nan"))
        for row, col, place in stored_at(program.cut):
            stored[place] = product[row, col]
        parts.append(stored)
    views = {Space.PART: parts, Space.RESULT: [t.clone() for t in parts], Space.SUM: [t.clone() for t in parts]}
    mail = {}

    def view(v, rank, inbox):
        memory_ = inbox if v.space is Space.INBOX else views[v.space][v.rank]
        return memory_[v.at : v.at + v.rows * v.cols].view(v.rows, v.cols)

    for rank, program in enumerate(programs):
        for send in program.sends:
            total = torch.empty(send.parts[0].rows, send.parts[0].cols)
            add_in_order([view(v, rank, None) for v in send.parts], total)
            at = send.parts[0].at
            views[Space.SUM][rank][at : at + total.numel()] = total.reshape(-1)
            assert (rank, send.peer, send.tag) not in mail
            mail[rank, send.peer, send.tag] = total.reshape(-1)
    outputs = [torch.full((program.out_rows, p.n), float("nan")) for program in programs]
    todo = [(rank, finish) for rank, program in enumerate(programs) for finish in program.finishes]
    published = set()
    while todo:
        left = []
        for rank, finish in todo:
            program = programs[rank]
            expected = [program.expects[v.need] for t in finish.terms for v in t if v.space is Space.INBOX]
            results = {(v.rank, v.need) for t in finish.terms for v in t if v.space is Space.RESULT}
            if not results <= published or any((e.peer, rank, e.tag) not in mail for e in expected):
                left.append((rank, finish))
                continue
            inbox = torch.full((program.inbox_elements,), float("nan"))
            for e in expected:
                inbox[e.at : e.at + e.elements] = mail[e.peer, rank, e.tag]
            box = finish.box
            target = outputs[rank][box.m0 : box.m1, box.n0 : box.n1]
            assert target.isnan().all(), "no element is written twice"
            add_terms([[view(v, rank, inbox) for v in t] for t in finish.terms], target, None)
            if finish.result is not None:
                view(finish.result, rank, None).copy_(target)
                published.add((rank, finish.result.need))
                for peer, tag in finish.forward:
                    mail[rank, peer, tag] = target.reshape(-1).clone()
        assert len(left) < len(todo), f"stuck: {left}"
        todo = left
    return outputs


def in_order(products: list[torch.Tensor], hosts) -> torch.Tensor:
    total = torch.empty_like(products[0])
    add_terms([[products[r] for r in ranks] for ranks in nested(hosts, range(len(products)))], total, None)
    return total


@settings(deadline=None, max_examples=150)
@given(plans([Op.REDUCE_SCATTER, Op.ALL_REDUCE]), st.integers(0, 9))
def test_every_plan_adds_up_all_ranks_in_one_order(p: OverlapPlan, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    products = [torch.randn(p.m, p.n, generator=generator) for _ in range(p.size)]
    total = in_order(products, p.hosts)
    bounds = p.shard_bounds
    for rank, got in enumerate(outgoing_results(p, products)):
        want = total if p.op is Op.ALL_REDUCE else total[bounds[rank] : bounds[rank + 1]]
        assert torch.equal(got, want)


@settings(deadline=None, max_examples=100)
@given(plans([Op.ALL_TO_ALL]), st.data())
def test_every_row_goes_to_its_destination(p: OverlapPlan, data) -> None:
    counts = tuple(tuple(data.draw(st.integers(0, 9)) for _ in range(p.size)) for _ in range(p.size))
    products = [torch.randn(sum(row), p.n) for row in counts]
    outputs = outgoing_results(p, products, counts)
    for rank, got in enumerate(outputs):
        rows = []
        for source, product in enumerate(products):
            start = sum(counts[source][:rank])
            rows.append(product[start : start + counts[source][rank]])
        assert torch.equal(got, torch.cat(rows))


@settings(deadline=None, max_examples=100)
@given(plans([Op.ALL_GATHER, Op.GATHER_BACK]), st.data())
def test_every_row_of_x_is_read_where_it_arrives(p: OverlapPlan, data) -> None:
    counts = None
    if p.op is Op.GATHER_BACK:
        counts = tuple(tuple(data.draw(st.integers(0, 9)) for _ in range(p.size)) for _ in range(p.size))
    programs = [incoming.lower(p, rank, counts) for rank in range(p.size)]
    xs = [torch.arange(program.x_rows) + 1000 * rank for rank, program in enumerate(programs)]
    outboxes = [torch.full((max(len(x), 1),), -1) for x in xs]
    inboxes = [torch.full((max(pr.tiling.m, 1),), -1) for pr in programs]
    told = [[0] * program.tiling.rows for program in programs]
    mail = {(r, s.peer, s.tag): xs[r][s.start : s.end] for r, pr in enumerate(programs) for s in pr.sends}

    def tell(program, arrivals) -> None:
        for a in arrivals:
            for row in program.touched(a):
                told[a.rank][row] += 1

    for rank, program in enumerate(programs):
        for offer in program.offers:
            outboxes[rank][offer.start : offer.end] = xs[rank][offer.start : offer.end]
            tell(program, offer.tell)
        for e in program.expects:
            inboxes[rank][e.m0 : e.m1] = mail.pop((e.peer, rank, e.tag))
            tell(program, e.tell)
    assert not mail, "what is sent is received"
    stores = {Store.X: xs, Store.OUTBOX: outboxes, Store.INBOX: inboxes}
    for rank, program in enumerate(programs):
        read = [stores[s.store][s.rank][s.start : s.start + s.rows] for s in program.sources]
        got = torch.cat(read) if read else torch.empty(0, dtype=torch.int64)
        if counts is None:
            want = torch.cat(xs)
        else:
            starts = [[sum(counts[r][s] for r in range(to)) for to in range(p.size)] for s in range(p.size)]
            want = torch.cat([xs[s][starts[s][rank] :][: counts[rank][s]] for s in range(p.size)])
        assert torch.equal(got, want)
        assert told[rank] == list(program.needs), "a tile row is told of each chunk that it reads, once"
        assert sorted(program.tile_rows) == list(range(program.tiling.rows))


def test_each_byte_crosses_a_card_once() -> None:
    """Two hosts of two: rows for a remote owner are added up before they leave, rows of x are sent to one rank."""
    p = OverlapPlan(Op.REDUCE_SCATTER, 64, 32, 4, "float32", (0, 0, 1, 1), tile_m=8, tile_n=32, groups=(1, 1, 2))
    crossing = [s.elements for r in (0, 1) for s in outgoing.lower(p, r).sends]
    assert sum(crossing) == 32 * 32, "half of the product"
    p = OverlapPlan(Op.ALL_REDUCE, 64, 32, 4, "float32", (0, 0, 1, 1), tile_m=8, tile_n=32, groups=(1, 1, 2))
    assert sum(s.elements for r in (0, 1) for s in outgoing.lower(p, r).sends) == 64 * 32, "all of it, once"
    p = OverlapPlan(Op.ALL_GATHER, 64, 32, 4, "float32", (0, 0, 1, 1), tile_m=8, tile_n=32, groups=(1, 1))
    assert sum(s.end - s.start for r in (0, 1) for s in incoming.lower(p, r).sends) == 32
    everywhere = OverlapPlan(Op.ALL_GATHER, 64, 32, 4, "float32", (0, 0, 1, 1), Transport.MESSAGES, tile_n=32)
    assert sum(s.end - s.start for r in (0, 1) for s in incoming.lower(everywhere, r).sends) == 32 * 3


@pytest.mark.parametrize(("hosts", "message"), [((), "one number for each rank"), ((1, 0), "in the order of first")])
def test_bad_hosts(hosts, message) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(hosts)


def test_bfloat16_sums_round_once_a_host() -> None:
    parts = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0)]
    out = torch.empty(1, dtype=torch.bfloat16)
    add_terms([parts], out, None)
    assert out.item() == 260.0, "259 in float32, rounded to even at the end; adding in bfloat16 would stay at 256"
    add_terms([parts[:2], parts[2:]], out, None)
    assert out.item() == 258.0, "256 + 1 rounds to 256 on its way between hosts"
