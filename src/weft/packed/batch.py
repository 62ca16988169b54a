"""`PackedBatch`: the tokens of many sequences end to end, and the way back to a padded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Values [T, ...] of B sequences end to end. Sequence s is values[cu_seqlens[s] : cu_seqlens[s + 1]].

    `positions` [T] counts the tokens of each sequence from 0. `padded_index` [T] is where each token lies in the
    padded form of shape `padded_shape` = (B, S), flattened: row * S + column. Make one with `from_padded`,
    `from_list` or `from_nested`.

    >>> batch = PackedBatch.from_padded(torch.tensor([[7, 8, 0], [0, 0, 9]]), torch.tensor([[1, 1, 0], [0, 0, 1]]))
    >>> batch.values.tolist(), batch.cu_seqlens.tolist(), batch.positions.tolist(), batch.columns.tolist()
    ([7, 8, 9], [0, 2, 3], [0, 1, 0], [0, 1, 2])
    >>> batch.to_padded().tolist()
    [[7, 8, 0], [0, 0, 9]]
    """

    values: Tensor
    cu_seqlens: Tensor
    positions: Tensor
    padded_index: Tensor
    padded_shape: tuple[int, int]

    @classmethod
    def from_padded(cls, values: Tensor, mask: Tensor | None = None) -> PackedBatch:
        """Keeps the tokens of values [B, S, ...] where mask [B, S] is not 0; all of them without a mask.

        Any mask will do: padding on the right, on the left, holes, rows without a token.
        """
        if values.dim() < 2:
            raise ValueError(f"padded values have shape [batch, length, ...], got {list(values.shape)}")
        rows, columns = values.shape[:2]
        if mask is None:
            mask = torch.ones(rows, columns, dtype=torch.bool, device=values.device)
        if mask.shape != (rows, columns):
            raise ValueError(
                f"the mask must have shape [{rows}, {columns}] like the values, got {list(mask.shape)}; "
                f"it says for each token whether it is real (1) or padding (0)"
            )
        kept = mask != 0
        index = kept.reshape(-1).nonzero().squeeze(1)
        return cls._from_lengths(
            values.reshape(rows * columns, *values.shape[2:])[index], kept.sum(1), (rows, columns), index
        )

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor]) -> PackedBatch:
        """Sequences of shape [length, ...] that agree in all other dims and in type.

        >>> PackedBatch.from_list([torch.tensor([1, 2]), torch.tensor([3])]).values.tolist()
        [1, 2, 3]
        """
        kinds = {(tuple(s.shape[1:]), s.dtype) for s in sequences if s.dim()}
        if len(kinds) != 1 or any(s.dim() == 0 for s in sequences):
            shapes = [f"{list(s.shape)} {s.dtype}" for s in sequences[:8]]
            raise ValueError(
                f"from_list needs at least one sequence, each [length, ...] with the rest alike; got {shapes}"
            )
        lengths = torch.tensor([s.shape[0] for s in sequences])
        return cls.from_values(torch.cat(list(sequences)), lengths)

    @classmethod
    def from_values(cls, values: Tensor, lengths: Tensor) -> PackedBatch:
        """Values [T, ...] that are packed already, and the lengths [B] of their sequences."""
        if lengths.dim() != 1 or (lengths.numel() and int(lengths.min()) < 0) or int(lengths.sum()) != values.shape[0]:
            raise ValueError(
                f"lengths must be a flat tensor of numbers >= 0 that add up to the {values.shape[0]} values, "
                f"got {list(lengths.shape)} with sum {int(lengths.sum())}"
            )
        longest = int(lengths.max()) if lengths.numel() else 0
        return cls._from_lengths(values, lengths, (lengths.numel(), longest), None)

    @classmethod
    def from_nested(cls, nested: Tensor) -> PackedBatch:
        """A nested tensor of torch, jagged or strided, of shape [B, jagged, ...]."""
        if not nested.is_nested:
            raise ValueError(f"from_nested takes a nested tensor, got a dense one of shape {list(nested.shape)}")
        jagged: Any = nested  # whose methods torch does not declare
        if nested.layout != torch.jagged or jagged.lengths() is not None:
            return cls.from_list(list(nested.unbind()))
        return cls.from_values(jagged.values(), jagged.offsets().diff())

    @classmethod
    def _from_lengths(
        cls, values: Tensor, lengths: Tensor, shape: tuple[int, int], index: Tensor | None
    ) -> PackedBatch:
        lengths = lengths.to(torch.int64)
        ends = lengths.cumsum(0)
        if shape[0] and int(ends[-1]) > torch.iinfo(torch.int32).max:
            raise ValueError(f"a batch holds at most 2^31 - 1 tokens, got {int(ends[-1])}; split it")
        cu = torch.zeros(shape[0] + 1, dtype=torch.int32)
        cu[1:] = ends
        positions = torch.arange(values.shape[0]) - (ends - lengths).repeat_interleave(lengths)
        if index is None:
            index = torch.arange(shape[0]).repeat_interleave(lengths) * shape[1] + positions
        return cls(values, cu, positions, index, shape)

    @property
    def tokens(self) -> int:
        return self.values.shape[0]

    @property
    def sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [B]."""
        return self.cu_seqlens.diff().to(torch.int64)

    @property
    def columns(self) -> Tensor:
        """int64 [T]: the column of each token in the padded form; unlike `positions` it counts padding."""
        return self.padded_index % max(self.padded_shape[1], 1)

    @property
    def has_holes(self) -> bool:
        """Whether padding lies between the tokens of a sequence."""
        same = self.positions[1:] > 0  # the token follows one of its own sequence
        return bool(((self.padded_index.diff() != 1) & same).any())

    def with_values(self, values: Tensor) -> PackedBatch:
        """The same sequences with other values [T, ...]."""
        if values.shape[:1] != (self.tokens,):
            raise ValueError(f"the batch has {self.tokens} tokens, got values of shape {list(values.shape)}")
        return replace(self, values=values)

    def gather(self, padded: Tensor) -> Tensor:
        """The values [T, ...] that another padded tensor [B, S, ...] has at this batch's tokens; differentiable."""
        if tuple(padded.shape[:2]) != self.padded_shape:
            raise ValueError(f"expected a padded tensor {[*self.padded_shape, '...']}, got {list(padded.shape)}")
        rows, columns = self.padded_shape
        return padded.reshape(rows * columns, *padded.shape[2:])[self.padded_index]

    def to_padded(self, *, fill: float = 0) -> Tensor:
        """[B, S, ...] with `fill` where there is no token; differentiable."""
        rest = self.values.shape[1:]
        rows, columns = self.padded_shape
        flat = self.values.new_full((rows * columns, *rest), fill)
        return flat.index_copy(0, self.padded_index, self.values).view(rows, columns, *rest)

    def to_list(self) -> list[Tensor]:
        """One tensor [length, ...] for each sequence: views of the values."""
        return list(torch.split_with_sizes(self.values, self.lengths.tolist()))

    def to_nested(self) -> Tensor:
        """A jagged nested tensor [B, jagged, ...]."""
        return torch.nested.nested_tensor_from_jagged(self.values, offsets=self.cu_seqlens.to(torch.int64))
