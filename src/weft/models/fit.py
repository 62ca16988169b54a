"""Do the tensors of a description fit each other? The core reads what it is told, so nobody else would notice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.errors import Unsupported
from weft.kernels.cpu_attention import MAX_HEAD_DIM
from weft.models.spec import Embedding, Layer, Norm, NormOrder, Projection, Transformer, tensors, weights


def check_model(model: Transformer, head: Projection | None = None) -> torch.dtype:
    """The type in which a model and its head compute; raises unless shapes, types and memory fit."""
    if not model.layers:
        raise Unsupported("the model has no layers, expected at least one")
    for t in tensors((model, head)):
        if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_neg():
            raise Unsupported(f"a weight is a {type(t).__name__} ({t.layout}), expected plain dense tensors")
    kinds = {(t.dtype, t.device) for t in weights((model, head))}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise Unsupported(f"a packed model computes in one type on one device, got {found}; convert it by .to()")
    width = model.width
    if model.embedding is not None:
        _check_embedding(model.embedding, width)
    for i, layer in enumerate(model.layers):
        _check_layer(layer, width, f"layer {i}")
    _check_norm(model.final_norm, width, "the end")
    if head is not None:
        _check_projection(head, head.size[0], head.size[1], "the head")
    return next(iter(kinds))[0]


def _check_embedding(embedding: Embedding, width: int) -> None:
    own = width if embedding.projection is None else embedding.width
    for name, t in zip(embedding.names, embedding.tables, strict=True):
        _check(t, (t.shape[0], own), f"the table of {name}")
    _check_norm(embedding.norm, own, "the embedding")
    if embedding.projection is not None:
        _check_projection(embedding.projection, width, own, "the embedding's projection")
    if embedding.scale is not None and (embedding.scale.value.numel() != 1 or len(embedding.tables) != 1):
        raise Unsupported("an embedding that is scaled must have one table, and one number to multiply it by")


def _check_layer(layer: Layer, width: int, where: str) -> None:
    a, mlp = layer.attention, layer.mlp
    if a.heads < 1 or a.kv_heads < 1 or a.heads % a.kv_heads:
        raise Unsupported(f"{where} has {a.heads} heads and {a.kv_heads} of keys; one must divide the other")
    if not 1 <= a.head_dim <= MAX_HEAD_DIM:
        raise Unsupported(f"{where} has heads of {a.head_dim}, expected 1 to {MAX_HEAD_DIM}")
    inner = mlp.down.size[1]
    _check_projection(a.qkv, (a.heads + 2 * a.kv_heads) * a.head_dim, width, f"q, k and v of {where}")
    _check_projection(a.out, width, a.heads * a.head_dim, f"the attention output of {where}")
    _check_projection(mlp.up, inner * (2 if mlp.gated else 1), width, f"the first MLP matrix of {where}")
    _check_projection(mlp.down, width, inner, f"the last MLP matrix of {where}")
    if a.rotary is not None and a.rotary.inverse_frequencies.shape != (a.head_dim / 2,):
        raise Unsupported(
            f"{where} has heads of {a.head_dim} and rotary frequencies {list(a.rotary.inverse_frequencies.shape)}"
        )
    for norm in (layer.attention_norm, layer.mlp_norm, layer.attention_out_norm, layer.mlp_out_norm):
        _check_norm(norm, width, where)
    for norm in (a.q_norm, a.k_norm):
        _check_norm(norm, a.head_dim, f"the heads of {where}")
    if layer.order is NormOrder.POST and (layer.attention_out_norm or layer.mlp_out_norm):
        raise Unsupported(f"{where} has norms after its residuals, and before them, too; expected one of these")
    if a.bias is not None:
        rows = a.bias.table.shape[0]
        _check(a.bias.table, (rows, a.heads), f"the relative bias of {where}")
        if not 4 <= a.bias.buckets <= rows or a.bias.farthest <= a.bias.buckets // 4:
            raise Unsupported(
                f"the relative bias of {where} has {a.bias.buckets} buckets up to a distance of {a.bias.farthest} and "
                f"{rows} rows, expected a row for each of at least 4 buckets, and a longer distance"
            )


def _check_projection(projection: Projection, n: int, k: int, what: str) -> None:
    got = [list(w.shape) for w in projection.weights]
    if any(w.dim() != 2 for w in projection.weights) or projection.size != (n, k):
        raise Unsupported(f"{what} must be [{n}, {k}] in all, got {got}; put a matrix of the model's own size there")
    for w, b in zip(projection.weights, projection.biases, strict=True):
        rows, columns = w.shape[::-1] if projection.transposed else w.shape
        if columns != k:
            raise Unsupported(f"{what} must have {k} columns, got {got}")
        if b is not None:
            _check(b, (rows,), f"a bias of {what}")


def _check_norm(norm: Norm | None, width: int, where: str) -> None:
    for t in () if norm is None else (norm.weight, norm.bias):
        if t is not None:
            _check(t, (width,), f"a norm of {where}")


def _check(t: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(t.shape) != shape:
        raise Unsupported(f"{what} has shape {list(t.shape)}, expected {list(shape)}")
    if t.numel() and not t.is_contiguous():
        raise Unsupported(f"{what} has strides {t.stride()}, expected contiguous memory; give it .contiguous()")
