"""How tiles are computed: `linear` on packed weights, with epilogues, tile orders, groups and signals."""

from weft.kernels.matmul import PackedWeight, linear
from weft.kernels.tiles import Ready, TileSchedule, Tiling

__all__ = ["PackedWeight", "Ready", "TileSchedule", "Tiling", "linear"]
