"""Every private name of torch that weft uses: one small function or alias each, with what it is used for."""

from __future__ import annotations

import torch

__all__ = ["multiplies_bfloat16"]


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AVX-512 BF16, AMX), as oneDNN would use them."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
