"""How long a matmul takes on a declared GPU: tiles in waves, or memory, whichever is slower.

A wave is one tile on each multiprocessor. The last wave takes as long as a full one, which is what is called wave
quantisation; a tile that sticks out of the matrix takes as long as a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from weft.scale.gpus import ITEM_BYTES, LAUNCH_SECONDS, Gpu

# The tiles of the kernels; small ones only where there are few rows, since they load more for each flop.
_TILES, _LOW_TILES = ((128, 256), (128, 128)), ((64, 256), (64, 128))


@dataclass(frozen=True)
class Matmul:
    """[m, k] x [n, k]^T on one GPU: the tile, how many there are, in how many waves, and seconds without the launch."""

    tile_m: int
    tile_n: int
    tiles: int
    waves: int
    seconds: float


@lru_cache(maxsize=4096)
def _tiled(gpu: Gpu, m: int, n: int, k: int, dtype: str, tile_m: int, tile_n: int) -> Matmul:
    tiles = -(-m // tile_m) * -(-n // tile_n)
    waves = -(-tiles // gpu.processors)
    compute = waves * 2.0 * tile_m * tile_n * k * gpu.processors / gpu.flops(dtype)
    memory = float(m * k + n * k + m * n) * ITEM_BYTES[dtype] / gpu.copy_rate
    return Matmul(tile_m, tile_n, tiles, waves, max(compute, memory))


def tilings(gpu: Gpu, m: int, n: int, k: int, *, dtype: str = "bfloat16") -> tuple[Matmul, ...]:
    """The matmul with each of the tiles, the fastest first."""
    if min(m, n, k) < 1:
        raise ValueError(f"got a matmul of m={m}, n={n}, k={k}; expected sizes of at least 1")
    tiles = _LOW_TILES if m <= 64 else _TILES
    return tuple(sorted((_tiled(gpu, m, n, k, dtype, *tile) for tile in tiles), key=lambda each: each.seconds))


def matmul(gpu: Gpu, m: int, n: int, k: int, *, dtype: str = "bfloat16") -> Matmul:
    """The fastest of the tilings.

    >>> from weft.scale.gpus import find_gpu
    >>> matmul(find_gpu("A100"), 8192, 12288, 6144)  # doctest: +ELLIPSIS
    Matmul(tile_m=128, tile_n=128, tiles=6144, waves=57, seconds=0.00462...)
    """
    return tilings(gpu, m, n, k, dtype=dtype)[0]


def matmul_seconds(gpu: Gpu, m: int, n: int, k: int, *, dtype: str = "bfloat16") -> float:
    """Seconds of a matmul and its launch."""
    return matmul(gpu, m, n, k, dtype=dtype).seconds + LAUNCH_SECONDS


def copy_seconds(gpu: Gpu, nbytes: float) -> float:
    """Seconds of a kernel that reads and writes `nbytes` together and computes next to nothing."""
    return nbytes / gpu.copy_rate + LAUNCH_SECONDS
