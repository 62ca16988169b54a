"""Which part of each tensor a rank computes with: whole heads, and runs of columns as torch.chunk makes them.

    5 key/value heads, 10 query heads, 2 ranks     kv 0-2 | 3-4     q 0-5 | 6-9

A key/value head and the query heads that read it stay together. What a rank *stores* of a parameter is a shard of a
DTensor; where heads do not divide, the two differ, and `realign` moves the rows between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.packed.spec import Attention, Layer, Mlp, Projection, Transformer
from weft.parallel.rank import RankModel, Words


@dataclass(frozen=True)
class Run:
    """The numbers `first` to `end`.

    >>> [Run.of(5, rank, 2) for rank in range(2)]
    [Run(first=0, end=3), Run(first=3, end=5)]
    """

    first: int
    end: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Run:
        """The part of rank `rank` of `size`, as torch.chunk cuts."""
        step = -(-total // size)
        return cls(min(rank * step, total), min((rank + 1) * step, total))

    @classmethod
    def balanced(cls, total: int, rank: int, size: int) -> Run:
        """The part of rank `rank` of `size`, as torch.tensor_split cuts: no part is empty where there are enough.

        >>> [Run.balanced(5, rank, 4).count for rank in range(4)]
        [2, 1, 1, 1]
        """
        step, larger = divmod(total, size)
        return cls(rank * step + min(rank, larger), (rank + 1) * step + min(rank + 1, larger))

    def times(self, width: int) -> Run:
        """The same run of blocks of `width`."""
        return Run(self.first * width, self.end * width)

    def shifted(self, by: int) -> Run:
        """The same run, `by` further on."""
        return Run(self.first + by, self.end + by)

    @property
    def count(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Heads:
    """A rank's heads: `queries` and `keys` (which are the values', too)."""

    queries: Run
    keys: Run

    @classmethod
    def of(cls, attention: Attention, rank: int, size: int) -> Heads:
        """Raises where a rank would have no head."""
        if attention.kv_heads < size:
            raise ValueError(
                f"{size} ranks cannot share {attention.kv_heads} key/value heads ({attention.heads} query heads): "
                f"a rank would have none; use a mesh axis of at most {attention.kv_heads} ranks"
            )
        keys = Run.balanced(attention.kv_heads, rank, size)
        return cls(keys.times(attention.heads // attention.kv_heads), keys)


def cut(model: Transformer, group: ProcessGroup, *, head: Projection | None = None) -> RankModel:
    """What this rank of `group` computes with of a model whose weights are whole: views of them where there can be.

    The plain way, for tests and small models: every rank needs all weights. Differentiable.
    """
    rank, size = group.rank(), group.size()
    embedding, words = model.embedding, Words(0, 0, 0)
    if embedding is not None:
        table = embedding.tables[0]
        run = Run.of(table.shape[0], rank, size)
        words = Words(run.first, run.end, table.shape[0])
        embedding = replace(embedding, tables=(table[run.first : run.end], *embedding.tables[1:]))
    layers = tuple(_layer(layer, rank, size) for layer in model.layers)
    part = None
    if head is not None:
        part = rows(head, [Run.of(_outputs(weight, head), rank, size) for weight in head.weights])
    return RankModel(Transformer(embedding, layers, model.final_norm), group, words, part)


def rows(projection: Projection, runs: list[Run]) -> Projection:
    """The outputs `runs`, one run of each part of a projection."""
    pairs = list(zip(projection.weights, runs, strict=True))
    taken = tuple(w[:, r.first : r.end] if projection.transposed else w[r.first : r.end] for w, r in pairs)
    biases = tuple(None if b is None else b[r.first : r.end] for b, r in zip(projection.biases, runs, strict=True))
    return Projection(taken, biases, projection.transposed)


def columns(projection: Projection, run: Run) -> Projection:
    """The inputs `run` of a projection; its bias stays whole, as it is added to the sum of all ranks."""
    taken = tuple(
        w[run.first : run.end] if projection.transposed else w[:, run.first : run.end] for w in projection.weights
    )
    return replace(projection, weights=taken)


def split_qkv(qkv: Projection, attention: Attention) -> Projection:
    """The same projection in three parts; GPT-2 stores it in one."""
    if len(qkv.weights) == 3:
        return qkv
    (weight,), (bias,) = qkv.weights, qkv.biases
    sizes = [h * attention.head_dim for h in (attention.heads, attention.kv_heads, attention.kv_heads)]
    biases = (None, None, None) if bias is None else tuple(torch.split(bias, sizes))
    return Projection(tuple(torch.split(weight, sizes, dim=1 if qkv.transposed else 0)), biases, qkv.transposed)


def _layer(layer: Layer, rank: int, size: int) -> Layer:
    attention, mlp = layer.attention, layer.mlp
    heads, d = Heads.of(attention, rank, size), attention.head_dim
    queries, keys = heads.queries.times(d), heads.keys.times(d)
    mine = replace(
        attention,
        qkv=rows(split_qkv(attention.qkv, attention), [queries, keys, keys]),
        out=columns(attention.out, queries),
        heads=heads.queries.count,
        kv_heads=heads.keys.count,
    )
    return replace(layer, attention=mine, mlp=_mlp(mlp, rank, size))


def _mlp(mlp: Mlp, rank: int, size: int) -> Mlp:
    up = mlp.up
    if mlp.gated and len(up.weights) == 1:
        raise ValueError("a gated MLP with gate and up in one weight cannot be cut; expected two weights")
    run = Run.of(_outputs(up.weights[0], up), rank, size)
    if Run.of(_outputs(up.weights[0], up), size - 1, size).count == 0:
        raise ValueError(f"{size} ranks cannot share an MLP of width {_outputs(up.weights[0], up)}: use fewer ranks")
    return replace(mlp, up=rows(up, [run] * len(up.weights)), down=columns(mlp.down, run))


def _outputs(weight: Tensor, projection: Projection) -> int:
    return weight.shape[1 if projection.transposed else 0]
