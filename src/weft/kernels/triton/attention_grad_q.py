"""dq = scale dS k, dS = P (dout v^T - delta), delta = sum(dout out): the first of two passes of the gradient.

    dout, q, out, dq [Tq, H, D]   k, v [Tk, Hkv, D]   lse, delta [H, Tq]

A program takes a block of queries and goes over the keys in order. It also leaves `delta` for the second pass. Two
passes compute the scores twice, but need no atomic adds: the same gradients, bit for bit, at every run.
"""

import triton
import triton.language as tl

from weft.kernels.triton.sequences import scores, sequence_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_grad_q_kernel(
    dout, q, k, v, out, dq, lse, delta, slopes, cu_q, cu_k, blocks, sequences, tokens, scale, left, right, group, D,
    stride_dout, stride_douth, stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_out, stride_outh,
    stride_dq, stride_dqh,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Held over the loop, two wide float32 operands of dots would not fit the registers: they are read again instead.
    RELOAD: tl.constexpr = BLOCK_D > 128 and q.dtype.element_ty == tl.float32
    block = tl.program_id(0)
    head = tl.program_id(1)
    if block < tl.load(blocks + sequences):
        sequence = sequence_of(block, blocks, sequences)
        q0 = tl.load(cu_q + sequence)
        queries = tl.load(cu_q + sequence + 1) - q0
        k0 = tl.load(cu_k + sequence)
        keys = tl.load(cu_k + sequence + 1) - k0
        first = (block - tl.load(blocks + sequence)) * BLOCK_M
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
