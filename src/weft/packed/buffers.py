"""The memory of a program, planned once for a model and reused by every call."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import empty
from weft.packed import spec

_GROWTH = 1.25  # buffers are made this much larger than a batch that outgrew them


class Buffers:
    """The memory of one program for up to `capacity` tokens."""

    def __init__(self, model: spec.Transformer, dtype: torch.dtype) -> None:
        layers = model.layers
        ups = [_rows_of(layer.mlp.up) for layer in layers]
        qkvs = [_rows_of(layer.attention.qkv) for layer in layers]
        self.widths = {
            "x": model.width,
            "y": model.width,
            "context": max(layer.attention.heads * layer.attention.head_dim for layer in layers),
            "wide": max(*ups, *qkvs),  # qkv is done with when the MLP starts
            "gated": max((up // 2 for up, layer in zip(ups, layers, strict=True) if layer.mlp.gated), default=0),
        }
        self.dtype = dtype
        self.capacity = -1
        self.rows: dict[str, tuple[int, int]] = {}
        self._memory: dict[str, Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens; does nothing where there is room."""
        if tokens <= self.capacity:
            return
        capacity = tokens if self.capacity < 0 else int(tokens * _GROWTH)
        self.capacity, self.rows = -1, {}  # if there is not enough memory, there is none, and not what was before
        self._memory = {}
        self._memory = {name: empty(capacity, width, dtype=self.dtype) for name, width in self.widths.items()}
        self.rows = {name: (memory.data_ptr(), memory.shape[1]) for name, memory in self._memory.items()}
        self.capacity = capacity

    def copy(self, name: str, tokens: int, width: int) -> Tensor:
        """A copy [tokens, width] of what lies in a buffer."""
        return self._memory[name].view(-1)[: tokens * width].view(tokens, width).clone()


def _rows_of(projection: spec.Projection) -> int:
    return sum(w.shape[1 if projection.transposed else 0] for w in projection.weights)
