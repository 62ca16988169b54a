"""What goes into one call of a model, and what comes out besides its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.packed.spec import Transformer


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one call computes on: `indices`, an int64 [T] for each embedding table, or `vectors` [T, width].

    Where the model has an embedding, vectors stand for the rows of its first table, and the first index is not used.
    `positions` [T] are for rotary embeddings; `farthest` is the largest. `model` is the description for which the call
    was prepared, where it was.
    """

    cu_seqlens: Tensor
    tokens: int
    indices: tuple[Tensor, ...] = ()
    vectors: Tensor | None = None
    positions: Tensor | None = None
    farthest: int = 0
    model: Transformer | None = None


@dataclass(frozen=True, eq=False)
class Kept:
    """What a call hands out besides its result; a list that is None is not asked for.

    `states` gets what goes into each layer, [T, width]; `keys_values` each layer's k and v, [T, kv_heads, head_dim].
    """

    states: list[Tensor] | None = None
    keys_values: list[tuple[Tensor, Tensor]] | None = None
