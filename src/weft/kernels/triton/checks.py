"""What the launchers refuse. A kernel never checks, so nothing may pass here that would make it read out of bounds."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from weft.kernels.triton.wait import wait_kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = not isinstance(wait_kernel, JITFunction)
"""Whether Triton interprets its kernels, on the CPU: it decides that when it is imported."""


def on_device(t: Tensor, name: str) -> None:
    """Refuses tensors that the kernels cannot reach."""
    wanted = "cpu" if INTERPRETED else "cuda"
    if t.device.type != wanted:
        raise ValueError(f"{name} must be on {wanted}, where these kernels run, got {t.device}")


def dtype_of(t: Tensor, name: str) -> torch.dtype:
    if t.dtype not in DTYPES:
        raise ValueError(f"{name} must be float16, bfloat16 or float32, got {t.dtype}; convert with .float()")
    return t.dtype


def like(t: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Refuses another shape, type or device, and rows that are not contiguous."""
    if tuple(t.shape) != tuple(shape) or t.dtype != dtype or t.device != device:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)} on {device}, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    if t.dim() and t.stride(-1) != 1 and t.shape[-1] > 1:
        raise ValueError(f"the last dim of {name} must be contiguous, got strides {t.stride()}; call .contiguous()")


def counters(t: Tensor, name: str, at_least: int, device: torch.device, dtype: torch.dtype = torch.int32) -> None:
    if t.dtype != dtype or t.dim() != 1 or not t.is_contiguous() or t.device != device:
        raise ValueError(
            f"{name} must be a flat contiguous {dtype} tensor on {device}, got {t.dtype} {list(t.shape)} on {t.device}"
        )
    if t.numel() < at_least:
        raise ValueError(f"{name} needs at least {at_least} counters, got {t.numel()}")
