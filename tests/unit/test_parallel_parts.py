"""The pure parts of `weft.parallel`: cuts, moves, shares, kept tokens; and `parallelize` without ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import weft
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
from weft.parallel import api, stages
from weft.parallel.cut import Heads, cuts
from weft.parallel.rank_model import moves
from weft.transformer.parts import FEWEST_ROWS, IndexRun, Share


def stack(
    heads: int, kv_heads: int, *, fused: bool, words: int = 50, tied: bool = False, gated: bool = False
) -> ModelSpec:
    """One layer of width 8 with heads of 4; `fused`: q, k and v in one tensor, and gate and up where it is `gated`."""
    rows = [4 * heads, 4 * kv_heads, 4 * kv_heads]
    parts = [torch.empty(8, sum(rows))] if fused else [torch.empty(n, 8) for n in rows]
    qkv = Projection(tuple(parts), tuple(torch.empty(sum(rows) if fused else n) for n in rows[: len(parts)]), fused)
    out = Projection((torch.empty(8, 4 * heads),), (torch.empty(8),))
    ups = [120] if gated and fused else [60] * (1 + gated)
    up = Projection(tuple(torch.empty(n, 8) for n in ups), tuple(torch.empty(n) for n in ups))
    down = Projection((torch.empty(8, 60),), (None,))
    attention = Attention(qkv, out, heads, kv_heads, 4, 0.5)
    layer = Layer(attention, None, Mlp(up, down, "gelu", gated), None, NormOrder.PRE)
    table = torch.empty(words, 8)
    head = Projection((table if tied else torch.empty(words, 8),), (None,))
    model = Transformer(Embedding((table,), ("input_ids",), None), (layer,), None)
    return ModelSpec(model, VocabularyHead(head))


def rows_of(runs: Iterable[IndexRun]) -> list[int]:
    return [row for run in runs for row in range(run.first, run.end)]


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 10), st.booleans(), st.booleans())
def test_every_row_is_computed_with(kv_heads, queries, size, fused, gated) -> None:
    """Once; rows of keys and values also more often, by ranks whose queries read the same."""
    heads = kv_heads * queries
    described = stack(heads, kv_heads, fused=fused, gated=gated)
    if size > heads:
        with pytest.raises(ValueError, match=rf"{size} ranks cannot share {heads} query heads .*at most {heads} ranks"):
            cuts(described, size)
        return
    found = cuts(described, size)
    qkv = described.transformer.layers[0].attention.qkv
    copied = {id(t) for t in ((*qkv.weights, *qkv.biases) if fused else (*qkv.weights[1:], *qkv.biases[1:]))}
    for key, tensor_cut in found.items():
        if tensor_cut is not None:
            rows = rows_of(run for rank in range(size) for run in tensor_cut.needed[rank])
            assert set(rows) == set(range(tensor_cut.total))
            assert tensor_cut.has_copies == (len(rows) > tensor_cut.total)
            assert not tensor_cut.has_copies or (key in copied and size > kv_heads)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.booleans())
def test_moves_bring_what_is_needed(kv_heads, queries, size, fused, gated) -> None:
    size = min(size, kv_heads * queries)
    described = stack(kv_heads * queries, kv_heads, fused=fused, gated=gated)
    for tensor_cut in filter(None, cuts(described, size).values()):
        stored = [list(range(r.first, r.end)) for r in map(tensor_cut.stored, range(size))]
        got = [[-1] * tensor_cut.count(rank) for rank in range(size)]
        for move in moves(tensor_cut):
            got[move.target][move.at : move.at + move.count] = stored[move.source][move.start : move.start + move.count]
        for rank, runs in enumerate(tensor_cut.needed):
            assert got[rank] == rows_of(runs)


def test_gate_and_up_in_one_weight() -> None:
    """Each rank has the gate and the up of its own columns, one after the other."""
    described = stack(2, 2, fused=True, gated=True)
    mlp, found = described.transformer.layers[0].mlp, cuts(described, 2)
    runs = (IndexRun(0, 30), IndexRun(60, 90)), (IndexRun(30, 60), IndexRun(90, 120))
    assert [found[id(t)].needed for t in (mlp.up.weights[0], mlp.up.biases[0])] == [runs, runs]
    assert found[id(mlp.down.weights[0])].needed == ((IndexRun(0, 30),), (IndexRun(30, 60),))


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


def shared(heads: int, kv_heads: int, size: int) -> list[Heads]:
    attention = Attention(*(Projection((), ()),) * 2, heads=heads, kv_heads=kv_heads, head_dim=4, scale=1.0)
    return [Heads.of(attention, rank, size) for rank in range(size)]


@given(st.integers(1, 40), st.integers(1, 8))
def test_heads_are_shared_evenly(kv_heads, size) -> None:
    if size > kv_heads:
        return
    mine = shared(3 * kv_heads, kv_heads, size)
    assert mine[0].keys.first == 0
    assert mine[-1].keys.end == kv_heads
    assert all(a.keys.end == b.keys.first for a, b in pairwise(mine))
    assert max(h.keys.count for h in mine) - min(h.keys.count for h in mine) <= 1
    assert all(h.queries == IndexRun(3 * h.keys.first, 3 * h.keys.end) for h in mine)


@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 40))
def test_a_rank_has_the_keys_that_its_queries_read(kv_heads, queries, size) -> None:
    """And in the form that attention reads: query i of n reads key i // (n / m) of m."""
    heads = kv_heads * queries
    size = min(size, heads)
    mine = shared(heads, kv_heads, size)
    assert rows_of(h.queries for h in mine) == list(range(heads))
    for h in mine:
        each, odd = divmod(h.queries.count, h.keys.count)
        assert each > 0
        assert not odd
        read = [(h.queries.first + i) // queries for i in range(h.queries.count)]
        assert read == [h.keys.first + i // each for i in range(h.queries.count)]
    # Never worse than ranks that each have a part of one key head's queries.
    apart = -(-queries // (size // kv_heads)) if size >= kv_heads else queries * -(-kv_heads // size)
    assert -(-heads // size) <= max(h.queries.count for h in mine) <= apart


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [
        (4, 1, [(1, 1), (1, 1), (1, 1), (1, 1)]),
        (8, 2, [(2, 1), (2, 1), (2, 1), (2, 1)]),
        (8, 2, [(3, 1), (2, 2), (3, 1)]),  # the queries of one rank read two keys: 4, 2, 2 would take longer
        (4, 2, [(2, 1), (1, 1), (1, 1)]),  # here that would be no faster
        (6, 2, [(2, 1), (1, 1), (2, 1), (1, 1)]),  # never two of one key's queries and one of another's
        (5, 1, [(2, 1), (2, 1), (1, 1)]),
        (10, 5, [(6, 3), (4, 2)]),
    ],
)
def test_heads_of_each_rank(heads, kv_heads, expected) -> None:
    assert [(h.queries.count, h.keys.count) for h in shared(heads, kv_heads, len(expected))] == expected


def test_one_rank_needs_no_process_group() -> None:
    """Without a mesh: the packed twin, whose parameters are the model's own."""
    assert not torch.distributed.is_initialized()
    size = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24}
    options = {"vocab_size": 30, "max_position_embeddings": 20, "pad_token_id": 0, **size}
    ids = torch.tensor([[0, 5, 6, 7], [9, 8, 4, 3]])
    mask, labels = (ids != 0).long(), ids.masked_fill(ids == 0, -100).index_fill(1, torch.tensor([0, 1]), -100)
    for kind, head in (("Llama", "ForCausalLM"), ("Roberta", "ForMaskedLM"), ("ModernBert", "ForTokenClassification")):
        made = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**options)).eval()
        alone = weft.parallelize(made)
        assert type(alone).__name__ == f"{kind}{head}"
        assert alone is not made
        assert all(a is b for a, b in zip(alone.parameters(), made.parameters(), strict=True))
        want, got, packed = (m(input_ids=ids, attention_mask=mask).logits for m in (made, alone, weft.pack(made)))
        assert torch.equal(got, packed)
        torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
        if head != "ForTokenClassification":
            alone(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            assert all(p.grad is not None for p in made.parameters())


def test_what_one_rank_refuses() -> None:
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(Unsupported, match=r"cannot parallelize a torch.nn.modules.linear.Linear without a plan"):
        weft.parallelize(linear)
    with pytest.raises(ValueError, match="a plan of styles was given without a mesh, expected one"):
        weft.parallelize(linear, plan={"": weft.ColwiseOverlap()})
    bert = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, vocab_size=9))
    with pytest.raises(ValueError, match="overlap is 'maybe', expected 'on' or 'off'"):
        weft.parallelize(bert, overlap="maybe")
    with pytest.raises(Unsupported, match="packed or parallel already"):
        weft.parallelize(weft.parallelize(bert))


def test_classes_that_parallelize_and_stages_take() -> None:
    for name in ("RobertaForMaskedLM", "DistilBertForQuestionAnswering", "ModernBertModel", "GPT2LMHeadModel"):
        assert name in api.supported()
    assert {"LlamaForCausalLM", "GPT2LMHeadModel"} <= set(stages.supported())


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
