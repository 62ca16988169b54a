"""What a transformer is, as frozen values: tensors and numbers that `weft.transformer` computes with.

A family (`families/`) reads a model and describes it in these words; nothing here knows a family.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TypeVar

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
    """`weight` and `bias` [width], or None for ones and zeros. `shift` is added to the weight: Gemma's start at 0."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: NormKind = NormKind.LAYER
    shift: float = 0.0

    def factors(self) -> Tensor | None:
        """What normed values are multiplied by, [width]; differentiable."""
        return self.weight if self.weight is None or not self.shift else self.weight + self.shift


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
class RelativeBias:
    """What scores get by the distance key - query, as T5 has it: a row of `table` [buckets, heads] for each bucket.

    Half of the `buckets` are for keys before the query. Of these, half are for one distance each, and the others for
    ever wider runs up to `farthest`; the last is for all beyond.
    """

    table: Tensor
    buckets: int
    farthest: int

    def by_distance(self) -> Tensor:
        """float32 [heads, 2 * farthest + 1], from key - query = -farthest on; differentiable."""
        rows = torch.tensor(_bucket_of(self.buckets, self.farthest), device=self.table.device)
        return self.table[rows].t().float().contiguous()


@lru_cache(maxsize=64)
def _bucket_of(buckets: int, farthest: int) -> tuple[int, ...]:
    """The bucket of each distance from -farthest on. Numbers, and no tensor: that would be of the first call's mode."""
    with torch.inference_mode(False), torch.device("cpu"):
        distance = torch.arange(-farthest, farthest + 1)
        half, away = buckets // 2, distance.abs()
        exact = half // 2
        far = exact + (torch.log(away.float() / exact) / math.log(farthest / exact) * (half - exact)).to(torch.int64)
        rows: list[int] = ((distance > 0) * half + torch.where(away < exact, away, far.clamp(max=half - 1))).tolist()
        return tuple(rows)


@dataclass(frozen=True, eq=False)
class Attention:
    """`qkv` gives [q heads | k heads | v heads]; `left` and `right` limit what a token sees, -1 is no limit.

    `q_norm` and `k_norm` [head_dim] are for each head by itself, before it is rotated.
    """

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
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    bias: RelativeBias | None = None


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

    Gemma's pre-norm layers have norms of what comes out of a block, too, before the residual is added: `..._out_norm`.
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
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class StoredScale:
    """A number that a model keeps in a buffer []; it is rounded to the model's type before it is used."""

    value: Tensor

    def rounded(self, dtype: torch.dtype) -> float:
        return float(self.value.to(dtype))


@dataclass(frozen=True, eq=False)
class Embedding:
    """The sum of rows of `tables`, then `norm`. `names` says what each table's index is, for errors.

    Rows of the first table are multiplied by `scale` where there is one; vectors that a caller gives in their place are
    not. `projection` makes the model's width of the tables' where they differ; it comes last, after dropout.

    The row `padding` of the first table gets no gradient from here, as torch.nn.Embedding's padding_idx has it; nor do
    the rows `paddings` of the other tables, one for each, where any has one.
    """

    tables: tuple[Tensor, ...]
    names: tuple[str, ...]
    norm: Norm | None
    dropout: float = 0.0
    padding: int | None = None
    paddings: tuple[int | None, ...] = ()
    scale: StoredScale | None = None
    projection: Projection | None = None

    @property
    def width(self) -> int:
        """Of the tables."""
        return self.tables[0].shape[1]


@dataclass(frozen=True, eq=False)
class Transformer:
    """A whole stack; `embedding` is None where the caller gives vectors. `final_dropout` is what comes last."""

    embedding: Embedding | None
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    final_dropout: float = 0.0

    @property
    def input_width(self) -> int:
        """Of vectors that stand for words."""
        return self.width if self.embedding is None else self.embedding.width

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
    """Logits of words, after `transform` where there is one. `cap`: they are cap * tanh(logits / cap)."""

    projection: Projection
    transform: HeadTransform | None = None
    cap: float | None = None


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A whole model: the stack, and the head that gives logits of words where it has one."""

    transformer: Transformer
    head: VocabularyHead | None = None


# Walks over a description ----------------------------------------------------------------------------------


def tensors(value: object, *, without: tuple[type, ...] = ()) -> Iterator[Tensor]:
    """Every tensor in a description, in a fixed order; those in one of `without` are left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, without):
        return
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item, without=without)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name), without=without)


def weights(value: object) -> Iterator[Tensor]:
    """The tensors that a model computes with in its own type: all but rotary frequencies and numbers in buffers."""
    return tensors(value, without=(Rotary, StoredScale))


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
