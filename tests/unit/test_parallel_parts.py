"""The pure parts of `weft.parallel`: cuts, moves, shares, kept tokens; and the loss in one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import Unsupported
from weft.models.spec import (
    Attention,
    Embedding,
    Layer,
    Mlp,
    ModelSpec,
    NormOrder,
    Projection,
    Transformer,
    VocabularyHead,
)
from weft.packed import PackedBatch
from weft.packed.inputs import rows_to_keep
from weft.parallel.cut import Heads, cuts
from weft.parallel.rank_model import moves
from weft.transformer.parts import FEWEST_ROWS, IndexRun, Share


def stack(heads: int, kv_heads: int, *, fused: bool, words: int = 50, tied: bool = False) -> ModelSpec:
    """One layer of width 8 with heads of 4."""
    rows = [4 * heads, 4 * kv_heads, 4 * kv_heads]
    parts = [torch.empty(8, sum(rows))] if fused else [torch.empty(n, 8) for n in rows]
    qkv = Projection(tuple(parts), tuple(torch.empty(sum(rows) if fused else n) for n in rows[: len(parts)]), fused)
    out = Projection((torch.empty(8, 4 * heads),), (torch.empty(8),))
    up, down = Projection((torch.empty(60, 8),), (None,)), Projection((torch.empty(8, 60),), (None,))
    attention = Attention(qkv, out, heads, kv_heads, 4, 0.5)
    layer = Layer(attention, None, Mlp(up, down, "gelu"), None, NormOrder.PRE)
    table = torch.empty(words, 8)
    head = Projection((table if tied else torch.empty(words, 8),), (None,))
    model = Transformer(Embedding((table,), ("input_ids",), None), (layer,), None)
    return ModelSpec(model, VocabularyHead(head))


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_every_row_is_computed_with_once(kv_heads, queries, size, fused) -> None:
    described = stack(kv_heads * queries, kv_heads, fused=fused)
    if size > kv_heads:
        with pytest.raises(ValueError, match=f"{size} ranks cannot share {kv_heads} key/value heads"):
            cuts(described, size)
        return
    for tensor_cut in cuts(described, size).values():
        if tensor_cut is not None:
            runs = [run for rank in range(size) for run in tensor_cut.needed[rank]]
            rows = [row for run in runs for row in range(run.first, run.end)]
            assert sorted(rows) == list(range(tensor_cut.total))


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_moves_bring_what_is_needed(kv_heads, queries, size, fused) -> None:
    if size > kv_heads:
        return
    for tensor_cut in filter(None, cuts(stack(kv_heads * queries, kv_heads, fused=fused), size).values()):
        stored = [list(range(r.first, r.end)) for r in map(tensor_cut.stored, range(size))]
        got = [[-1] * tensor_cut.count(rank) for rank in range(size)]
        for move in moves(tensor_cut):
            got[move.target][move.at : move.at + move.count] = stored[move.source][move.start : move.start + move.count]
        for rank, runs in enumerate(tensor_cut.needed):
            assert got[rank] == [row for run in runs for row in range(run.first, run.end)]


def test_nothing_moves_where_heads_divide() -> None:
    found = cuts(stack(8, 4, fused=False, tied=True), 4).values()
    assert all(c is None or c.is_aligned for c in found)
    assert sum(c is None for c in found) == 1, "the bias of a row-parallel projection"
    assert not all(c.is_aligned for c in cuts(stack(8, 4, fused=True), 4).values() if c is not None)


def test_a_tensor_with_two_roles() -> None:
    described = stack(2, 2, fused=False)
    layer = described.transformer.layers[0]
    shared = Projection(layer.mlp.up.weights, layer.mlp.up.biases)
    odd = Transformer(None, (Layer(layer.attention, None, Mlp(shared, shared, "gelu"), None, NormOrder.PRE),), None)
    with pytest.raises(Unsupported, match="two roles that are cut in different ways"):
        cuts(ModelSpec(odd), 2)


@given(st.integers(1, 40), st.integers(1, 8))
def test_heads_are_shared_evenly(kv_heads, size) -> None:
    if size > kv_heads:
        return
    attention = Attention(*(Projection((), ()),) * 2, heads=3 * kv_heads, kv_heads=kv_heads, head_dim=4, scale=1.0)
    mine = [Heads.of(attention, rank, size) for rank in range(size)]
    assert mine[0].keys.first == 0
    assert mine[-1].keys.end == kv_heads
    assert all(a.keys.end == b.keys.first for a, b in pairwise(mine))
    assert max(h.keys.count for h in mine) - min(h.keys.count for h in mine) <= 1
    assert all(h.queries == IndexRun(3 * h.keys.first, 3 * h.keys.end) for h in mine)


def test_rows_are_split_where_there_are_enough() -> None:
    for size in (1, 2, 3, 8):
        few, many = FEWEST_ROWS * size - 1, FEWEST_ROWS * size
        assert not Share.of(few, rank=0, size=size).split
        assert Share.of(many, rank=0, size=size).split == (size > 1)
        runs = [Share.of(many + 5, rank=r, size=size).mine for r in range(size)]
        assert sum(run.count for run in runs) == many + 5 if size > 1 else runs == [IndexRun(0, many + 5)]


def test_kept_tokens_of_padded_inputs() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
    batch = PackedBatch.from_padded(torch.arange(8).view(2, 4), mask)  # tokens 1 2 3 7
    assert rows_to_keep(batch, 0, packed=False) is None
    last = rows_to_keep(batch, 2, packed=False)
    assert last is not None
    assert batch.values[last.tokens].tolist() == [2, 3, 7]
    placed = last.placed(batch.values[last.tokens][:, None].float())
    assert placed.squeeze(2).tolist() == [[2.0, 3.0], [0.0, 7.0]]
    chosen = rows_to_keep(batch, torch.tensor([3, 1]), packed=False)
    assert chosen is not None
    assert chosen.placed(batch.values[chosen.tokens][:, None].float()).squeeze(2).tolist() == [[3.0, 1.0], [7.0, 0.0]]
    everything = rows_to_keep(batch, 9, packed=False)
    assert everything is not None
    assert everything.shape == (2, 4)
