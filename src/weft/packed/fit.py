"""Do the tensors of a description fit each other? The core reads what it is told, so nobody else would notice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.errors import Unsupported
from weft.kernels.cpu_attention import MAX_HEAD_DIM
from weft.packed import spec


def check_model(model: spec.Transformer) -> torch.dtype:
    """The type in which the model computes; raises unless shapes, types and memory fit."""
    if not model.layers:
        raise Unsupported("the model has no layers, expected at least one")
    for t in spec.tensors(model):
        if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_neg():
            raise Unsupported(f"a weight is a {type(t).__name__} ({t.layout}), expected plain dense tensors")
    kinds = {(t.dtype, t.device) for t in spec.weights(model)}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise Unsupported(f"a packed model computes in one type on one device, got {found}; convert it by .to()")
    width = model.width
    if model.embedding is not None:
        for name, t in zip(model.embedding.names, model.embedding.tables, strict=True):
            _check(t, (t.shape[0], width), f"the table of {name}")
        _check_norm(model.embedding.norm, width, "the embedding")
    for i, layer in enumerate(model.layers):
        _check_layer(layer, width, f"layer {i}")
    _check_norm(model.final_norm, width, "the end")
    return next(iter(kinds))[0]


def _check_layer(layer: spec.Layer, width: int, where: str) -> None:
    a, mlp = layer.attention, layer.mlp
    if a.heads < 1 or a.kv_heads < 1 or a.heads % a.kv_heads:
        raise Unsupported(f"{where} has {a.heads} heads and {a.kv_heads} of keys; one must divide the other")
    if not 1 <= a.head_dim <= MAX_HEAD_DIM:
        raise Unsupported(f"{where} has heads of {a.head_dim}, expected 1 to {MAX_HEAD_DIM}")
    inner = _size(mlp.down)[1]
    _check_projection(a.qkv, (a.heads + 2 * a.kv_heads) * a.head_dim, width, f"q, k and v of {where}")
    _check_projection(a.out, width, a.heads * a.head_dim, f"the attention output of {where}")
    _check_projection(mlp.up, inner * (2 if mlp.gated else 1), width, f"the first MLP matrix of {where}")
    _check_projection(mlp.down, width, inner, f"the last MLP matrix of {where}")
    if a.rotary is not None and a.rotary.inverse_frequencies.shape != (a.head_dim / 2,):
        raise Unsupported(
            f"{where} has heads of {a.head_dim} and rotary frequencies {list(a.rotary.inverse_frequencies.shape)}"
        )
    _check_norm(layer.attention_norm, width, where)
    _check_norm(layer.mlp_norm, width, where)


def _size(projection: spec.Projection) -> tuple[int, int]:
    """(N, K)"""
    shapes = [tuple(w.shape[::-1] if projection.transposed else w.shape) for w in projection.weights]
    return sum(n for n, _ in shapes), shapes[0][1]


def _check_projection(projection: spec.Projection, n: int, k: int, what: str) -> None:
    got = [list(w.shape) for w in projection.weights]
    if any(w.dim() != 2 for w in projection.weights) or _size(projection) != (n, k):
        raise Unsupported(f"{what} must be [{n}, {k}] in all, got {got}; put a matrix of the model's own size there")
    for w, b in zip(projection.weights, projection.biases, strict=True):
        rows, columns = w.shape[::-1] if projection.transposed else w.shape
        if columns != k:
            raise Unsupported(f"{what} must have {k} columns, got {got}")
        if b is not None:
            _check(b, (rows,), f"a bias of {what}")


def _check_norm(norm: spec.Norm | None, width: int, where: str) -> None:
    for t in () if norm is None else (norm.weight, norm.bias):
        if t is not None:
            _check(t, (width,), f"a norm of {where}")


def _check(t: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(t.shape) != shape:
        raise Unsupported(f"{what} has shape {list(t.shape)}, expected {list(shape)}")
    if t.numel() and not t.is_contiguous():
        raise Unsupported(f"{what} has strides {t.stride()}, expected contiguous memory; give it .contiguous()")
