"""How tiles are computed: `linear` on packed weights, with epilogues, tile orders, groups and signals.

matmul         `linear` and `PackedWeight`: differentiable, compilable
attention      packed attention as torch ops
norm           norms, rotary positions and gates as torch ops
tiles          how an output is cut into tiles, their order and their groups
dispatch       the table (device, dtype) -> implementation
freshness      has a weight changed since something was made of it?
cpu            the native core: linear and row operations, checked
cpu_attention  the native core: attention, checked
door           what a buffer must be, for callers that hand addresses to the native core
triton/        the same for CUDA devices
"""

from weft.kernels.matmul import PackedWeight, linear, linear_tiles
from weft.kernels.tiles import Ready, Rows, TileOutput, TileSchedule, Tiling

__all__ = ["PackedWeight", "Ready", "Rows", "TileOutput", "TileSchedule", "Tiling", "linear", "linear_tiles"]
