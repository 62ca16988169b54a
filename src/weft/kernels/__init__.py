"""How tiles are computed: `linear` on packed weights, with epilogues, tile orders, groups and signals."""

from weft.kernels.matmul import PackedWeight, linear, linear_tiles
from weft.kernels.tiles import Ready, Rows, TileOutput, TileSchedule, Tiling

__all__ = ["PackedWeight", "Ready", "Rows", "TileOutput", "TileSchedule", "Tiling", "linear", "linear_tiles"]
