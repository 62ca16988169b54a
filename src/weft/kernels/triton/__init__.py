"""The kernels in Triton, for CUDA devices: what `weft.kernels.cpu` and `cpu_attention` are for the CPU.

matmul       `linear` with epilogues, tile orders and signals
rows         norms, sums of table rows, rotary positions, gates, sums of ranks' parts
attention    packed attention and its gradient
signals      counters: told and waited for by kernels
launch       what a launch needs: checks, block sizes, tables on the device
budget       how many programs may wait at once
compile      every kernel compiled for GPUs that need not be there: `weft kernels compile`
interpreter  Triton's interpreter, mended, for tests

Each of the first three has its kernels and their launchers, with the arguments of the CPU's functions. No kernel here
has ever run on a GPU: docs/gpu.md says what has been proven, and how.
"""

from __future__ import annotations

from weft.kernels.triton.attention import attention, attention_grad
from weft.kernels.triton.launch import INTERPRETED, DevicePlaces, DeviceSchedule, OwnerRows, RowSteps, banded
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
    "INTERPRETED", "LAYOUT", "TAKES_ADDRESSES", "TORCH_MULTIPLIES", "DevicePlaces", "DeviceSchedule", "Late",
    "OwnerRows", "RowSteps", "attention", "attention_grad", "banded", "empty", "gate", "gather", "linear", "norm",
    "pack", "packed_elements", "rotary", "sum_in_order", "tell", "unpack", "wait",
]  # fmt: skip
