"""`RankCache`: the keys and values of this rank's heads, for sequences of any length.

    keys[l], values[l]     [slots, kv_heads, capacity, head_dim], a slot for each sequence, contiguous
    lengths                int64 [slots]: the tokens that each slot holds

Attention reads a slot where it lies: sequences of different lengths, and the room behind them, cost nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import empty
from weft.packed.spec import Transformer

_GROWTH = 1.5  # a cache that is full grows at least so much


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

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens in every slot, and a good deal more where it must copy."""
        if tokens <= self.capacity:
            return
        capacity, used = max(tokens, int(self.capacity * _GROWTH)), int(self.lengths.max())
        for stored in (self.keys, self.values):
            for i, old in enumerate(stored):
                stored[i] = self._room(self.slots, capacity)
                stored[i][:, :, :used] = old[:, :, :used]

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
