"""dv = P^T dout, dk = scale dS^T q: the second of two passes of the gradient.

    dout, q [Tq, H, D]   k, v, dk, dv [Tk, Hkv, D]   lse, delta [H, Tq]

A program takes a block of keys of one key head, and goes over the query heads that share it and over their queries in
order: nothing is added by two programs to one place.
"""

import triton
import triton.language as tl

from weft.kernels.triton.sequences import scores, sequence_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_grad_kv_kernel(
    dout, q, k, v, dk, dv, lse, delta, slopes, cu_q, cu_k, blocks, sequences, tokens, scale, left, right, group, D,
    stride_dout, stride_douth, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_dk, stride_dkh,
    stride_dv, stride_dvh,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    if block < tl.load(blocks + sequences):
        sequence = sequence_of(block, blocks, sequences)
        q0 = tl.load(cu_q + sequence)
        queries = tl.load(cu_q + sequence + 1) - q0
        k0 = tl.load(cu_k + sequence)
        keys = tl.load(cu_k + sequence + 1) - k0
        first = (block - tl.load(blocks + sequence)) * BLOCK_N
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
