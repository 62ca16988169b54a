"""What a program for inference holds between calls: packed weights, and tables that calls make longer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels import PackedWeight, linear
from weft.kernels.cpu import isa
from weft.packed import spec


@dataclass(frozen=True, eq=False)
class Dense:
    """A projection in the form that the matmul reads; tensors are held because their addresses are used."""

    data: Tensor
    n: int
    k: int
    bias: Tensor | None

    @classmethod
    def of(cls, projection: spec.Projection) -> Dense:
        packed, bias = PackedWeight.from_dense(projection.weight().detach()), projection.bias()
        return cls(packed.data, packed.n, packed.k, None if bias is None else bias.detach().contiguous())

    def apply(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        return linear(x.contiguous(), PackedWeight(self.data, self.n, self.k, isa().name), bias=self.bias)


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """A layer in the form that the matmuls read."""

    described: spec.Layer
    qkv: Dense
    out: Dense
    up: Dense
    down: Dense

    @classmethod
    def of(cls, layer: spec.Layer) -> PackedLayer:
        attention, mlp = layer.attention, layer.mlp
        return cls(layer, *(Dense.of(p) for p in (attention.qkv, attention.out, mlp.up, mlp.down)))


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

    def of_rotary(self, rotary: spec.Rotary, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin for at least `positions` positions. They double: decoding asks for one more each time."""
        tables = self._rotary.get(id(rotary))
        if tables is None or tables[0].shape[0] < positions:
            size = positions if tables is None else max(positions, 2 * tables[0].shape[0])
            tables = self._rotary[id(rotary)] = rotary.tables(size)
        return tables


def common_dtype(sources: list[Tensor]) -> torch.dtype:
    """The type that all tensors have, on the CPU."""
    kinds = {(t.dtype, t.device.type) for t in sources if t.is_floating_point()}
    if len(kinds) != 1 or next(iter(kinds))[1] != "cpu":
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"a packed model computes on the CPU in one type, got {found}; call .cpu() and .float()")
    return next(iter(kinds))[0]
