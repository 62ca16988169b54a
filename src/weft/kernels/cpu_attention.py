"""The native attention on torch tensors: checks what it gets, then hands addresses to C++ with the GIL released.

The core never checks again, so nothing may pass here that would make it read or write out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft import _core
from weft.kernels.cpu import dtype_code, isa, thread_count
from weft.kernels.door import check_offsets

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
