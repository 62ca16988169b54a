"""What a transformer is, as frozen values: tensors and numbers that `weft.transformer` computes with.

A family (`families/`) reads a model and describes it in these words; nothing here knows a family.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor, nn

from weft.errors import Unsupported
from weft.kernels.cpu_attention import MAX_HEAD_DIM


class NormKind(Enum):
    LAYER = "layernorm"
    RMS = "rmsnorm"


class NormOrder(Enum):
    PRE = "pre"  # x + f(norm(x))
    POST = "post"  # norm(x + f(x))


@dataclass(frozen=True, eq=False)
class Norm:
    """`weight` and `bias` [width], or None for ones and zeros."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: NormKind = NormKind.LAYER


@dataclass(frozen=True, eq=False)
class Projection:
    """y = x w^T + b, where w [N, K] and b [N] may be stacked from parts (q, k and v, or gate and up).

    `transposed` parts are stored as [K, N].
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    transposed: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(N, K)"""
        shapes = [tuple(w.shape[::-1] if self.transposed else w.shape) for w in self.weights]
        return sum(n for n, _ in shapes), shapes[0][1]

    def weight(self) -> Tensor:
        """[N, K], a view where there is one part; differentiable."""
        parts = [w.t() for w in self.weights] if self.transposed else list(self.weights)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(self) -> Tensor | None:
        """[N], or None where no part has one."""
        if all(b is None for b in self.biases):
            return None
        out = 1 if self.transposed else 0
        parts = [w.new_zeros(w.shape[out]) if b is None else b for w, b in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class Rotary:
    """The angles of position p are p * inverse_frequencies [head_dim / 2]; cos and sin are multiplied by `scaling`."""

    inverse_frequencies: Tensor
    scaling: float = 1.0

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions from 0 on, float32 [positions, head_dim / 2]."""
        return self.tables_at(torch.arange(positions, device=self.inverse_frequencies.device))

    def tables_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same at any positions [n]."""
        inverse = self.inverse_frequencies.float()
        angles = positions.float()[:, None] * inverse[None]
        return (angles.cos() * self.scaling).contiguous(), (angles.sin() * self.scaling).contiguous()


@dataclass(frozen=True, eq=False)
class Attention:
    """`qkv` gives [q heads | k heads | v heads]; `left` and `right` limit what a token sees, -1 is no limit."""

    qkv: Projection
    out: Projection
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    left: int = -1
    right: int = -1
    rotary: Rotary | None = None
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))), or down(act(a) * b) with [a, b] = up(x) where it is gated."""

    up: Projection
    down: Projection
    activation: str
    gated: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention and MLP, each with its norm (None: none), a residual, and dropout on what the residual is added to.

    `recomputes`: the backward pass computes the layer again rather than keep what is inside of it.
    """

    attention: Attention
    attention_norm: Norm | None
    mlp: Mlp
    mlp_norm: Norm | None
    order: NormOrder
    attention_out_dropout: float = 0.0
    mlp_out_dropout: float = 0.0
    recomputes: bool = False


@dataclass(frozen=True, eq=False)
class Embedding:
    """The sum of rows of `tables`, then `norm`. `names` says what each table's index is, for errors.

    The row `padding` of the first table gets no gradient from here, as torch.nn.Embedding's padding_idx has it; nor do
    the rows `paddings` of the other tables, one for each, where any has one.
    """

    tables: tuple[Tensor, ...]
    names: tuple[str, ...]
    norm: Norm | None
    dropout: float = 0.0
    padding: int | None = None
    paddings: tuple[int | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Transformer:
    """A whole stack; `embedding` is None where the caller gives vectors."""

    embedding: Embedding | None
    layers: tuple[Layer, ...]
    final_norm: Norm | None

    @property
    def width(self) -> int:
        down = self.layers[0].mlp.down
        return down.weights[0].shape[1 if down.transposed else 0]


@dataclass(frozen=True, eq=False)
class HeadTransform:
    """What BERT does to a token before it is compared with words: norm(act(dense(x)))."""

    dense: Projection
    activation: str
    norm: Norm


@dataclass(frozen=True, eq=False)
class VocabularyHead:
    """Logits of words, after `transform` where there is one."""

    projection: Projection
    transform: HeadTransform | None = None


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A whole model: the stack, and the head that gives logits of words where it has one."""

    transformer: Transformer
    head: VocabularyHead | None = None


# Walks over a description ----------------------------------------------------------------------------------


def tensors(value: object, *, without: type | None = None) -> Iterator[Tensor]:
    """Every tensor in a description, in a fixed order; those in a `without` are left out."""
    if isinstance(value, Tensor):
        yield value
    elif without is not None and isinstance(value, without):
        return
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item, without=without)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name), without=without)


def weights(value: object) -> Iterator[Tensor]:
    """The tensors that a model computes with in its own type: all but rotary frequencies, which are tabled first."""
    return tensors(value, without=Rotary)


_ValueT = TypeVar("_ValueT")


def with_tensors(value: _ValueT, change: Callable[[Tensor], Tensor]) -> _ValueT:
    """A description with other tensors in the same places.

    >>> with_tensors(Norm(torch.ones(2), None, 1e-5), torch.Tensor.neg).weight
    tensor([-1., -1.])
    """
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(with_tensors(item, change) for item in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: with_tensors(getattr(value, f.name), change) for f in fields(value)})
    return value


def outline(value: object) -> str:
    """A digest of everything in a description but the values of its tensors: the same for the same computation."""
    return hashlib.blake2b(_outlined(value).encode(), digest_size=6).hexdigest()


def _outlined(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({','.join(_outlined(item) for item in value)})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}{_outlined(tuple(getattr(value, f.name) for f in fields(value)))}"
    return repr(value)


# Do the tensors fit each other? The core reads what it is told, so nobody else would notice -----------------


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
        for name, t in zip(model.embedding.names, model.embedding.tables, strict=True):
            _check(t, (t.shape[0], width), f"the table of {name}")
        _check_norm(model.embedding.norm, width, "the embedding")
    for i, layer in enumerate(model.layers):
        _check_layer(layer, width, f"layer {i}")
    _check_norm(model.final_norm, width, "the end")
    if head is not None:
        _check_projection(head, head.size[0], width, "the head")
    return next(iter(kinds))[0]


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
    _check_norm(layer.attention_norm, width, where)
    _check_norm(layer.mlp_norm, width, where)


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
