"""What a transformer is, as values: tensors and numbers that `forward.py` and `training.py` execute.

A family's adapter (`models/`) reads a model and describes it in these words; nothing here knows a family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

import torch
from torch import Tensor


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
        """cos and sin, float32 [positions, head_dim / 2]."""
        inverse = self.inverse_frequencies.float()
        angles = torch.arange(positions, device=inverse.device).float()[:, None] * inverse[None]
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
