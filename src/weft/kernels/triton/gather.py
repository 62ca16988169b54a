"""out[r] = the sum of table[index[r]] over up to three tables; a negative index adds nothing.

With one table this packs (index: the places of real tokens) and unpacks (index: the token of each place, or -1).
"""

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    out, first, first_index, second, second_index, third, third_index, N, stride_out, stride_first, stride_second,
    stride_third, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    source = tl.load(first_index + row)
    some = tl.load(first + source * stride_first + cols, mask=cols < tl.where(source >= 0, N, 0), other=0.0)
    if second is not None:
        source = tl.load(second_index + row)
        more = tl.load(second + source * stride_second + cols, mask=cols < tl.where(source >= 0, N, 0), other=0.0)
        total = some.to(tl.float32) + more.to(tl.float32)
        if third is not None:
            source = tl.load(third_index + row)
            more = tl.load(third + source * stride_third + cols, mask=cols < tl.where(source >= 0, N, 0), other=0.0)
            total += more.to(tl.float32)
        some = total.to(out.dtype.element_ty)
    tl.store(out + row * stride_out + cols, some, mask=inside)
