"""The kernels in Triton, for CUDA devices: what `weft.kernels.cpu`, `cpu_rows` and `cpu_attention` are for the CPU.

One kernel a file; `linear.py`, `rows.py` and `attention.py` launch them, with the arguments of the CPU's functions.
`variants.py` lists all of them with their block sizes, for `weft kernels compile`. No kernel here has ever run on a
GPU: docs/gpu.md says what has been proven, and how.
"""

from __future__ import annotations

from weft.kernels.triton.attention import attention, attention_grad
from weft.kernels.triton.launch import INTERPRETED, DevicePlaces, DeviceSchedule, Order, owners_first
from weft.kernels.triton.matmul import (
    LAYOUT,
    TAKES_ADDRESSES,
    TORCH_MULTIPLIES,
    empty,
    linear,
    pack,
    packed_elements,
    unpack,
)
from weft.kernels.triton.rows import gate, gather, norm, rotary, sum_in_order
from weft.kernels.triton.signals import Late, tell, wait

__all__ = [
    "INTERPRETED", "LAYOUT", "TAKES_ADDRESSES", "TORCH_MULTIPLIES", "DevicePlaces", "DeviceSchedule", "Late", "Order",
    "attention", "attention_grad", "empty", "gate", "gather", "linear", "norm", "owners_first", "pack",
    "packed_elements", "rotary", "sum_in_order", "tell", "unpack", "wait",
]  # fmt: skip
