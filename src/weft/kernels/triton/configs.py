"""The block sizes of each kernel: the first of a list is the default, the others are worth measuring on a GPU.

A default depends on the type and the head width only, never on M, the batch or the tiles: block sizes choose the
instructions, and so the bits. None has been timed on a GPU: the defaults are sizes that compile without spilling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """Block sizes by their names in the kernel, and how many warps and pipeline stages a block gets.

    >>> Config((("BLOCK_M", 128), ("BLOCK_N", 64)), warps=4).name
    '128x64 w4'
    """

    blocks: tuple[tuple[str, int], ...]
    warps: int = 4
    stages: int = 1

    @property
    def name(self) -> str:
        sizes = "x".join(str(size) for _, size in self.blocks)
        return f"{sizes} w{self.warps}" + (f" s{self.stages}" if self.stages > 1 else "")

    @property
    def launch(self) -> dict[str, int]:
        """The keyword arguments of a launch."""
        return {**dict(self.blocks), "num_warps": self.warps, "num_stages": self.stages}


def _matmul(m: int, n: int, k: int, warps: int, stages: int) -> Config:
    return Config((("BLOCK_M", m), ("BLOCK_N", n), ("BLOCK_K", k)), warps, stages)


_HALF_MATMUL = (
    _matmul(128, 128, 64, 8, 3), _matmul(128, 256, 64, 8, 3), _matmul(64, 128, 64, 4, 3), _matmul(64, 64, 64, 4, 4),
)  # fmt: skip
MATMUL = {
    torch.float16: _HALF_MATMUL,
    torch.bfloat16: _HALF_MATMUL,
    torch.float32: (_matmul(64, 64, 16, 8, 2), _matmul(32, 64, 32, 4, 2)),
}


def _attention(m: int, n: int, warps: int, stages: int) -> Config:
    return Config((("BLOCK_M", m), ("BLOCK_N", n)), warps, stages)


def attention_forward(dtype: torch.dtype, width: int) -> tuple[Config, ...]:
    """For head widths up to `width`, a power of two from 16 to 256."""
    if dtype == torch.float32:
        return (_attention(16, 16 if width > 128 else 32, 8 if width == 128 else 4, 1),)
    if width <= 64:
        return _attention(64, 64, 4, 2), _attention(128, 64, 8, 2)
    if width <= 128:
        return _attention(64, 64, 8, 2), _attention(128, 64, 8, 2)
    return (_attention(64, 32, 8, 1),)


def attention_grad_q(dtype: torch.dtype, width: int) -> tuple[Config, ...]:
    """For the pass over keys."""
    if dtype == torch.float32:
        return (_attention(16, 32, 8, 1),) if width <= 64 else (_attention(16, 16, 8, 1),)
    if width <= 64:
        return _attention(64, 32, 4, 1), _attention(64, 64, 8, 1)
    return (_attention(32, 32, 8, 1),)


def attention_grad_kv(dtype: torch.dtype, width: int) -> tuple[Config, ...]:
    """For the pass over queries."""
    if dtype == torch.float32:
        if width <= 64:
            return (_attention(16, 32, 8, 1),)
        return (_attention(16, 16, 16 if width <= 128 else 8, 1),)
    if width <= 64:
        return _attention(64, 32, 4, 1), _attention(64, 64, 8, 1)
    return (_attention(32, 32, 4 if width <= 128 else 8, 1),)


def rows(width: int) -> Config:
    """For kernels that hold a whole row of up to `width` elements, a power of two."""
    return Config((("BLOCK", width),), warps=min(max(width // 512, 1), 16))


STRIP = Config((("BLOCK", 1024),), warps=4)
"""For kernels that take a row in strips."""
