"""What the cases of the matmul and of its signals share."""

import torch

from weft.kernels import Rows, Tiling
from weft.kernels import triton as kernels
from weft.kernels.triton.launch import Config

SMALL = Config((("BLOCK_M", 32), ("BLOCK_N", 32), ("BLOCK_K", 32)))
M, K, N, HALF = 96, 40, 64, 48
TILING = Tiling(M, N, 24, 32)


def tensors(m, k, n, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator).to(dtype) for s in [(m, k), (n, k), (n,), (m, n)]]


def run(x, w, *, out=None, **options):
    m = x.m if isinstance(x, Rows) else x.shape[0]
    if out is None:
        out = torch.full((m, w.shape[0]), float("nan"), dtype=x.dtype)
    kernels.linear(x, kernels.pack(w), w.shape[0], out=out, **{"config": SMALL, **options})
    return out
