"""Training: the layers as differentiable ops, with dropout where the model has it.

Weights are packed again in each step, because the optimizer changes them; that is about 1 % of a step. The layers are
written once, for one process and for the ranks of a group (`weft.parallel.training`): `Ops` says how a matmul runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.kernels import PackedWeight, linear
from weft.kernels.attention import dropout_seed, self_attention, split_heads
from weft.kernels.cpu_attention import Scoring
from weft.kernels.norm import add_bias_residual_layernorm, gate, rmsnorm, rotary
from weft.models.spec import Attention, Embedding, Layer, Mlp, Norm, NormKind, NormOrder, Projection, Transformer
from weft.transformer.call import NO_EXTRAS, Extras, Inputs


class Ops(Protocol):
    """How the matmuls and the dropout of a layer run, and where its rows come from.

    Between blocks a process holds *rows*, [T, width] or its share of them; inside of one it holds all T tokens of its
    columns. On one process both are everything.
    """

    def words(self, embedding: Embedding, ids: Tensor) -> Tensor:
        """The process's rows of the first table's entries for ids [T]."""
        ...

    def rows(self, vectors: Tensor) -> Tensor:
        """The process's rows of vectors [T, width]."""
        ...

    def take(self, index: Tensor) -> Tensor:
        """The process's part of an index [T]."""
        ...

    def column(self, projection: Projection, rows: Tensor, *, activation: str | None = None) -> Tensor:
        """Into a block: activation(all rows w^T + b) -> [T, N]."""
        ...

    def row(self, projection: Projection, x: Tensor, *, residual: Tensor | None, dropout: float) -> Tensor:
        """Out of it: the process's rows of dropout(x w^T + b) + residual, where there is one; x [T, K]."""
        ...

    def drop(self, x: Tensor, p: float) -> Tensor:
        """Dropout inside a block; `p` is 0 where nothing is dropped."""
        ...

    def drop_rows(self, rows: Tensor, p: float) -> Tensor:
        """Dropout between blocks."""
        ...

    def seed(self) -> Tensor:
        """int64 [1] for the dropout of attention weights."""
        ...


class OneProcess:
    """The whole model in one process."""

    def words(self, embedding: Embedding, ids: Tensor) -> Tensor:
        return F.embedding(ids, embedding.tables[0], padding_idx=embedding.padding)

    def rows(self, vectors: Tensor) -> Tensor:
        return vectors

    def take(self, index: Tensor) -> Tensor:
        return index

    def column(self, projection: Projection, rows: Tensor, *, activation: str | None = None) -> Tensor:
        return linear(rows, PackedWeight.from_dense(projection.weight()), bias=projection.bias(), activation=activation)

    def row(self, projection: Projection, x: Tensor, *, residual: Tensor | None, dropout: float) -> Tensor:
        weight = PackedWeight.from_dense(projection.weight())
        if dropout > 0:
            y = F.dropout(linear(x, weight, bias=projection.bias()), dropout)
            return y if residual is None else residual + y
        return linear(x, weight, bias=projection.bias(), residual=residual)

    def drop(self, x: Tensor, p: float) -> Tensor:
        return F.dropout(x, p) if p else x

    def drop_rows(self, rows: Tensor, p: float) -> Tensor:
        return self.drop(rows, p)

    def seed(self) -> Tensor:
        return dropout_seed()


@dataclass(frozen=True, eq=False)
class TrainingCall:
    """One pass: its inputs, how its matmuls run, whether dropout acts, also on attention weights, what it must hand
    out, and whether layers that say so are computed again in the backward pass."""

    inputs: Inputs
    ops: Ops
    training: bool = False
    drops_attention: bool = False
    extras: Extras = NO_EXTRAS
    recomputes: bool = False


def forward(model: Transformer, call: TrainingCall) -> Tensor:
    """The rows that this process holds of the hidden states after the last layer."""
    return layers(model, embed(model.embedding, call), call)


def layers(model: Transformer, x: Tensor, call: TrainingCall) -> Tensor:
    """All layers and the last norm, on the rows `x` that this process holds."""
    # What is handed out of a layer must be handed out once.
    recomputes = call.recomputes and torch.is_grad_enabled() and call.extras.keys_values is None
    for layer in model.layers:
        if call.extras.states is not None:
            call.extras.states.append(x)
        if layer.recomputes and recomputes:
            x = checkpoint(_layer, layer, x, call, use_reentrant=False)
        else:
            x = _layer(layer, x, call)
    x = x if model.final_norm is None else norm(model.final_norm, x)
    return call.ops.drop_rows(x, model.final_dropout if call.training else 0.0)


def embed(embedding: Embedding | None, call: TrainingCall) -> Tensor:
    """The rows that this process holds of what goes into the first layer."""
    inputs, ops = call.inputs, call.ops
    if inputs.vectors is not None:
        x = ops.rows(inputs.vectors)
    else:
        assert embedding is not None
        x = ops.words(embedding, inputs.indices[0])
        x = x if embedding.scale is None else x * embedding.scale.rounded(x.dtype)
    if embedding is None:
        return x
    others = embedding.tables[1:], inputs.indices[1:], embedding.paddings or (None,) * (len(embedding.tables) - 1)
    for table, index, row in zip(*others, strict=True):
        x = x + F.embedding(ops.take(index), table, padding_idx=row)
    if embedding.norm is not None:
        x = norm(embedding.norm, x)
    x = ops.drop_rows(x, embedding.dropout if call.training else 0.0)
    if embedding.projection is None:
        return x
    return linear(x, PackedWeight.from_dense(embedding.projection.weight()), bias=embedding.projection.bias())


def _layer(layer: Layer, x: Tensor, call: TrainingCall) -> Tensor:
    ops = call.ops
    after_attention = layer.attention_out_dropout if call.training else 0.0
    after_mlp = layer.mlp_out_dropout if call.training else 0.0
    if layer.order is NormOrder.POST:
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        context = _attention(layer.attention, x, call)
        x = norm(layer.attention_norm, ops.row(layer.attention.out, context, residual=x, dropout=after_attention))
        return norm(layer.mlp_norm, ops.row(layer.mlp.down, _mlp(layer.mlp, x, call), residual=x, dropout=after_mlp))
    y = x if layer.attention_norm is None else norm(layer.attention_norm, x)
    context = _attention(layer.attention, y, call)
    x = _close(layer.attention.out, context, x, layer.attention_out_norm, after_attention, call)
    y = x if layer.mlp_norm is None else norm(layer.mlp_norm, x)
    return _close(layer.mlp.down, _mlp(layer.mlp, y, call), x, layer.mlp_out_norm, after_mlp, call)


def _close(
    projection: Projection, inner: Tensor, x: Tensor, out_norm: Norm | None, dropout: float, call: TrainingCall
) -> Tensor:  # fmt: skip
    """x + what a pre-norm block gives, normed where it has a norm of its own."""
    if out_norm is None:
        return call.ops.row(projection, inner, residual=x, dropout=dropout)
    return x + norm(out_norm, call.ops.row(projection, inner, residual=None, dropout=dropout))


def _attention(a: Attention, x: Tensor, call: TrainingCall) -> Tensor:
    inputs = call.inputs
    qkv = call.ops.column(a.qkv, x).view(inputs.tokens, a.heads + 2 * a.kv_heads, a.head_dim)
    if a.q_norm is not None or a.k_norm is not None:
        q, k, v = split_heads(qkv, a.heads, a.kv_heads)
        qkv = torch.cat([_norm_heads(a.q_norm, q), _norm_heads(a.k_norm, k), v], 1)
    if a.rotary is not None:
        assert inputs.positions is not None
        cos, sin = inputs.rotated(a.rotary)
        qkv = rotary(qkv, cos, sin, inputs.positions, heads=a.heads + a.kv_heads)
    if call.extras.keys_values is not None:
        call.extras.keys_values.append(split_heads(qkv, a.heads, a.kv_heads)[1:])
    dropout = a.dropout if call.training and call.drops_attention else 0.0
    bias = None if a.bias is None else a.bias.by_distance()
    scoring = Scoring(a.scale, a.left, a.right, None, bias, dropout, call.ops.seed() if dropout else None)
    out = self_attention(qkv, inputs.cu_seqlens, scoring, heads=a.heads, kv_heads=a.kv_heads)
    return out.view(inputs.tokens, a.heads * a.head_dim)


def _norm_heads(each: Norm | None, heads: Tensor) -> Tensor:
    """[T, heads, head_dim], each head by itself."""
    return heads if each is None else norm(each, heads.reshape(-1, heads.shape[2])).view(heads.shape)


def _mlp(mlp: Mlp, x: Tensor, call: TrainingCall) -> Tensor:
    if mlp.gated:
        middle = gate(call.ops.column(mlp.up, x), activation=mlp.activation)
    else:
        middle = call.ops.column(mlp.up, x, activation=mlp.activation)
    return call.ops.drop(middle, mlp.dropout if call.training else 0.0)


def norm(norm: Norm, x: Tensor) -> Tensor:
    """A norm of rows [M, width]."""
    if norm.kind is NormKind.RMS:
        return rmsnorm(x, norm.factors(), eps=norm.eps).out
    return add_bias_residual_layernorm(x, norm.factors(), norm.bias, eps=norm.eps).out
