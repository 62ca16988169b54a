"""A rank's part of a model whose weights are whole on every rank, without DTensors: the plain way to cut one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.models.spec import Attention, Layer, Mlp, Projection, Transformer
from weft.parallel.cut import Heads
from weft.transformer.parts import IndexRun, RankModel, Words


def cut_model(model: Transformer, group: ProcessGroup, *, head: Projection | None = None) -> RankModel:
    """What this rank of `group` computes with of a model whose weights are whole: views of them where there can be.

    Every rank needs all weights. Differentiable.
    """
    rank, size = group.rank(), group.size()
    embedding, words = model.embedding, Words.of(0)
    if embedding is not None:
        table = embedding.tables[0]
        words = Words.of(table.shape[0], rank, size)
        embedding = replace(embedding, tables=(table[words.first : words.end], *embedding.tables[1:]))
    layers = tuple(_layer(layer, rank, size) for layer in model.layers)
    part = None
    if head is not None:
        part = rows(head, [IndexRun.of(_outputs(weight, head), rank, size) for weight in head.weights])
    return RankModel(Transformer(embedding, layers, model.final_norm), group, words, part)


def rows(projection: Projection, runs: list[IndexRun]) -> Projection:
    """The outputs `runs`, one run of each part of a projection."""
    pairs = list(zip(projection.weights, runs, strict=True))
    taken = tuple(w[:, r.first : r.end] if projection.transposed else w[r.first : r.end] for w, r in pairs)
    biases = tuple(None if b is None else b[r.first : r.end] for b, r in zip(projection.biases, runs, strict=True))
    return Projection(taken, biases, projection.transposed)


def columns(projection: Projection, run: IndexRun) -> Projection:
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
    run = IndexRun.of(_outputs(up.weights[0], up), rank, size)
    if IndexRun.of(_outputs(up.weights[0], up), size - 1, size).count == 0:
        raise ValueError(f"{size} ranks cannot share an MLP of width {_outputs(up.weights[0], up)}: use fewer ranks")
    return replace(mlp, up=rows(up, [run] * len(up.weights)), down=columns(mlp.down, run))


def _outputs(weight: Tensor, projection: Projection) -> int:
    return weight.shape[1 if projection.transposed else 0]
