"""Attention to keys and values in a cache, and the writing of the cache: checked, then handed to C++ as addresses.

The core never checks again, so nothing may pass here that would make it read or write out of bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft import _core
from weft.kernels.cpu import dtype_code, isa, thread_count
from weft.kernels.cpu_attention import Scoring, strided


def cache_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, slots: Tensor, lengths: Tensor, scoring: Scoring, *,
    out: Tensor, isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """Queries against a cache: q [Tq, H, D], k and v [slots, Hkv, capacity, D] -> out [Tq, H, D].

    Sequence s has the queries cu_q[s] to cu_q[s + 1] (int32), which are level with the last of the `lengths[s]` keys
    in slot `slots[s]` (both int64 [sequences]). Few queries cost no more than reading their keys once for each key
    head. Same bits as `attention` on the same keys.
    """
    _check(q, k, v, cu_q, slots, lengths, out)
    tokens, heads, width = q.shape
    kv_heads, capacity = k.shape[1:3]
    k_cache, v_cache = ((t.data_ptr(), width, capacity * width) for t in (k, v))
    starts = slots * (kv_heads * capacity)
    job = _core.Attention(
        strided(q), k_cache, v_cache, strided(out), dtype_code(q.dtype), heads, kv_heads, width, tokens,
        scoring.scale, scoring.left, scoring.right, 0, 0, 0, 0, 0, 0, 1.0,
    )  # fmt: skip
    _core.attention_at(
        isa(isa_name), job, cu_q.data_ptr(), starts.data_ptr(), lengths.data_ptr(), lengths.numel(),
        thread_count(threads),
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, slots: Tensor, lengths: Tensor, out: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 4 or k.shape != v.shape or q.shape[2] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"expected q [tokens, heads, head_dim] and k, v [slots, kv_heads, capacity, head_dim], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if out.shape != q.shape or {k.dtype, v.dtype, out.dtype} != {q.dtype} or q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(
            f"out must be {q.dtype} {list(q.shape)} like q, k and v of its type; "
            f"got {out.dtype} {list(out.shape)}, {k.dtype} and {v.dtype}"
        )
    if not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError(f"a cache is contiguous, got strides {k.stride()} and {v.stride()}")
    sizes, count = cu_q.diff(), lengths.numel()
    if cu_q.dtype != torch.int32 or cu_q.numel() != count + 1 or int(cu_q[0]) or int(cu_q[-1]) != q.shape[0]:
        raise ValueError(f"cu_q must be int32, from 0 to {q.shape[0]}, one more than the {count} lengths; got {cu_q}")
    for name, t in (("slots", slots), ("lengths", lengths)):
        if t.dtype != torch.int64 or t.dim() != 1 or t.numel() != count or not t.is_contiguous():
            raise ValueError(f"{name} must be int64 [{count}], got {t.dtype} {list(t.shape)}")
    if count and (int(sizes.min()) < 0 or int(lengths.min()) < 0 or int(lengths.max()) > k.shape[2]):
        raise ValueError(f"lengths are from 0 to the capacity, {k.shape[2]}, and cu_q rises; got {lengths} and {cu_q}")
    if count and (int(slots.min()) < 0 or int(slots.max()) >= k.shape[0]):
        raise ValueError(f"slots are from 0 to {k.shape[0] - 1}, got {slots}")


def store_heads(rows: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, *, threads: int = 0) -> None:
    """cache[slots[i], :, positions[i]] = rows[i]: rows [T, Hkv, D], cache [slots, Hkv, capacity, D].

    >>> cache, row = torch.zeros(2, 1, 3, 2), torch.tensor([[[1.0, 2.0]]])
    >>> store_heads(row, cache, torch.tensor([1]), torch.tensor([2]))
    >>> cache[1, 0, 2].tolist(), float(cache.sum())
    ([1.0, 2.0], 3.0)
    """
    slot_count, heads, capacity, width = cache.shape
    if rows.shape[1:] != (heads, width) or rows.dtype != cache.dtype or not cache.is_contiguous():
        raise ValueError(
            f"rows are {rows.dtype} {list(rows.shape)}, expected {cache.dtype} [tokens, {heads}, {width}] for a "
            f"contiguous cache"
        )
    if rows.numel() and (rows.stride(2) != 1 or rows.stride(1) != width):
        raise ValueError(f"the heads of a row must lie end to end, got strides {rows.stride()}")
    if not slots.shape == positions.shape == rows.shape[:1]:
        raise ValueError(f"expected a slot and a position for each of the {rows.shape[0]} rows")
    for name, t, end in (("slots", slots, slot_count), ("positions", positions, capacity)):
        if t.numel() and (int(t.min()) < 0 or int(t.max()) >= end):
            raise ValueError(f"{name} are from 0 to {end - 1}, got {int(t.min())} to {int(t.max())}")
    size = rows.element_size()
    place = (slots * (heads * capacity) + positions).to(torch.int64).contiguous()
    _core.store_heads(
        rows.data_ptr(), rows.stride(0) * size, cache.data_ptr(), capacity * width * size, place.data_ptr(), heads,
        width * size, rows.shape[0], thread_count(threads),
    )  # fmt: skip
