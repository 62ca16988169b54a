"""The plain twins of the packed ops, in ordinary torch, sequence by sequence. Slow, and obviously right."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu_attention import drop_below
from weft.packed.batch import PackedBatch


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    *,
    keys: PackedBatch | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """See `weft.packed.packed_attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lengths = batch.lengths.tolist(), (keys or batch).lengths.tolist()
    parts = ((q, lengths[0]), (k, lengths[1]), (v, lengths[1]))
    outputs = []
    first = 0
    for qs, ks, vs in zip(*(torch.split_with_sizes(t, n) for t, n in parts), strict=True):
        group = q.shape[1] // k.shape[1]
        ks, vs = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (ks, vs))
        scores = scale * qs.transpose(0, 1) @ ks.transpose(1, 2)  # [H, queries, keys]
        distance = _distances(qs.shape[0], ks.shape[1])
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None].to(scores.dtype) * distance.abs()
        if relative_bias is not None:
            reach = relative_bias.shape[1] // 2
            scores = scores + relative_bias[:, distance.clamp(-reach, reach) + reach]
        seen = _seen(distance, causal, window)
        scores = scores.masked_fill(~seen, float("-inf"))
        # A query that sees nothing gets zeros, and no NaN enters its gradient.
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
        weights = scores.softmax(-1) * seen
        if dropout and seed is not None:
            weights = weights * kept(int(seed), q.shape[1], first, qs.shape[0], ks.shape[1], dropout) / (1 - dropout)
        first += qs.shape[0]
        outputs.append((weights @ vs).transpose(0, 1))
    return torch.cat(outputs) if outputs else q.clone()


def kept(seed: int, heads: int, first: int, queries: int, keys: int, dropout: float) -> Tensor:
    """Which weights [heads, queries, keys] dropout leaves. `first` is the place of the first query in the batch."""
    low, high = seed % 2**32, seed // 2**32 % 2**32
    of_head = _mixed(low ^ _times(torch.arange(heads), 0x9E3779B1), high)[:, None]
    one = _mixed((of_head + _times(first + torch.arange(queries), 0x85EBCA77)) % 2**32, high)
    two = _mixed(one ^ high, of_head)
    hashed = _mixed((one[..., None] + _times(torch.arange(keys), 0x9E3779B1)) % 2**32, two[..., None])
    return hashed >= drop_below(dropout)


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32 for x below 2^32, in halves, as the product of both would not fit."""
    return ((x >> 16) * factor % 2**16 * 2**16 + (x % 2**16) * factor) % 2**32


def _mixed(x: Tensor, between: Tensor | int) -> Tensor:
    """The hash of csrc/isa/dropout.h."""
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15) ^ between, 0x846CA68B)
    return x ^ (x >> 16)


def _distances(queries: int, keys: int) -> Tensor:
    """key - query [queries, keys], the last query level with the last key."""
    return torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)


def _seen(distance: Tensor, causal: bool, window: tuple[int, int] | None) -> Tensor:
    seen = torch.ones_like(distance, dtype=torch.bool)
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen
