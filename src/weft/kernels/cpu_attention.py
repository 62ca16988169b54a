"""The native attention on torch tensors: checks what it gets, then hands addresses to C++ with the GIL released.

The core never checks again, so nothing may pass here that would make it read or write out of bounds.

Attention to keys and values in a cache, and the writing of the cache: checked, then handed to C++ as addresses.

The core never checks again, so nothing may pass here that would make it read or write out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft import _core
from weft.kernels.cpu import dtype_code, isa, thread_count

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Scoring:
    """How scores are made from q, k and their distance; `left` and `right` below 0 are no limit.

    Query i of a sequence is level with key `at = i + keys - queries`, so that the last ones meet. It sees the keys
    from `at - left` to `at + right`. `slopes` [heads] subtracts slope * |at - key|, `bias` [heads, 2 * reach + 1]
    adds bias[reach + key - at], with distances beyond `reach` counted as `reach`.

    `dropout` is the probability with which a weight is dropped; which ones is a hash of `seed`, an int64 tensor of one
    element, and of head, query and key.
    """

    scale: float
    left: int = -1
    right: int = -1
    slopes: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring, *,
    out: Tensor, lse: Tensor | None = None, isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """q [Tq, H, D], k and v [Tk, Hkv, D], cu_q and cu_k [sequences + 1] -> out [Tq, H, D]; lse takes [H, Tq]."""
    check(q, k, v, cu_q, cu_k, scoring)
    _check_like(out, "out", q.shape, q.dtype)
    job = _job(q, k, v, out, scoring, lse)
    cu = cu_q.data_ptr(), cu_k.data_ptr(), cu_q.numel() - 1
    _core.attention(isa(isa_name), job, *cu, thread_count(threads))


def attention_grad(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    scoring: Scoring, *, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None = None,
    isa_name: str = "", threads: int = 0,
) -> None:  # fmt: skip
    """The gradients of `attention`, from its `out` and `lse`; `dbias` must come zeroed."""
    check(q, k, v, cu_q, cu_k, scoring)
    for t, name, like in ((dout, "dout", q), (out, "out", q), (dq, "dq", q), (dk, "dk", k), (dv, "dv", v)):
        _check_like(t, name, like.shape, q.dtype)
    job = _job(q, k, v, out, scoring, lse)
    grads = strided(dout), strided(dq), strided(dk), strided(dv)
    cu = cu_q.data_ptr(), cu_k.data_ptr(), cu_q.numel() - 1
    _core.attention_grad(
        isa(isa_name), job, *grads, 0 if dbias is None else dbias.data_ptr(), *cu, thread_count(threads)
    )


def _job(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scoring: Scoring, lse: Tensor | None
) -> _core.Attention:  # fmt: skip
    tokens, heads, width = q.shape
    slopes = 0 if scoring.slopes is None else scoring.slopes.data_ptr()
    bias, reach = (0, 0) if scoring.bias is None else (scoring.bias.data_ptr(), scoring.bias.shape[1] // 2)
    return _core.Attention(
        strided(q), strided(k), strided(v), strided(out), dtype_code(q.dtype), heads, k.shape[1], width, tokens,
        scoring.scale, scoring.left, scoring.right, slopes, bias, reach, 0 if lse is None else lse.data_ptr(),
        *_dropout(scoring),
    )  # fmt: skip


def drop_below(dropout: float) -> int:
    """A weight is dropped when its hash of 32 bits is below this."""
    return min(round(dropout * 2**32), 2**32 - 1)


def _dropout(scoring: Scoring) -> tuple[int, int, float]:
    if scoring.dropout == 0.0 or scoring.seed is None:
        return 0, 0, 1.0
    return int(scoring.seed) % 2**64, drop_below(scoring.dropout), 1 / (1 - scoring.dropout)


def strided(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0), t.stride(1)


def _check_like(t: Tensor, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
    if t.shape != shape or t.dtype != dtype or not t.is_cpu:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)} on the CPU, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    if t.stride(2) != 1 and t.shape[2] > 1 and t.numel():
        raise ValueError(f"the last dim of {name} must be contiguous, got strides {t.stride()}; call .contiguous()")


def check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring) -> None:
    """Raises unless the shapes, types and offsets fit each other."""
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q must have shape [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim], "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    heads, width = q.shape[1:]
    if not 1 <= width <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {width}")
    if k.shape[2] != width or k.shape[1] < 1 or heads % k.shape[1]:
        raise ValueError(
            f"k must have head_dim {width} like q and a number of heads that divides {heads}, got {list(k.shape)}"
        )
    _check_like(q, "q", q.shape, q.dtype)
    _check_like(k, "k", k.shape, q.dtype)
    _check_like(v, "v", k.shape, q.dtype)
    check_offsets(cu_q, "cu_q", q.shape[0])
    if cu_k is not cu_q:
        check_offsets(cu_k, "cu_k", k.shape[0])
    elif k.shape[0] != q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} tokens and q {q.shape[0]}; different lengths need offsets of their own")
    if cu_q.numel() != cu_k.numel():
        raise ValueError(f"cu_q has {cu_q.numel() - 1} sequences and cu_k {cu_k.numel() - 1}; they must be as many")
    _check_scoring(scoring, heads)


def _check_scoring(scoring: Scoring, heads: int) -> None:
    if not 0 <= scoring.dropout < 1:
        raise ValueError(f"dropout is the probability to drop a weight, from 0 to below 1, got {scoring.dropout}")
    if scoring.dropout and (scoring.seed is None or scoring.seed.numel() != 1 or scoring.seed.dtype != torch.int64):
        raise ValueError(f"dropout needs a seed, an int64 tensor of one element, got {scoring.seed}")
    slopes, bias = scoring.slopes, scoring.bias
    if slopes is not None and (
        slopes.shape != (heads,) or slopes.dtype != torch.float32 or not slopes.is_contiguous() or not slopes.is_cpu
    ):
        raise ValueError(
            f"slopes must be contiguous float32 of shape [{heads}] on the CPU, got {slopes.dtype} {list(slopes.shape)}"
        )
    if bias is not None and (
        bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] % 2 == 0
        or bias.dtype != torch.float32 or not bias.is_contiguous() or not bias.is_cpu
    ):  # fmt: skip
        raise ValueError(
            f"bias must be contiguous float32 of shape [{heads}, 2 * reach + 1] on the CPU, "
            f"got {bias.dtype} {list(bias.shape)}"
        )


def check_offsets(cu: Tensor, name: str, tokens: int) -> None:
    """Raises unless the core may read `cu` as the offsets of sequences with `tokens` tokens in all."""
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 1 or not cu.is_contiguous() or not cu.is_cpu:
        raise ValueError(
            f"{name} must be a flat contiguous int32 tensor on the CPU with one entry more than sequences, "
            f"got {cu.dtype} {list(cu.shape)} on {cu.device}"
        )
    values = cu.numpy()
    if values[0] != 0 or values[-1] != tokens or (values[1:] < values[:-1]).any():
        raise ValueError(
            f"{name} must rise from 0 to the {tokens} tokens, got {values[:8].tolist()}"
            f"{'...' if cu.numel() > 8 else ''}"
        )


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
