"""One call of a model: what goes in, what comes out besides its result, and the checks before the native core sees it.

Behind these checks addresses go to the core unchecked. Sizes follow from the model, whose tensors fit each other; what
a caller brings must have the model's type and width, and no number in it may point past a table, a sequence or a cache.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.kernels.door import check_offsets, index_at, rows_at
from weft.models.spec import Rotary, Transformer
from weft.transformer.memory import RankCache, Tables, Workspace

_TABLED = 1 << 17  # positions up to here have tables of their own


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one call computes on: `indices`, an int64 [T] for each embedding table, or `vectors` [T, width].

    Where the model has an embedding, vectors stand for the rows of its first table, and the first index is not used.
    `positions` [T] are for rotary embeddings; `farthest` is the largest. Where they are few and far, they count in
    `distinct`, which holds the positions themselves: tables up to the farthest would fill the memory. `model` is the
    description for which the call was prepared, where it was: then its indices are within the tables of that.
    """

    cu_seqlens: Tensor
    tokens: int
    indices: tuple[Tensor, ...] = ()
    vectors: Tensor | None = None
    positions: Tensor | None = None
    farthest: int = 0
    model: Transformer | None = None
    distinct: Tensor | None = None

    @classmethod
    def at(
        cls, cu_seqlens: Tensor, tokens: int, indices: tuple[Tensor, ...], vectors: Tensor | None, positions: Tensor,
        model: Transformer | None = None,
    ) -> Inputs:  # fmt: skip
        """Tokens at any positions [T]."""
        farthest, distinct = int(positions.max()) if tokens else 0, None
        if farthest >= max(_TABLED, 4 * tokens):
            distinct, positions = torch.unique(positions, return_inverse=True)
        return cls(cu_seqlens, tokens, indices, vectors, positions.contiguous(), farthest, model, distinct)

    def rotated(self, rotary: Rotary, tables: Tables | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin by which positions are rotated; from `tables`, if these keep some."""
        if self.distinct is not None:
            return rotary.tables_at(self.distinct)
        count = self.farthest + 1
        return rotary.tables(count) if tables is None else tables.of_rotary(rotary, count)

    def tensors(self) -> list[Tensor]:
        """All that is used of what was given."""
        given = [self.cu_seqlens, *self.indices[0 if self.vectors is None else 1 :]]
        return given + [t for t in (self.vectors, self.positions, self.distinct) if t is not None]

    def __str__(self) -> str:
        """In words that ranks compare before anything moves."""
        return f"{self.tokens} tokens of {self.cu_seqlens.numel() - 1} sequences, inputs {digest(*self.tensors())}"


def inputs_of(tokens: Tensor, lengths: Tensor, past: Tensor, model: Transformer) -> Inputs:
    """New tokens [T] of sequences of a decoder that have `past` tokens already, `lengths` new ones each."""
    cu = torch.zeros(lengths.numel() + 1, dtype=torch.int32)
    cu[1:] = lengths.cumsum(0)
    positions = torch.arange(tokens.numel()) + (past - cu[:-1]).repeat_interleave(lengths)
    assert model.embedding is not None
    known, names = {"input_ids": tokens, "position_ids": positions}, model.embedding.names
    if any(name not in known for name in names):
        raise ValueError(f"a model with {', '.join(names)} does not generate text; expected a decoder")
    indices = tuple(known[name].contiguous() for name in names)
    return Inputs(cu, tokens.numel(), indices, None, positions, int(positions.max()) if tokens.numel() else 0)


@dataclass(frozen=True, eq=False)
class Extras:
    """What a call hands out besides its result; a list that is None is not asked for.

    `states` gets what goes into each layer, [T, width]; `keys_values` each layer's k and v, [T, kv_heads, head_dim].
    """

    states: list[Tensor] | None = None
    keys_values: list[tuple[Tensor, Tensor]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return self.states is None and self.keys_values is None


NO_EXTRAS = Extras()


def digest(*tensors: Tensor) -> str:
    """Twelve hexadecimal digits by which ranks compare what they were given."""
    found = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array.data


@dataclass(eq=False, slots=True)
class InferenceCall:
    """New tokens, what `cache` holds of their sequences (`past`, by `slots`), the rows asked for, and what else."""

    inputs: Inputs
    extras: Extras
    rows: Tensor | None = None  # int64, or None for all
    cache: RankCache | None = None
    slots: Tensor | None = None  # int64 [B], with a cache
    past: Tensor | None = None  # int64 [B], with a cache

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: new tokens of each sequence."""
        return self.inputs.cu_seqlens.diff().to(torch.int64)

    @property
    def what(self) -> str:
        count = self.inputs.cu_seqlens.numel() - 1
        return f"inference on {self.inputs.tokens} tokens of {count} sequences"

    def tag(self) -> int:
        """A hash of all that ranks must have in common."""
        hashed = 0
        for tensor in (*self.inputs.tensors(), self.past, self.rows):
            if tensor is not None:
                hashed = zlib.crc32(_bytes(tensor), hashed)
        return hashed


class Keys:
    """Where the keys of each sequence are, in rows: in the cache where some are there already, else in qkv."""

    def __init__(self, call: InferenceCall) -> None:
        cu, cache = call.inputs.cu_seqlens, call.cache
        self._first = cu[:-1].to(torch.int64)
        self._past = torch.zeros_like(self._first) if call.past is None else call.past
        self.in_cache = cache is not None and bool(self._past.any())
        self._start = self._first
        if cache is not None:
            assert call.slots is not None
            starts = cache.starts(call.slots)
            # Token t of sequence s is number t - first[s] of the new ones, behind the past.
            shift = (starts + self._past - self._first).repeat_interleave(call.lengths)
            self.places = shift + torch.arange(call.inputs.tokens)
            self._start = starts if self.in_cache else self._first
        self.all = (self._start, self._past + call.lengths)

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Start and length of the keys that each of these tokens sees, itself the last."""
        sequence = torch.searchsorted(self._first, tokens, right=True) - 1
        # Sequences without tokens share their start with the next one: the last of them has the token.
        return self._start[sequence], self._past[sequence] + tokens - self._first[sequence] + 1


def checked_call(
    work: Workspace, inputs: Inputs, extras: Extras, cache: RankCache | None, slots: Tensor | None, rows: Tensor | None
) -> InferenceCall:
    """One call, checked; makes room in the cache."""
    _check_inputs(work, inputs)
    tokens, count = inputs.tokens, inputs.cu_seqlens.numel() - 1
    if rows is not None:
        index_at(rows, count=rows.numel(), below=tokens, what="the rows asked for")
    if cache is None:
        return InferenceCall(inputs, extras, rows)
    if any(layer.attention.right != 0 for layer in work.transformer.layers):
        raise ValueError("a cache needs causal attention; this model looks ahead: run it without a cache")
    _check_cache(work, cache)
    slots = torch.arange(count) if slots is None else slots
    if slots.shape != (count,) or len(set(slots.tolist())) != count:
        raise ValueError(f"slots are {slots.tolist()}, expected {count} different ones, one for each sequence")
    index_at(slots, count=count, below=cache.slots, what="slots of the cache")
    call = InferenceCall(inputs, extras, rows, cache, slots, past := cache.lengths[slots])
    index_at(past, count=count, below=cache.capacity + 1, what="lengths of the cache")
    if count:
        cache.reserve(int((past + call.lengths).max()))
    return call


def _check_inputs(work: Workspace, inputs: Inputs) -> None:
    tokens, embedding = inputs.tokens, work.transformer.embedding
    check_offsets(inputs.cu_seqlens, "cu_seqlens", tokens)  # they may have been written to since they were made
    check_vectors(inputs, work.input_width, work.dtype)
    tables = () if embedding is None else embedding.tables
    if inputs.vectors is None and not tables:
        raise ValueError("the model has no embedding: give it vectors [tokens, width]")
    if len(inputs.indices) != len(tables):
        raise ValueError(f"got indices for {len(inputs.indices)} tables, expected {len(tables)}")
    if embedding is not None and inputs.model is not work.transformer:  # else whoever prepared the call looked
        for i in range(0 if inputs.vectors is None else 1, len(tables)):
            below = tables[i].shape[0] if i else work.model.words.total
            index_at(inputs.indices[i], count=tokens, below=below, what=embedding.names[i])
    if work.has_rotary:
        if inputs.positions is None:
            raise ValueError("a model with rotary embeddings needs the position of each token")
        below = inputs.farthest + 1 if inputs.distinct is None else inputs.distinct.numel()
        index_at(inputs.positions, count=tokens, below=below, what="positions")


def check_vectors(inputs: Inputs, width: int, dtype: torch.dtype) -> None:
    """Raises unless vectors that stand for words have the model's type and width."""
    check_vector_type(inputs, dtype)
    if inputs.vectors is not None:
        rows_at(inputs.vectors, dtype=dtype, shape=(inputs.tokens, width), what="inputs_embeds")


def check_vector_type(inputs: Inputs, dtype: torch.dtype) -> None:
    """Raises where vectors have another type than the model."""
    given = inputs.vectors
    if given is not None and given.dtype != dtype:
        raise ValueError(
            f"inputs_embeds are {given.dtype}, the model computes in {dtype}; convert them with .to({dtype})"
        )


def _check_cache(work: Workspace, cache: RankCache) -> None:
    a = work.transformer.layers[0].attention
    held = (len(cache.keys), cache.kv_heads, cache.head_dim, cache.dtype)
    needed = (len(work.layers), a.kv_heads, a.head_dim, work.dtype)
    if held != needed:
        raise ValueError(
            f"the cache holds {held[0]} layers of {held[1]} key/value heads with {held[2]} columns of {held[3]}, "
            f"this rank computes {needed[0]} of {needed[1]} with {needed[2]} of {needed[3]}; make a new cache after "
            f"the model has changed"
        )
