"""What the attention kernels share: which sequence a block of rows belongs to, and what a query sees."""

import triton
import triton.language as tl


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
def scores(products, distance, here, scale, slopes, head, left, right):
    """The scores of key - query = `distance`, minus infinity where a query does not see a key."""
    s = products * scale
    if slopes is not None:
        s -= tl.load(slopes + head) * tl.abs(distance).to(tl.float32)
    return tl.where(here & (distance >= -left) & (distance <= right), s, float("-inf"))
