"""What a program for inference holds between calls: packed weights, tables, buffers and the cache. After the first call
of a size it allocates nothing but the result.

Attention reads a slot of a `RankCache` where it lies: sequences of different lengths, and the room behind them, cost
nothing.

    keys[l], values[l]     [slots, kv_heads, capacity, head_dim], a slot for each sequence, contiguous
    lengths                int64 [slots]: the tokens that each slot holds
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels import PackedWeight, linear
from weft.kernels.cpu import dtype_code, empty, isa
from weft.kernels.door import rows_at
from weft.models.fit import check_model
from weft.models.spec import (
    Layer,
    Norm,
    NormKind,
    NormOrder,
    Projection,
    Rotary,
    Transformer,
    weights,
)
from weft.transformer.parts import RankModel

_GROWTH = 1.25  # buffers are made this much larger than a batch that outgrew them
_CACHE_GROWTH = 1.5  # a cache that is full grows at least so much


@dataclass(frozen=True, eq=False)
class PackedDense:
    """A projection in the form that the matmul reads; `at` and `bias_at` are the addresses of the tensors, or 0."""

    data: Tensor
    n: int
    k: int
    bias: Tensor | None
    at: int
    bias_at: int

    @classmethod
    def of(cls, projection: Projection) -> PackedDense:
        packed, bias = PackedWeight.from_dense(projection.weight().detach()), projection.bias()
        bias = None if bias is None else bias.detach().contiguous()
        return cls(packed.data, packed.n, packed.k, bias, packed.data.data_ptr(), _address(bias))

    def apply(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        return linear(x.contiguous(), PackedWeight(self.data, self.n, self.k, isa().name), bias=self.bias)


@dataclass(frozen=True, eq=False)
class NormAddresses:
    """A norm by the addresses of its weight and bias, or 0. Whoever makes a program anew when weights move, as their
    stamp says, may use them as long as that."""

    is_rms: bool
    weight: int
    bias: int
    eps: float
    factors: Tensor | None = None  # what `weight` is the address of, where that is not the model's own

    @classmethod
    def of(cls, norm: Norm | None) -> NormAddresses | None:
        if norm is None:
            return None
        factors = norm.factors()
        factors = None if factors is None else factors.detach()
        return cls(norm.kind is NormKind.RMS, _address(factors), _address(norm.bias), norm.eps, factors)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """A layer in the form that the native core reads.

    `into_attention` and `into_mlp` are the norms of what goes into a block: of a post-norm layer, the last one of the
    block before.
    """

    spec: Layer
    qkv: PackedDense
    out: PackedDense
    up: PackedDense
    down: PackedDense
    into_attention: NormAddresses | None
    into_mlp: NormAddresses | None
    out_of_attention: NormAddresses | None = None
    out_of_mlp: NormAddresses | None = None
    q_norm: NormAddresses | None = None
    k_norm: NormAddresses | None = None
    bias: Tensor | None = None  # float32 [heads, 2 * reach + 1], by distance

    @classmethod
    def of(cls, layer: Layer, previous: Layer | None) -> PackedLayer:
        attention, mlp = layer.attention, layer.mlp
        qkv, out, up, down = (PackedDense.of(p) for p in (attention.qkv, attention.out, mlp.up, mlp.down))
        norms = layer.attention_norm, layer.mlp_norm
        if layer.order is NormOrder.POST:
            norms = None if previous is None else previous.mlp_norm, layer.attention_norm
        inner = layer.attention_out_norm, layer.mlp_out_norm, attention.q_norm, attention.k_norm
        bias = None if attention.bias is None else attention.bias.by_distance().detach()
        of = NormAddresses.of
        into_attention, into_mlp, out_of_attention, out_of_mlp, q_norm, k_norm = (of(n) for n in (*norms, *inner))
        return cls(
            layer, qkv, out, up, down, into_attention, into_mlp, out_of_attention, out_of_mlp, q_norm, k_norm, bias
        )  # fmt: skip


class Tables:
    """Numbers that depend on nothing but how many are needed; made longer when a call needs more, and kept."""

    def __init__(self) -> None:
        self._order = torch.empty(0, dtype=torch.int64)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    def in_order(self, tokens: int) -> Tensor:
        """0, 1, ... for at least `tokens` tokens."""
        if self._order.numel() < tokens:
            self._order = torch.arange(tokens)
        return self._order

    def of_rotary(self, rotary: Rotary, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin for at least `positions` positions. They double: decoding asks for one more each time."""
        tables = self._rotary.get(id(rotary))
        if tables is None or tables[0].shape[0] < positions:
            size = positions if tables is None else max(positions, 2 * tables[0].shape[0])
            tables = self._rotary[id(rotary)] = rotary.tables(size)
        return tables


class PassBuffers:
    """Memory for up to `capacity` tokens, a part of it for a chunk of them only where there is a `chunk`.

    A rank `alone` needs less: its norms read no `part` that still waits to be added, and no other rank waits for its
    MLP while attention runs. `embedded` is the width of embeddings that are still to be projected, or 0.
    """

    def __init__(
        self, layers: list[PackedLayer], width: int, dtype: torch.dtype, *, chunk: int | None, alone: bool,
        embedded: int = 0,
    ) -> None:  # fmt: skip
        heads, qkv = [layer.spec.attention for layer in layers], max(layer.qkv.n for layer in layers)
        wide = max(layer.up.n for layer in layers)
        gated = max((layer.up.n // 2 for layer in layers if layer.spec.mlp.gated), default=0)
        context = max(a.heads * a.head_dim for a in heads)
        self._widths = {"x": width, "part": width, "context": context, "qkv": max(qkv, wide) if alone else qkv}
        self._chunk_widths = {"gated": gated} if alone else {"y": width, "wide": wide, "gated": gated}
        self._same = {"y": "part", "wide": "qkv"} if alone else {}
        if embedded:
            self._widths["embedded"] = embedded
        else:
            self._same["embedded"] = "x"
        self._dtype, self._chunk = dtype, chunk
        self.capacity = 0
        self._memory: dict[str, Tensor] = {}
        self.at: dict[str, int] = {}  # the address of each buffer

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens; does nothing where there is room."""
        if tokens <= self.capacity:
            return
        capacity = int(tokens * _GROWTH) if self.capacity else tokens
        self.capacity, self._memory, self.at = 0, {}, {}  # without enough memory there is none, and not the old one
        chunk = capacity if self._chunk is None else min(capacity, self._chunk)
        memory = {name: empty(capacity, width, dtype=self._dtype) for name, width in self._widths.items()}
        memory |= {name: empty(chunk, width, dtype=self._dtype) for name, width in self._chunk_widths.items()}
        memory |= {name: memory[other] for name, other in self._same.items()}
        self._memory, self.at = memory, {name: buffer.data_ptr() for name, buffer in memory.items()}
        self.capacity = capacity

    def view(self, name: str, rows: int, width: int) -> Tensor:
        """[rows, width] at the start of a buffer."""
        return self._memory[name].view(-1)[: rows * width].view(rows, width)


class Workspace:
    """A rank's part of a model in the form that the native core reads. It holds copies of the weights."""

    def __init__(self, model: RankModel) -> None:
        """Raises unless all tensors of the model fit each other. They are the caller's, so this is no `assert`."""
        self.model, self.transformer = model, model.transformer
        self.dtype = check_model(model.transformer, model.head)
        device = next(weights(model.transformer)).device
        if device.type != "cpu":
            raise ValueError(f"inference on packed weights is for the CPU, got a model on {device}; call .cpu()")
        self.code, self.kernels, self.width = dtype_code(self.dtype), isa(), model.transformer.width
        self.input_width = model.transformer.input_width
        if model.transformer.embedding is not None:
            table, words = model.transformer.embedding.tables[0], model.words.end - model.words.first
            rows_at(table, dtype=self.dtype, shape=(words, self.input_width), what="the rank's words")
        layers = model.transformer.layers
        self.layers = [PackedLayer.of(layer, before) for layer, before in zip(layers, (None, *layers), strict=False)]
        self.head = None if model.head is None else PackedDense.of(model.head)
        embedding = model.transformer.embedding
        self.embedding_norm = None if embedding is None else NormAddresses.of(embedding.norm)
        scale = None if embedding is None else embedding.scale
        self.scale = 1.0 if scale is None else scale.rounded(self.dtype)
        projection = None if embedding is None else embedding.projection
        self.projection = None if projection is None else PackedDense.of(projection)
        self.last_norm = NormAddresses.of(layers[-1].mlp_norm if layers[-1].order is NormOrder.POST else None)
        self.final_norm = NormAddresses.of(model.transformer.final_norm)
        self.has_rotary = any(layer.attention.rotary is not None for layer in model.transformer.layers)
        self.tables = Tables()

    def with_head(self, model: RankModel) -> Workspace:
        """The same layers with the head of `model`, which is packed here."""
        check_model(model.transformer, model.head)
        twin = copy.copy(self)
        twin.model, twin.head = model, None if model.head is None else PackedDense.of(model.head)
        return twin


class RankCache:
    """Room for `slots` sequences of `capacity` tokens each; `reserve` makes more.

    `model` is a rank's part (`RankModel.transformer`), or a whole model.
    """

    def __init__(self, model: Transformer, *, slots: int, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        shapes = {(layer.attention.kv_heads, layer.attention.head_dim) for layer in model.layers}
        if len(shapes) != 1:
            raise ValueError(f"layers differ in key/value heads and their width: {sorted(shapes)}, expected one shape")
        if slots < 1 or capacity < 1:
            raise ValueError(f"got {slots} slots of {capacity} tokens, expected at least 1 of each")
        self.kv_heads, self.head_dim = next(iter(shapes))
        self.dtype = dtype
        self.keys = [self._room(slots, capacity) for _ in model.layers]
        self.values = [self._room(slots, capacity) for _ in model.layers]
        self.lengths = torch.zeros(slots, dtype=torch.int64)

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that a slot has room for."""
        return self.keys[0].shape[2]

    def reserve(self, tokens: int, *, slots: int = 1) -> None:
        """Makes room for `tokens` tokens in every one of `slots` slots, and a good deal more where it must copy."""
        if tokens <= self.capacity and slots <= self.slots:
            return
        grown = [
            now if wanted <= now else max(wanted, int(now * _CACHE_GROWTH))
            for wanted, now in ((slots, self.slots), (tokens, self.capacity))
        ]
        used = [(slot, length) for slot, length in enumerate(self.lengths.tolist()) if length]
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(grown[0] - self.slots)])
        for stored in (self.keys, self.values):
            for i, old in enumerate(stored):
                stored[i] = self._room(*grown)
                for slot, length in used:  # memory that holds nothing is not touched, and so not taken
                    stored[i][slot, :, :length] = old[slot, :, :length]

    def select(self, slots: Tensor) -> None:
        """Slot i becomes a copy of what slot slots[i] is now: for beams, which are copied and dropped."""
        if slots.dim() != 1 or not slots.numel() or int(slots.min()) < 0 or int(slots.max()) >= self.slots:
            raise ValueError(f"slots are {slots.tolist()}, expected numbers from 0 to {self.slots - 1}")
        for stored in (self.keys, self.values):
            for i, old in enumerate(stored):
                stored[i] = old.index_select(0, slots)
        self.lengths = self.lengths[slots]

    def truncate(self, slot: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of a slot; 0 empties it for another sequence."""
        if not 0 <= tokens <= int(self.lengths[slot]):
            raise ValueError(f"slot {slot} holds {int(self.lengths[slot])} tokens, cannot keep {tokens}")
        self.lengths[slot] = tokens

    def starts(self, slots: Tensor) -> Tensor:
        """int64: the first row of each slot, in rows of head_dim."""
        return slots * (self.kv_heads * self.capacity)

    def _room(self, slots: int, capacity: int) -> Tensor:
        return empty(slots, self.kv_heads, capacity, self.head_dim, dtype=self.dtype)

    def __repr__(self) -> str:
        return f"RankCache({len(self.keys)} layers, {self.slots} slots of {self.capacity}, lengths {self.lengths})"
