"""What one call of a `RankProgram` is given, where its keys lie, and the memory that it works in."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.kernels.cpu import empty
from weft.packed.call import Inputs
from weft.parallel.inference.cache import RankCache

if TYPE_CHECKING:
    from weft.packed.held import PackedLayer


@dataclass(frozen=True, eq=False)
class Job:
    """One call: new tokens, what `cache` holds of their sequences (`past`, by `slots`), and the rows asked for."""

    inputs: Inputs
    cache: RankCache | None
    slots: Tensor  # int64 [B]
    past: Tensor  # int64 [B]
    rows: Tensor | None  # int64, or None for all

    @property
    def lengths(self) -> Tensor:
        """New tokens of each sequence."""
        return self.inputs.cu_seqlens.diff().to(torch.int64)

    @property
    def what(self) -> str:
        count = self.inputs.cu_seqlens.numel() - 1
        return f"inference on {self.inputs.tokens} tokens of {count} sequences"

    def tag(self) -> int:
        """A hash of all that ranks must have in common."""
        hashed = 0
        given, first = self.inputs, 0 if self.inputs.vectors is None else 1
        for tensor in (
            given.cu_seqlens, given.positions, *given.indices[first:], given.vectors, self.past, self.rows
        ):  # fmt: skip
            if tensor is not None:
                array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
                hashed = zlib.crc32(array.data, hashed)
        return hashed


class Keys:
    """Where the keys of each sequence are, in rows: in the cache where some are there already, else in qkv."""

    def __init__(self, job: Job) -> None:
        cu, cache = job.inputs.cu_seqlens, job.cache
        self._first, self._past = cu[:-1].to(torch.int64), job.past
        self.in_cache = cache is not None and bool(job.past.any())
        if cache is not None:
            starts = cache.starts(job.slots)
            # Token t of sequence s is number t - first[s] of the new ones, behind the past.
            shift = (starts + self._past - self._first).repeat_interleave(job.lengths)
            self.places = shift + torch.arange(job.inputs.tokens)
        self._start = cache.starts(job.slots) if cache is not None and self.in_cache else self._first
        self.all = (self._start, self._past + job.lengths)

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Start and length of the keys that each of these tokens sees, itself the last."""
        sequence = torch.searchsorted(self._first, tokens, right=True) - 1
        # Sequences without tokens share their start with the next one: the last of them has the token.
        return self._start[sequence], self._past[sequence] + tokens - self._first[sequence] + 1


class Memory:
    """Buffers of a program: some for all tokens of a call, others for a chunk of them."""

    def __init__(self, layers: list[PackedLayer], width: int, dtype: torch.dtype, chunk: int | None) -> None:
        heads = [layer.described.attention for layer in layers]
        self._widths = {
            "x": width,
            "part": width,
            "context": max(a.heads * a.head_dim for a in heads),
            "qkv": max(layer.qkv.n for layer in layers),
        }
        self._chunk_widths = {
            "y": width,
            "wide": max(layer.up.n for layer in layers),
            "gated": max((layer.up.n // 2 for layer in layers if layer.described.mlp.gated), default=0),
        }
        self._dtype, self._chunk = dtype, chunk
        self._tokens = 0
        self._held: dict[str, Tensor] = {}

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens; does nothing where there is room."""
        if tokens <= self._tokens:
            return
        self._tokens = tokens
        chunk = tokens if self._chunk is None else min(tokens, self._chunk)
        self._held = {name: empty(tokens, width, dtype=self._dtype) for name, width in self._widths.items()}
        self._held |= {name: empty(chunk, width, dtype=self._dtype) for name, width in self._chunk_widths.items()}

    def at(self, name: str) -> int:
        """The address of a buffer."""
        return self._held[name].data_ptr()

    def view(self, name: str, rows: int, width: int) -> Tensor:
        """[rows, width] at the start of a buffer."""
        return self._held[name].view(-1)[: rows * width].view(rows, width)
