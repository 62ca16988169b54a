"""How each parameter of a model is cut for the ranks of a mesh axis; placements follow from that.

    q, k, v, gate, up    Shard(0), whole heads needed        embedding, head    Shard(0), over the vocabulary
    out, down            Shard(1), their biases Replicate    norms, positions   Replicate

A relative bias [buckets, heads] is cut by heads. Weights that are stored transposed have the other dim. Everything that
is not named here is replicated.

    5 key/value heads, 10 query heads, 2 ranks     kv 0-2 | 3-4          q 0-5 | 6-9
    2 key/value heads,  8 query heads, 3 ranks     kv 0 | 0-1 | 1        q 0-2 | 3-4 | 5-7

A rank has the key/value heads that its query heads read. Where there are more ranks than key/value heads, several ranks
have the same one, each a copy of its own, and the gradients of these are added up. What a rank *stores* of a parameter
is a shard of a DTensor; where that is not what it computes with, `rank_model.py` moves the rows between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from weft.errors import Unsupported
from weft.models.spec import Attention, Embedding, Mlp, ModelSpec, Norm, Projection, VocabularyHead, tensors
from weft.transformer.parts import IndexRun


@dataclass(frozen=True)
class Heads:
    """A rank's heads: `queries`, and the `keys` that these read (which are the values', too).

    As many queries read each of the keys, in their order, so that a rank's attention is one with fewer heads.
    """

    queries: IndexRun
    keys: IndexRun

    @classmethod
    def of(cls, attention: Attention, rank: int, size: int) -> Heads:
        """Raises where a rank would have no head."""
        return shared_heads(attention.heads, attention.kv_heads, size)[rank]


@cache
def shared_heads(heads: int, kv_heads: int, size: int) -> tuple[Heads, ...]:
    """The heads of every rank: as few queries as can be on the rank that has most; of such cuts one with the fewest
    copies of keys; and of these the most even. Raises where a rank would have none.

    >>> [(h.queries.count, h.keys.count) for h in shared_heads(8, 2, 3)]
    [(3, 1), (2, 2), (3, 1)]
    """
    if heads < size:
        raise ValueError(
            f"{size} ranks cannot share {heads} query heads ({kv_heads} key/value heads): a rank would have none; use "
            f"a mesh axis of at most {heads} ranks"
        )
    group = heads // kv_heads
    for most in range(-(-heads // size), heads + 1):
        if (found := _best_cut(heads, group, size, most)) is not None:
            return tuple(
                Heads(IndexRun(first, end), IndexRun(first // group, -(-end // group))) for first, end in found
            )
    raise AssertionError(f"{size} ranks, {heads} heads")  # of which each may have a part of one key head's queries


def _best_cut(heads: int, group: int, size: int, most: int) -> list[tuple[int, int]] | None:
    """The best runs of query heads with at most `most` each; None where there are none."""
    # by the head where a rank begins: the cost of all ranks from there on, and where the first of them ends
    after: dict[int, tuple[tuple[int, int], int]] = {heads: ((0, 0), heads)}
    way = []
    for left in range(size - 1, -1, -1):
        best: dict[int, tuple[tuple[int, int], int]] = {}
        for first in range(heads) if left else (0,):
            for end in range(min(first + most, heads), first, -1):  # of equal ones the first, with most heads in front
                if end in after and (keys := _keys_read(first, end, group)):
                    copies, squares = after[end][0]
                    cost = (copies + keys, squares + (end - first) ** 2)
                    if first not in best or cost < best[first][0]:
                        best[first] = (cost, end)
        way.append(after := best)
    if 0 not in after:
        return None
    found, first = [], 0
    for best in reversed(way):
        found.append((first, best[first][1]))
        first = best[first][1]
    return found


def _keys_read(first: int, end: int, group: int) -> int:
    """How many key heads the queries `first` to `end` read; 0 where some are read by more of them than others."""
    keys = -(-end // group) - first // group
    before, behind = -first % group or group, end % group or group
    even = keys == 1 or (before == behind and (keys == 2 or before == group))
    return keys if even else 0


@dataclass(frozen=True)
class TensorCut:
    """How a parameter is cut along `dim`: rank r computes with the runs `needed[r]`, one after the other. Every row is
    in one of them at least.

    >>> TensorCut.chunks(0, 10, 4).is_aligned
    True
    """

    dim: int
    total: int
    needed: tuple[tuple[IndexRun, ...], ...]

    @classmethod
    def chunks(cls, dim: int, total: int, size: int) -> TensorCut:
        """What is needed is what is stored."""
        return cls(dim, total, tuple((IndexRun.of(total, r, size),) for r in range(size)))

    @property
    def size(self) -> int:
        return len(self.needed)

    def stored(self, rank: int) -> IndexRun:
        """What a rank stores: a chunk."""
        return IndexRun.of(self.total, rank, self.size)

    @property
    def is_aligned(self) -> bool:
        """Whether every rank computes with what it stores."""
        return all(runs == (self.stored(r),) for r, runs in enumerate(self.needed))

    @property
    def has_copies(self) -> bool:
        """Whether several ranks compute with the same row: its gradient is the sum of theirs."""
        return sum(map(self.count, range(self.size))) > self.total

    def count(self, rank: int) -> int:
        """How many rows a rank computes with."""
        return sum(run.count for run in self.needed[rank])


Cuts = dict[int, TensorCut | None]  # by id of the tensor; None is replicated


def cuts(model_spec: ModelSpec, size: int) -> Cuts:
    """How each tensor is cut for `size` ranks. Raises where a rank would have nothing to compute."""
    found: Cuts = {}
    model = model_spec.transformer
    if not model.layers:
        raise Unsupported("the model has no layers, expected at least one: there is nothing to share among ranks")
    if model.embedding is not None:
        words = model.embedding.tables[0].shape[0]
        if IndexRun.of(words, size - 1, size).count == 0:
            raise ValueError(f"{size} ranks cannot share a vocabulary of {words} words: a rank would have none")
        _add(found, model.embedding.tables[0], TensorCut.chunks(0, words, size))
        for table in model.embedding.tables[1:]:
            _add(found, table, None)
        _add_norm(found, model.embedding.norm)
        for tensor in tensors(model.embedding.projection):
            _add(found, tensor, None)
    for layer in model.layers:
        _add_attention(found, layer.attention, size)
        _add_mlp(found, layer.mlp, size)
        for norm in (layer.attention_norm, layer.mlp_norm, layer.attention_out_norm, layer.mlp_out_norm):
            _add_norm(found, norm)
    _add_norm(found, model.final_norm)
    if model_spec.head is not None:
        _add_head(found, model_spec.head, model.embedding, size)
    return found


def _add(found: Cuts, tensor: Tensor | None, cut: TensorCut | None) -> None:
    if tensor is None:
        return
    if found.setdefault(id(tensor), cut) != cut:
        raise Unsupported(f"a tensor of shape {list(tensor.shape)} has two roles that are cut in different ways")


def _add_norm(found: Cuts, norm: Norm | None) -> None:
    if norm is not None:
        _add(found, norm.weight, None)
        _add(found, norm.bias, None)


def _add_outputs(found: Cuts, projection: Projection, needed: list[tuple[tuple[IndexRun, ...], ...]]) -> None:
    """A column-parallel projection; `needed` has the runs of every rank for each part."""
    dim = 1 if projection.transposed else 0
    for weight, bias, runs in zip(projection.weights, projection.biases, needed, strict=True):
        _add(found, weight, TensorCut(dim, weight.shape[dim], runs))
        if bias is not None:
            _add(found, bias, TensorCut(0, weight.shape[dim], runs))


def _add_inputs(found: Cuts, projection: Projection, needed: tuple[tuple[IndexRun, ...], ...]) -> None:
    """A row-parallel projection; its bias is added to the sum of all ranks, so it is whole."""
    (weight,), (bias,) = projection.weights, projection.biases
    dim = 0 if projection.transposed else 1
    _add(found, weight, TensorCut(dim, weight.shape[dim], needed))
    _add(found, bias, None)


def _add_attention(found: Cuts, attention: Attention, size: int) -> None:
    d, qkv = attention.head_dim, attention.qkv
    heads = [Heads.of(attention, rank, size) for rank in range(size)]
    queries, keys = [h.queries.times(d) for h in heads], [h.keys.times(d) for h in heads]
    apart: list[tuple[tuple[IndexRun, ...], ...]]
    if len(qkv.weights) == 3:
        apart = [tuple((run,) for run in runs) for runs in (queries, keys, keys)]
    else:  # q, k and v end to end in one tensor
        k_at, v_at = attention.heads * d, (attention.heads + attention.kv_heads) * d
        apart = [tuple((q, k.shifted(k_at), k.shifted(v_at)) for q, k in zip(queries, keys, strict=True))]
    _add_outputs(found, qkv, apart)
    _add_inputs(found, attention.out, tuple((run,) for run in queries))
    _add_norm(found, attention.q_norm)
    _add_norm(found, attention.k_norm)
    if attention.bias is not None:
        _add(found, attention.bias.table, TensorCut(1, attention.heads, tuple((h.queries,) for h in heads)))


def _add_mlp(found: Cuts, mlp: Mlp, size: int) -> None:
    up = mlp.up
    fused = mlp.gated and len(up.weights) == 1  # gate and up end to end in one tensor
    width = up.weights[0].shape[1 if up.transposed else 0] // (2 if fused else 1)
    if IndexRun.of(width, size - 1, size).count == 0:
        raise ValueError(f"{size} ranks cannot share an MLP of width {width}: a rank would have nothing to compute")
    runs = TensorCut.chunks(0, width, size).needed
    both = tuple((run, run.shifted(width)) for (run,) in runs)
    _add_outputs(found, up, [both] if fused else [runs] * len(up.weights))
    _add_inputs(found, mlp.down, runs)


def _add_head(found: Cuts, head: VocabularyHead, embedding: Embedding | None, size: int) -> None:
    words = head.projection.weights[0].shape[0]
    if embedding is not None and embedding.tables[0].shape[0] != words:
        raise Unsupported(
            f"the embedding has {embedding.tables[0].shape[0]} words and the head {words}, expected as many of each"
        )
    if IndexRun.of(words, size - 1, size).count == 0:
        raise ValueError(f"{size} ranks cannot share a vocabulary of {words} words: a rank would have none")
    _add_outputs(found, head.projection, [TensorCut.chunks(0, words, size).needed])
    if head.transform is not None:
        for tensor in tensors(head.transform):
            _add(found, tensor, None)
