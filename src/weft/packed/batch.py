"""`PackedBatch`: the tokens of many texts end to end, and the way back to padded, flattened and nested tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from weft.packed.boundaries import Restarts, check_offsets, offsets_of, positions_of, starts_of


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Values [T, ...] of B sequences end to end. Sequence s is values[cu_seqlens[s] : cu_seqlens[s + 1]].

    `positions` [T] counts the tokens of each sequence from 0. `padded_index` [T] is where each token lies in the
    padded form of shape `padded_shape` = (rows, S), flattened: row * S + column. A row is a sequence, but where it was
    said that rows hold several. Make one with `from_padded`, `from_list` or `from_nested`; one made by hand is checked.

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

    def __post_init__(self) -> None:
        values, shape = self.values, self.padded_shape
        if not isinstance(values, Tensor) or values.dim() < 1:
            raise ValueError(f"values must be a tensor [tokens, ...], got {_kind(values)}")
        if len(shape) != 2 or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"padded_shape must be (rows, columns), got {shape!r}")
        tokens = values.shape[0]
        check_offsets(self.cu_seqlens, tokens)
        for name in ("positions", "padded_index"):
            t = getattr(self, name)
            if not isinstance(t, Tensor) or t.dtype != torch.int64 or t.shape != (tokens,):
                raise ValueError(f"{name} must be int64 of shape [{tokens}], one for each token, got {_kind(t)}")
        devices = {t.device for t in (values, self.cu_seqlens, self.positions, self.padded_index)}
        if len(devices) > 1:
            raise ValueError(f"all tensors of a batch must be on one device, got {sorted(map(str, devices))}")
        if not torch.equal(self.positions, positions_of(self.cu_seqlens, tokens)):
            raise ValueError("positions must count the tokens of each sequence from 0, as cu_seqlens cut them")
        self._check_index(self.padded_index, *shape)

    def _check_index(self, index: Tensor, rows: int, columns: int) -> None:
        if not index.numel():
            return
        if int(index[0]) < 0 or int(index[-1]) >= rows * columns or bool((index.diff() <= 0).any()):
            raise ValueError(f"padded_index must rise from token to token, within the {rows} x {columns} places")
        row = index // columns
        if bool(((row.diff() != 0) & (self.positions[1:] > 0)).any()):
            raise ValueError("padded_index puts a sequence of cu_seqlens into two rows")
        texts = (self.lengths > 0).nonzero().squeeze(1)
        if not self.is_flattened and (self.sequences != rows or not torch.equal(row[self.positions == 0], texts)):
            raise ValueError(f"padded_index must put sequence s of the {self.sequences} into row s of the {rows}")

    @classmethod
    def _made(
        cls, values: Tensor, cu: Tensor, positions: Tensor, index: Tensor, shape: tuple[int, int]
    ) -> PackedBatch:  # fmt: skip
        """Without the checks, for what is right by construction."""
        batch = object.__new__(cls)
        batch.__dict__.update(
            values=values, cu_seqlens=cu, positions=positions, padded_index=index, padded_shape=shape
        )  # fmt: skip
        return batch

    @classmethod
    def from_padded(cls, values: Tensor, mask: Tensor | None = None, *, starts: Tensor | None = None) -> PackedBatch:
        """Keeps the tokens of values [B, S, ...] where mask [B, S] is not 0; all of them without a mask.

        Any mask will do: padding on the right, on the left, holes, rows without a token. A row is one sequence, unless
        `starts` [B, S] says where others begin in it; then a row without tokens is none.

        >>> row, starts = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 1, 0, 0]]) != 0
        >>> PackedBatch.from_padded(row, starts=starts).cu_seqlens.tolist()
        [0, 2, 5]
        """
        if values.dim() < 2:
            raise ValueError(f"padded values have shape [batch, length, ...], got {list(values.shape)}")
        rows, columns = values.shape[:2]
        if mask is None:
            mask = torch.ones(rows, columns, dtype=torch.bool, device=values.device)
        for given, name in ((mask, "mask"), (starts, "starts")):
            if given is not None and given.shape != (rows, columns):
                raise ValueError(
                    f"the {name} must have shape [{rows}, {columns}] like the values, got {list(given.shape)}; "
                    f"it says for each token whether {_MEANING[name]}"
                )
        kept = mask != 0
        index = kept.reshape(-1).nonzero().squeeze(1)
        lengths = kept.sum(1) if starts is None else _lengths_from(starts, kept, index)
        flat = values.reshape(rows * columns, *values.shape[2:])
        return cls._from_lengths(flat[index], lengths, (rows, columns), index)

    @classmethod
    def from_list(cls, sequences: Sequence[Tensor] | Sequence[Sequence[int]]) -> PackedBatch:
        """Sequences of shape [length, ...] that agree in all other dims and in type; or lists of ids.

        >>> PackedBatch.from_list([torch.tensor([1, 2]), torch.tensor([3])]).values.tolist()
        [1, 2, 3]
        >>> PackedBatch.from_list([[1, 2], [3]]).values.tolist()
        [1, 2, 3]
        """
        sequences = [_as_sequence(s) for s in sequences]
        kinds = {(tuple(s.shape[1:]), s.dtype) for s in sequences if s.dim()}
        if len(kinds) != 1 or any(s.dim() == 0 for s in sequences):
            shapes = [f"{list(s.shape)} {s.dtype}" for s in sequences[:8]]
            raise ValueError(
                f"from_list needs at least one sequence, each [length, ...] with the rest alike; got {shapes}"
            )
        values = torch.cat(list(sequences))
        return cls.from_values(values, torch.tensor([s.shape[0] for s in sequences], device=values.device))

    @classmethod
    def from_values(cls, values: Tensor, lengths: Tensor) -> PackedBatch:
        """Values [T, ...] that are packed already, and the lengths [B] of their sequences, whole numbers."""
        if lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(f"lengths must be whole numbers, got {lengths.dtype}")
        if lengths.dim() != 1 or (lengths.numel() and int(lengths.min()) < 0) or int(lengths.sum()) != values.shape[0]:
            raise ValueError(
                f"lengths must be a flat tensor of numbers >= 0 that add up to the {values.shape[0]} values, "
                f"got {list(lengths.shape)} with sum {int(lengths.sum())}"
            )
        longest = int(lengths.max()) if lengths.numel() else 0
        return cls._from_lengths(values, lengths.to(values.device), (lengths.numel(), longest), None)

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
    def from_flattened(
        cls,
        values: Tensor,
        *,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
    ) -> PackedBatch:
        """Rows [B, S, ...] that hold several texts each, one a row in the result; without padding.

        Texts begin where `position_ids` [B, S] do not rise by 1, where the offsets `cu_seq_lens_q` and `_k` of one row
        say, or where the number `seq_idx` [B, S] of a token's text changes. All that is given must say the same.

        >>> row = torch.tensor([[5, 6, 7, 8, 9]])
        >>> PackedBatch.from_flattened(row, position_ids=torch.tensor([[0, 1, 0, 1, 2]])).lengths.tolist()
        [2, 3]
        """
        if values.dim() < 2:
            raise ValueError(f"flattened values have shape [rows, tokens, ...], got {list(values.shape)}")
        said = {
            "position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k,
            "max_length_q": max_length_q, "max_length_k": max_length_k, "seq_idx": seq_idx,
        }  # fmt: skip
        shape = (values.shape[0], values.shape[1])
        if position_ids is not None and tuple(position_ids.shape) not in (shape, (1, shape[1])):
            raise ValueError(f"position_ids must have shape {list(shape)}, got {list(position_ids.shape)}")
        rows = cls.from_padded(values, starts=starts_of(shape, said, Restarts(every_step=True)))
        return rows.one_a_row()

    @classmethod
    def _from_lengths(
        cls, values: Tensor, lengths: Tensor, shape: tuple[int, int], index: Tensor | None
    ) -> PackedBatch:
        cu, tokens = offsets_of(lengths), values.shape[0]
        positions = positions_of(cu, tokens)
        if index is None:
            rows = torch.arange(shape[0], device=lengths.device)
            index = rows.repeat_interleave(lengths, output_size=tokens) * shape[1] + positions
        return cls._made(values, cu, positions, index, shape)

    def __iter__(self) -> Iterator[Tensor]:
        """The sequences, one tensor [length, ...] each: `weft.generate` takes a batch for a list of prompts."""
        return iter(self.to_list())

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
    def is_flattened(self) -> bool:
        """Whether a row of the padded form holds more than one sequence."""
        rows = self.padded_index[self.positions == 0] // max(self.padded_shape[1], 1)
        return bool((rows.diff() == 0).any())

    @property
    def has_holes(self) -> bool:
        """Whether padding lies between the tokens of a sequence."""
        same = self.positions[1:] > 0  # the token follows one of its own sequence
        return bool(((self.padded_index.diff() != 1) & same).any())

    def real(self) -> Tensor:
        """bool [rows, S]: where the padded form has tokens."""
        flat = torch.zeros(self.padded_shape[0] * self.padded_shape[1], dtype=torch.bool, device=self.values.device)
        flat[self.padded_index] = True
        return flat.view(self.padded_shape)

    def with_values(self, values: Tensor) -> PackedBatch:
        """The same sequences with other values [T, ...]."""
        if values.shape[:1] != (self.tokens,):
            raise ValueError(f"the batch has {self.tokens} tokens, got values of shape {list(values.shape)}")
        return self._made(values, self.cu_seqlens, self.positions, self.padded_index, self.padded_shape)

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

    def to_flattened(self) -> dict[str, Any]:
        """One row of all texts, and where they end, as arguments of a model of transformers: `input_ids` [1, T],
        `position_ids` [1, T] that restart at 0, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`.

        >>> row = PackedBatch.from_list([[5, 6], [7]]).to_flattened()
        >>> row["input_ids"].tolist(), row["position_ids"].tolist(), row["cu_seq_lens_q"].tolist()
        ([[5, 6, 7]], [[0, 1, 0]], [0, 2, 3])
        """
        longest = int(self.lengths.max()) if self.sequences else 0
        return {
            "input_ids": self.values[None], "position_ids": self.positions[None], "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens, "max_length_q": longest, "max_length_k": longest,
        }  # fmt: skip

    def one_a_row(self) -> PackedBatch:
        """The same sequences, each in a row of its own, from column 0 on."""
        return self.from_values(self.values, self.lengths)

    def to_list(self) -> list[Tensor]:
        """One tensor [length, ...] for each sequence: views of the values."""
        return list(torch.split_with_sizes(self.values, self.lengths.tolist()))

    def to_nested(self) -> Tensor:
        """A jagged nested tensor [B, jagged, ...]."""
        return torch.nested.nested_tensor_from_jagged(self.values, offsets=self.cu_seqlens.to(torch.int64))


_MEANING = {"mask": "it is real (1) or padding (0)", "starts": "a text begins there"}


def _lengths_from(starts: Tensor, kept: Tensor, index: Tensor) -> Tensor:
    """The lengths of the texts in rows where each start, and each row, begins another one; int64."""
    first = torch.zeros_like(kept)
    first[:, :1] = True
    numbers = ((starts != 0) | first).reshape(-1).cumsum(0)[index]
    counted: tuple[Tensor, Tensor] = torch.unique_consecutive(numbers, return_counts=True)
    return counted[1]


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _as_sequence(given: object) -> Tensor:
    if isinstance(given, Tensor):
        return given
    if isinstance(given, list | tuple) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in given):
        return torch.tensor([int(i) for i in given], dtype=torch.int64)
    raise ValueError(
        f"a sequence is a {type(given).__name__}, expected a tensor [length, ...] or a list of ids; a tokenizer "
        "makes ids of texts"
    )
