"""Meshes and layouts: boxes against torch.chunk, the papers' notation, printing, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.layout import DeclaredCluster, Layout, Mesh, ShardSizes, format_ints, parse_ints
from weft.reference import shard


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    size = math.prod(shape)
    ranks = draw(st.permutations(range(size + 3)))[:size]
    hosts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return Mesh.of(np.array(ranks).reshape(shape), hosts=np.array(hosts).reshape(shape))


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    mesh = draw(meshes())
    choices = [st.just(Replicate()), st.just(Partial())]
    if ndim:
        choices.append(st.integers(0, ndim - 1).map(Shard))
    placements = [draw(st.one_of(choices)) for _ in mesh.shape]
    return Layout(mesh, placements, tuple(draw(st.permutations(range(len(mesh.shape))))))


@given(st.data())
def test_boxes_are_what_torch_chunk_cuts(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    layout = data.draw(layouts(len(shape)))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for rank, expected in shard(whole, layout).items():
        box = layout.box(shape, rank)
        assert torch.equal(whole[tuple(slice(a, b) for a, b in box)], expected)
        assert layout.local_shape(shape, rank) == tuple(expected.shape)


@given(st.data())
def test_holders_are_the_ranks_with_the_same_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    layout = data.draw(layouts(len(shape)))
    holders = layout.holders(len(shape))
    assert sorted(holders.reshape(-1).tolist()) == sorted(layout.mesh.ranks)
    for cell in holders:
        assert len({layout.box(shape, int(rank)) for rank in cell.reshape(-1)}) == 1


@given(st.data())
def test_notation_mesh_and_cluster_read_back(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 3))
    layout = data.draw(layouts(ndim))
    assert Layout.parse(layout.mesh, layout.notation(ndim)) == layout
    assert Mesh.parse(str(layout.mesh)) == layout.mesh
    cluster = DeclaredCluster(tuple(data.draw(st.lists(st.sampled_from([1.0, 2.5, 1e-3]), min_size=1, max_size=9))))
    assert DeclaredCluster.parse(str(cluster)) == cluster


@given(st.lists(st.integers(0, 12)))
def test_runs_of_numbers_read_back(values: list[int]) -> None:
    assert parse_ints(format_ints(values)) == tuple(values)


@pytest.mark.parametrize(
    ("notation", "placements", "order"),
    [
        ("S0RR", (Shard(0), Replicate()), (0, 1)),
        ("RS1R", (Replicate(), Shard(1)), (0, 1)),
        ("S01RR", (Shard(0), Shard(0)), (0, 1)),
        ("RRS10", (Shard(2), Shard(2)), (1, 0)),
        ("RRRP1", (Replicate(), Partial()), (0, 1)),
        ("RRP0{max}", (Partial("max"), Replicate()), (0, 1)),
        ("S1{3,0,2,7}R", (Replicate(), ShardSizes(0, (3, 0, 2, 7))), (0, 1)),
    ],
)
def test_notation(notation: str, placements: tuple[object, ...], order: tuple[int, ...]) -> None:
    layout = Layout.parse(Mesh.grid(2, 4), notation)
    assert (layout.placements, layout.order) == (placements, order)
    assert layout.notation(sum(letter in "RS" for letter in notation)) == notation


def test_explicit_sizes_cut_where_they_say() -> None:
    layout = Layout(Mesh.grid(2, 3), [Shard(0), ShardSizes(1, (5, 0, 2))])
    assert layout.box((5, 7), rank=0) == ((0, 3), (0, 5))
    assert layout.local_shape((5, 7), rank=4) == (2, 0)
    assert layout.local_shape((5, 7), rank=6) == (0,)


def test_an_order_that_does_not_matter_is_not_kept() -> None:
    mesh = Mesh.grid(2, 2)
    assert Layout(mesh, [Shard(0), Shard(1)], (1, 0)) == Layout(mesh, [Shard(0), Shard(1)])
    assert Layout(mesh, [Shard(0), Shard(0)], (1, 0)) != Layout(mesh, [Shard(0), Shard(0)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(Mesh.grid(2, 2), [Shard(0)]), "got 1 placements"),
        (lambda: Layout(Mesh.grid(2, 2), [Shard(0)] * 3), "got 3 placements"),
        (lambda: Layout(Mesh.grid(2, 2), [Shard(2), Replicate()]).box((4, 4), 0), "tensor has 2 dims"),
        (lambda: Layout(Mesh.grid(1, 2), [Replicate(), ShardSizes(0, (1, 2))]).box((4,), 0), "adds up to 3"),
        (lambda: Layout(Mesh.grid(1, 2), [Replicate(), ShardSizes(0, (1,))]), "has 1 sizes"),
        (lambda: Layout(Mesh.grid(1, 2), [Replicate(), "S0"]), "expected Shard"),
        (lambda: Mesh.of([0, 0], hosts=[0, 0]), "each once"),
        (lambda: Mesh.of([0, 1], hosts=[0]), "expected equal shapes"),
        (lambda: Layout.parse(Mesh.grid(2, 2), "S2R"), "mesh axes at most once"),
        (lambda: Layout.parse(Mesh.grid(2, 2), "S0S0"), "mesh axes at most once"),
        (lambda: Layout.parse(Mesh.grid(2, 2), "X"), "expected S and R"),
        (lambda: DeclaredCluster(()), "one finite rate"),
        (lambda: DeclaredCluster.parse("2 hosts"), "expected one such as"),
    ],
)
def test_what_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
