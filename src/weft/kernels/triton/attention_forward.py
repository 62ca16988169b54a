"""out = softmax(scale q k^T - slope |distance|) v over packed sequences, with an online softmax.

    q, out [Tq, H, D]   k, v [Tk, Hkv, D]   lse [H, Tq]   cu_q, cu_k [sequences + 1]

A program takes a block of queries of one sequence and one head. Blocks start where their sequence does and keys are
taken from the first to the last, so the bits of a sequence depend on that sequence only.
"""

import triton
import triton.language as tl

from weft.kernels.triton.sequences import scores, sequence_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_kernel(
    q, k, v, out, lse, slopes, cu_q, cu_k, blocks, sequences, tokens, scale, left, right, group, D,
    stride_q, stride_qh, stride_k, stride_kh, stride_v, stride_vh, stride_out, stride_outh,
    PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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
