"""Training: the same layers as `forward.py` as differentiable ops, with dropout where the model has it.

Weights are packed again in each step, because the optimizer changes them; that is about 1 % of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from weft.kernels import PackedWeight, linear
from weft.kernels.attention import dropout_seed, self_attention, split_heads
from weft.kernels.cpu_attention import Scoring
from weft.kernels.norm import add_bias_residual_layernorm, gate, rmsnorm, rotary
from weft.packed import spec
from weft.packed.call import Inputs, Kept
from weft.packed.spec import NormKind, NormOrder


def forward(
    model: spec.Transformer, inputs: Inputs, *, training: bool, drops_attention: bool = True, kept: Kept | None = None
) -> Tensor:
    """The hidden states [T, width] after the last layer. Dropout acts where `training`."""
    x = _embed(model.embedding, inputs, training)
    call = _Call(inputs, training, drops_attention, kept or Kept())
    for layer in model.layers:
        if call.kept.states is not None:
            call.kept.states.append(x)
        x = _layer(layer, x, call)
    return x if model.final_norm is None else _norm(model.final_norm, x)


@dataclass(frozen=True, eq=False)
class _Call:
    inputs: Inputs
    training: bool
    drops_attention: bool
    kept: Kept


def _embed(embedding: spec.Embedding | None, inputs: Inputs, training: bool) -> Tensor:
    if embedding is None:
        assert inputs.vectors is not None
        return inputs.vectors
    rows = [] if inputs.vectors is None else [inputs.vectors]
    skipped = len(rows)
    pairs = zip(embedding.tables[skipped:], inputs.indices[skipped:], strict=True)
    rows += [F.embedding(index, table) for table, index in pairs]
    x = rows[0]
    for row in rows[1:]:
        x = x + row
    if embedding.norm is not None:
        x = _norm(embedding.norm, x)
    return F.dropout(x, embedding.dropout, training)


def _layer(layer: spec.Layer, x: Tensor, call: _Call) -> Tensor:
    training = call.training
    after_attention = layer.attention_out_dropout if training else 0.0
    after_mlp = layer.mlp_out_dropout if training else 0.0
    if layer.order is NormOrder.POST:
        assert layer.attention_norm is not None
        assert layer.mlp_norm is not None
        context = _attention(layer.attention, x, call)
        x = _norm(layer.attention_norm, _project(layer.attention.out, context, residual=x, dropout=after_attention))
        return _norm(layer.mlp_norm, _mlp(layer.mlp, x, residual=x, dropout=after_mlp, training=training))
    y = x if layer.attention_norm is None else _norm(layer.attention_norm, x)
    x = _project(layer.attention.out, _attention(layer.attention, y, call), residual=x, dropout=after_attention)
    y = x if layer.mlp_norm is None else _norm(layer.mlp_norm, x)
    return _mlp(layer.mlp, y, residual=x, dropout=after_mlp, training=training)


def _attention(a: spec.Attention, x: Tensor, call: _Call) -> Tensor:
    inputs = call.inputs
    qkv = _project(a.qkv, x).view(inputs.tokens, a.heads + 2 * a.kv_heads, a.head_dim)
    if a.rotary is not None:
        assert inputs.positions is not None
        cos, sin = a.rotary.tables(inputs.farthest + 1)
        qkv = rotary(qkv, cos, sin, inputs.positions, heads=a.heads + a.kv_heads)
    if call.kept.keys_values is not None:
        call.kept.keys_values.append(split_heads(qkv, a.heads, a.kv_heads)[1:])
    dropout = a.dropout if call.training and call.drops_attention else 0.0
    scoring = Scoring(a.scale, a.left, a.right, dropout=dropout, seed=dropout_seed() if dropout else None)
    out = self_attention(qkv, inputs.cu_seqlens, scoring, heads=a.heads, kv_heads=a.kv_heads)
    return out.view(inputs.tokens, a.heads * a.head_dim)


def _mlp(mlp: spec.Mlp, x: Tensor, *, residual: Tensor, dropout: float, training: bool) -> Tensor:
    if mlp.gated:
        middle = gate(_project(mlp.up, x), activation=mlp.activation)
    else:
        middle = _project(mlp.up, x, activation=mlp.activation)
    return _project(mlp.down, F.dropout(middle, mlp.dropout, training), residual=residual, dropout=dropout)


def _project(
    projection: spec.Projection, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    weight = PackedWeight.from_dense(projection.weight())
    if residual is not None and dropout > 0:
        return residual + F.dropout(linear(x, weight, bias=projection.bias()), dropout)
    return linear(x, weight, bias=projection.bias(), activation=activation, residual=residual)


def _norm(norm: spec.Norm, x: Tensor) -> Tensor:
    if norm.kind is NormKind.RMS:
        return rmsnorm(x, norm.weight, eps=norm.eps).out
    return add_bias_residual_layernorm(x, norm.weight, norm.bias, eps=norm.eps).out
