"""Packed attention and its gradient: kernels, then launchers with the arguments of `weft.kernels.cpu_attention`.

    out = softmax(scale q k^T - slope |distance|) v over packed sequences, with an online softmax
    dv = P^T dout    dS = P (dout v^T - delta), delta = sum(dout out)    dq = scale dS k    dk = scale dS^T q

    q, out, dout, dq [Tq, H, D]   k, v, dk, dv [Tk, Hkv, D]   lse, delta [H, Tq]   cu_q, cu_k [sequences + 1]

Blocks start where their sequence does, and keys are taken from the first to the last, so the bits of a sequence depend
on that sequence only. The gradient takes two passes, one over queries and one over keys: they compute the scores twice,
but need no atomic adds, so that the gradients are the same, bit for bit, at every run.

Neither has ever run on a GPU: they were run in Triton's interpreter and compiled for the targets of `compile.ARCHS`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from weft.kernels.cpu_attention import MAX_HEAD_DIM, Scoring
from weft.kernels.triton import launch


@triton.jit
def sequence_of(block, blocks, sequences):
    """The sequence s with blocks[s] <= block < blocks[s + 1]; `blocks` int32 [sequences + 1] rises from 0."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(blocks + middle) <= block
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def span_of(block, blocks, sequences, cu_q, cu_k, BLOCK: tl.constexpr):
    """Of a block's sequence: first query, queries, first key, keys; and the first row of the block in it."""
    sequence = sequence_of(block, blocks, sequences)
    q0 = tl.load(cu_q + sequence)
    queries = tl.load(cu_q + sequence + 1) - q0
    k0 = tl.load(cu_k + sequence)
    keys = tl.load(cu_k + sequence + 1) - k0
    return q0, queries, k0, keys, (block - tl.load(blocks + sequence)) * BLOCK


@triton.jit
def scores(products, distance, here, scale, slopes, head, left, right):
    """The scores of key - query = `distance`, minus infinity where a query does not see a key."""
    s = products * scale
    if slopes is not None:
        s -= tl.load(slopes + head) * tl.abs(distance).to(tl.float32)
    return tl.where(here & (distance >= -left) & (distance <= right), s, float("-inf"))


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_kernel(
    q, k, v, out, lse, slopes, cu_q, cu_k, blocks, sequences, tokens, scale, left, right, group, D,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_out, stride_outh,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes a block of queries of one sequence and one head, and goes over the keys."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    if block < tl.load(blocks + sequences):
        q0, queries, k0, keys, first = span_of(block, blocks, sequences, cu_q, cu_k, BLOCK_M)
        rows = first + tl.arange(0, BLOCK_M)
        level = rows + keys - queries
        ds = tl.arange(0, BLOCK_D)
        in_q = (rows < queries)[:, None] & (ds < D)[None, :]
        token = (q0 + rows).to(tl.int64)
        some_q = tl.load(q + head * stride_qh + token[:, None] * stride_q + ds[None, :], mask=in_q, other=0.0)
        low = tl.maximum(first + keys - queries - left, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(tl.minimum(first + BLOCK_M, queries) + keys - queries + right, keys)
        most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for n in range(low, high, BLOCK_N):
            cols = n + tl.arange(0, BLOCK_N)
            key = (k0 + cols).to(tl.int64)[:, None]
            in_k = (cols < keys)[:, None] & (ds < D)[None, :]
            some_k = tl.load(k + head // group * stride_kh + key * stride_k + ds[None, :], mask=in_k, other=0.0)
            products = tl.dot(some_q, tl.trans(some_k), input_precision=PRECISION)
            s = scores(
                products, cols[None, :] - level[:, None], (cols < keys)[None, :], scale, slopes, head, left, right
            )
            now = tl.maximum(most, tl.max(s, 1))
            base = tl.where(now == float("-inf"), 0.0, now)  # a query that has seen nothing yet
            p = tl.exp2((s - base[:, None]) * LOG2_E)
            shrink = tl.exp2((most - base) * LOG2_E)
            weight = weight * shrink + tl.sum(p, 1)
            some_v = tl.load(v + head // group * stride_vh + key * stride_v + ds[None, :], mask=in_k, other=0.0)
            total = total * shrink[:, None]
            total = tl.dot(p.to(some_v.dtype), some_v, total, input_precision=PRECISION)
            most = now
        seen = weight != 0.0  # also when it is NaN
        y = total / tl.where(seen, weight, 1.0)[:, None]
        at_out = out + head * stride_outh + token[:, None] * stride_out + ds[None, :]
        tl.store(at_out, y.to(out.dtype.element_ty), mask=in_q)
        if lse is not None:
            of_row = tl.where(seen, most + tl.log(weight), float("-inf"))
            tl.store(lse + head.to(tl.int64) * tokens + token, of_row, mask=rows < queries)


@triton.jit
def attention_grad_q_kernel(
    dout, q, k, v, out, dq, lse, delta, slopes, cu_q, cu_k, blocks, sequences, tokens, scale, left, right, group, D,
    stride_dout, stride_douth, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_out, stride_outh,
    stride_dq, stride_dqh,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first pass: a program takes a block of queries, goes over the keys in order, and leaves `delta` behind."""
    # Held over the loop, two wide float32 operands of dots would not fit the registers: they are read again instead.
    RELOAD: tl.constexpr = BLOCK_D > 128 and q.dtype.element_ty == tl.float32
    block = tl.program_id(0)
    head = tl.program_id(1)
    if block < tl.load(blocks + sequences):
        q0, queries, k0, keys, first = span_of(block, blocks, sequences, cu_q, cu_k, BLOCK_M)
        rows = first + tl.arange(0, BLOCK_M)
        level = rows + keys - queries
        ds = tl.arange(0, BLOCK_D)
        in_q = (rows < queries)[:, None] & (ds < D)[None, :]
        token = (q0 + rows).to(tl.int64)
        at_q = q + head * stride_qh + token[:, None] * stride_q + ds[None, :]
        some_q = tl.load(at_q, mask=in_q, other=0.0)
        at_dout = dout + head * stride_douth + token[:, None] * stride_dout + ds[None, :]
        some_dout = tl.load(at_dout, mask=in_q, other=0.0)
        some_out = tl.load(out + head * stride_outh + token[:, None] * stride_out + ds[None, :], mask=in_q, other=0.0)
        of_row = head.to(tl.int64) * tokens + token
        some_delta = tl.sum(some_dout.to(tl.float32) * some_out.to(tl.float32), 1)
        tl.store(delta + of_row, some_delta, mask=rows < queries)
        some_lse = tl.load(lse + of_row, mask=rows < queries, other=0.0)
        low = tl.maximum(first + keys - queries - left, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(tl.minimum(first + BLOCK_M, queries) + keys - queries + right, keys)
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for n in range(low, high, BLOCK_N):
            cols = n + tl.arange(0, BLOCK_N)
            if RELOAD:
                some_q = tl.load(at_q, mask=in_q, other=0.0, volatile=True)
                some_dout = tl.load(at_dout, mask=in_q, other=0.0, volatile=True)
            key = (k0 + cols).to(tl.int64)[:, None]
            in_k = (cols < keys)[:, None] & (ds < D)[None, :]
            some_k = tl.load(k + head // group * stride_kh + key * stride_k + ds[None, :], mask=in_k, other=0.0)
            some_v = tl.load(v + head // group * stride_vh + key * stride_v + ds[None, :], mask=in_k, other=0.0)
            products = tl.dot(some_q, tl.trans(some_k), input_precision=PRECISION)
            s = scores(
                products, cols[None, :] - level[:, None], (cols < keys)[None, :], scale, slopes, head, left, right
            )
            p = tl.where(s == float("-inf"), 0.0, tl.exp2((s - some_lse[:, None]) * LOG2_E))
            dp = tl.dot(some_dout, tl.trans(some_v), input_precision=PRECISION)
            d_scores = p * (dp - some_delta[:, None])
            total = tl.dot(d_scores.to(some_k.dtype), some_k, total, input_precision=PRECISION)
        at_dq = dq + head * stride_dqh + token[:, None] * stride_dq + ds[None, :]
        tl.store(at_dq, (total * scale).to(dq.dtype.element_ty), mask=in_q)


@triton.jit
def attention_grad_kv_kernel(
    dout, q, k, v, dk, dv, lse, delta, slopes, cu_q, cu_k, blocks, sequences, tokens, scale, left, right, group, D,
    stride_dout, stride_douth, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_dk, stride_dkh,
    stride_dv, stride_dvh,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The second pass: a program takes a block of keys of one key head, and goes over the query heads that share it.

    It takes their queries in order: nothing is added by two programs to one place.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    if block < tl.load(blocks + sequences):
        q0, queries, k0, keys, first = span_of(block, blocks, sequences, cu_q, cu_k, BLOCK_N)
        cols = first + tl.arange(0, BLOCK_N)
        ds = tl.arange(0, BLOCK_D)
        in_k = (cols < keys)[:, None] & (ds < D)[None, :]
        key = (k0 + cols).to(tl.int64)[:, None]
        some_k = tl.load(k + kv_head * stride_kh + key * stride_k + ds[None, :], mask=in_k, other=0.0)
        some_v = tl.load(v + kv_head * stride_vh + key * stride_v + ds[None, :], mask=in_k, other=0.0)
        low = tl.maximum(first - right + queries - keys, 0) // BLOCK_M * BLOCK_M
        high = tl.minimum(tl.minimum(first + BLOCK_N, keys) + left + queries - keys, queries)
        total_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        total_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for m in range(low, high, BLOCK_M):
                rows = m + tl.arange(0, BLOCK_M)
                in_q = (rows < queries)[:, None] & (ds < D)[None, :]
                token = (q0 + rows).to(tl.int64)
                at_q = q + head * stride_qh + token[:, None] * stride_q + ds[None, :]
                some_q = tl.load(at_q, mask=in_q, other=0.0)
                at_dout = dout + head * stride_douth + token[:, None] * stride_dout + ds[None, :]
                some_dout = tl.load(at_dout, mask=in_q, other=0.0)
                of_row = tokens.to(tl.int64) * head + token
                some_lse = tl.load(lse + of_row, mask=rows < queries, other=0.0)
                some_delta = tl.load(delta + of_row, mask=rows < queries, other=0.0)
                products = tl.dot(some_k, tl.trans(some_q), input_precision=PRECISION)
                distance = cols[:, None] - (rows + keys - queries)[None, :]
                here = (cols < keys)[:, None] & (rows < queries)[None, :]
                s = scores(products, distance, here, scale, slopes, head, left, right)
                p = tl.where(s == float("-inf"), 0.0, tl.exp2((s - some_lse[None, :]) * LOG2_E))
                total_v = tl.dot(p.to(some_dout.dtype), some_dout, total_v, input_precision=PRECISION)
                dp = tl.dot(some_v, tl.trans(some_dout), input_precision=PRECISION)
                d_scores = p * (dp - some_delta[None, :])
                total_k = tl.dot(d_scores.to(some_q.dtype), some_q, total_k, input_precision=PRECISION)
        at_dk = dk + kv_head * stride_dkh + key * stride_dk + ds[None, :]
        tl.store(at_dk, (total_k * scale).to(dk.dtype.element_ty), mask=in_k)
        at_dv = dv + kv_head * stride_dvh + key * stride_dv + ds[None, :]
        tl.store(at_dv, total_v.to(dv.dtype.element_ty), mask=in_k)


_NO_LIMIT = 2**29  # distances and limits are added in 32 bits


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring, *,
    out: Tensor, lse: Tensor | None = None, isa_name: str = "", threads: int = 0, config: launch.Config | None = None,
) -> None:  # fmt: skip
    """q [Tq, H, D], k and v [Tk, Hkv, D], cu_q and cu_k [sequences + 1] -> out [Tq, H, D]; lse takes [H, Tq].

    The offsets are trusted to rise from 0 to the number of tokens: to look would make the host wait for the device.
    This has never run on a GPU.
    """
    _check(q, k, v, cu_q, cu_k, scoring)
    launch.like(out, "out", tuple(q.shape), q.dtype, q.device)
    if lse is not None:
        _check_statistics(lse, "lse", q)
    tokens, heads, width = q.shape
    if not tokens or not heads:
        return
    padded = max(next_power_of_2(width), 16)
    chosen = config or launch.attention_forward(q.dtype, padded)[0]
    blocks, count = _blocks(cu_q, tokens, dict(chosen.blocks)["BLOCK_M"])
    attention_kernel[(count, heads)](
        q, k, v, out, lse, scoring.slopes, cu_q, cu_k, blocks, cu_q.numel() - 1, tokens, *_options(scoring),
        heads // k.shape[1], width, *_strides(q, k, v, out), PRECISION="ieee", BLOCK_D=padded, **chosen.launch,
    )  # fmt: skip


def attention_grad(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    scoring: Scoring, *, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None = None,
    isa_name: str = "", threads: int = 0, config: launch.Config | None = None,
) -> None:  # fmt: skip
    """The gradients of `attention`, from its `out` and `lse`: the same bits at every run.

    This has never run on a GPU.
    """
    _check(q, k, v, cu_q, cu_k, scoring)
    if dbias is not None:
        raise ValueError("the relative bias has no kernel for the GPU yet; give alibi slopes, or compute on the CPU")
    for t, name, like in ((dout, "dout", q), (out, "out", q), (dq, "dq", q), (dk, "dk", k), (dv, "dv", v)):
        launch.like(t, name, tuple(like.shape), q.dtype, q.device)
    _check_statistics(lse, "lse", q)
    (tokens, heads, width), (key_tokens, kv_heads) = q.shape, k.shape[:2]
    padded = max(next_power_of_2(width), 16)
    for_q = config or launch.attention_grad_q(q.dtype, padded)[0]
    for_kv = config or launch.attention_grad_kv(q.dtype, padded)[0]
    delta = torch.empty_like(lse)
    scored = (*_options(scoring), heads // kv_heads, width)
    if tokens and heads:
        blocks, count = _blocks(cu_q, tokens, dict(for_q.blocks)["BLOCK_M"])
        attention_grad_q_kernel[(count, heads)](
            dout, q, k, v, out, dq, lse, delta, scoring.slopes, cu_q, cu_k, blocks, cu_q.numel() - 1, tokens, *scored,
            *_strides(dout, q, k, v, out, dq), PRECISION="ieee", BLOCK_D=padded, **for_q.launch,
        )  # fmt: skip
    if key_tokens and heads:
        blocks, count = _blocks(cu_k, key_tokens, dict(for_kv.blocks)["BLOCK_N"])
        attention_grad_kv_kernel[(count, kv_heads)](
            dout, q, k, v, dk, dv, lse, delta, scoring.slopes, cu_q, cu_k, blocks, cu_q.numel() - 1, tokens, *scored,
            *_strides(dout, q, k, v, dk, dv), PRECISION="ieee", BLOCK_D=padded, **for_kv.launch,
        )  # fmt: skip


def _blocks(cu: Tensor, tokens: int, size: int) -> tuple[Tensor, int]:
    """Where the blocks of each sequence start, int32 [sequences + 1], and a bound on how many there are.

    The bound is known without asking the device; programs past the last block return at once.
    """
    lengths = cu[1:] - cu[:-1]
    starts = torch.zeros_like(cu)
    torch.cumsum((lengths + size - 1) // size, 0, dtype=torch.int32, out=starts[1:])
    return starts, min(cdiv(tokens, size) + cu.numel() - 1, tokens)


def _options(scoring: Scoring) -> tuple[float, int, int]:
    left, right = (limit if 0 <= limit < _NO_LIMIT else _NO_LIMIT for limit in (scoring.left, scoring.right))
    return scoring.scale, left, right


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in (t.stride(0), t.stride(1))]


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q must have shape [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim], "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    launch.on_device(q, "q")
    dtype, (tokens, heads, width) = launch.dtype_of(q, "q"), q.shape
    if not 1 <= width <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {width}")
    if k.shape[1] < 1 or heads % k.shape[1]:
        raise ValueError(f"k must have a number of heads that divides {heads}, got {list(k.shape)}")
    for t, name, shape in ((q, "q", q.shape), (k, "k", (k.shape[0], k.shape[1], width)), (v, "v", k.shape)):
        launch.like(t, name, tuple(shape), dtype, q.device)
    if max(tokens, k.shape[0]) >= _NO_LIMIT:
        raise ValueError(f"at most {_NO_LIMIT - 1} tokens, got {tokens} and {k.shape[0]}")
    launch.counters(cu_q, "cu_q", 1, q.device)
    launch.counters(cu_k, "cu_k", 1, q.device)
    if cu_q.numel() != cu_k.numel():
        raise ValueError(f"cu_q has {cu_q.numel() - 1} sequences and cu_k {cu_k.numel() - 1}; they must be as many")
    if scoring.bias is not None or scoring.dropout:
        raise ValueError(
            "the relative bias and dropout have no kernel for the GPU yet; give alibi slopes, or compute on the CPU"
        )
    if scoring.slopes is not None:
        launch.like(scoring.slopes, "slopes", (heads,), torch.float32, q.device)


def _check_statistics(t: Tensor, name: str, q: Tensor) -> None:
    if t.shape != (q.shape[1], q.shape[0]) or t.dtype != torch.float32 or not t.is_contiguous() or t.device != q.device:
        raise ValueError(
            f"{name} must be contiguous float32 of shape {[q.shape[1], q.shape[0]]} on {q.device}, "
            f"got {t.dtype} {list(t.shape)} on {t.device}"
        )
