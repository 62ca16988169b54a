"""The door to the native core for callers that hand it addresses: what a buffer must be, checked once.

The core reads and writes where it is told. So whoever takes the address of a tensor that came from outside says here
what the core will take it for: its type, its shape, how its rows lie, and the bounds of the numbers in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def address(tensor: Tensor, *, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> int:
    """The address of a contiguous tensor of this type and shape on the CPU.

    >>> address(torch.zeros(3), dtype=torch.float32, shape=(4,), what="the bias")
    Traceback (most recent call last):
    ...
    ValueError: the bias is torch.float32 [3] on cpu, expected torch.float32 [4] on the CPU
    """
    check_tensor(tensor, dtype=dtype, shape=shape, what=what)
    if not tensor.is_contiguous():
        raise ValueError(f"{what} has strides {tensor.stride()}, expected a contiguous tensor; call .contiguous()")
    return tensor.data_ptr()


def rows_at(tensor: Tensor, *, dtype: torch.dtype, shape: tuple[int, int], what: str) -> tuple[int, int]:
    """Address and row stride of a matrix whose rows are contiguous and do not overlap."""
    check_tensor(tensor, dtype=dtype, shape=shape, what=what)
    row, column = tensor.stride()
    if (column != 1 and shape[1] > 1) or (row < shape[1] and shape[0] > 1):
        raise ValueError(
            f"the rows of {what} must be contiguous, each with memory of its own, got strides {tensor.stride()}; "
            "call .contiguous()"
        )
    return tensor.data_ptr(), row


def check_tensor(tensor: Tensor, *, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> None:
    """Raises unless it is a plain CPU tensor of this type and shape, in memory."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_cpu or tensor.layout != torch.strided:
        layout = "" if tensor.layout == torch.strided else f" {tensor.layout}"
        raise ValueError(
            f"{what} is {tensor.dtype} {list(tensor.shape)}{layout} on {tensor.device}, "
            f"expected {dtype} {list(shape)} on the CPU"
        )


def index_at(index: Tensor, *, count: int, below: int, what: str) -> int:
    """The address of int64 numbers [count], each from 0 to below `below`.

    >>> index_at(torch.tensor([0, 7]), count=2, below=7, what="input_ids")
    Traceback (most recent call last):
    ...
    ValueError: input_ids: got 0 to 7, expected 0 to 6
    """
    at = address(index, dtype=torch.int64, shape=(count,), what=what)
    if count:
        # numpy's are several times faster than torch's on the few numbers of a decoding step
        array: Any = index.numpy()
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= below:
            raise ValueError(f"{what}: got {low} to {high}, expected 0 to {below - 1}")
    return at


def offsets_at(offsets: Tensor, *, total: int, what: str = "cu_seqlens") -> int:
    """The address of int32 offsets [B + 1] that start at 0, never fall and end at `total`.

    >>> offsets_at(torch.tensor([0, 5], dtype=torch.int32), total=4)
    Traceback (most recent call last):
    ...
    ValueError: cu_seqlens must rise from 0 to the 4 tokens, got [0, 5]
    """
    check_offsets(offsets, what, total)
    return offsets.data_ptr()


def check_offsets(cu: Tensor, name: str, tokens: int) -> None:
    """Raises unless the core may read `cu` as the offsets of sequences with `tokens` tokens in all."""
    if cu.dtype != torch.int32 or cu.dim() != 1 or cu.numel() < 1 or not cu.is_contiguous() or not cu.is_cpu:
        raise ValueError(
            f"{name} must be a flat contiguous int32 tensor on the CPU with one entry more than sequences, "
            f"got {cu.dtype} {list(cu.shape)} on {cu.device}"
        )
    values = cu.numpy()
    if values[0] != 0 or values[-1] != tokens or (values[1:] < values[:-1]).any():
        raise ValueError(
            f"{name} must rise from 0 to the {tokens} tokens, got {values[:8].tolist()}"
            f"{'...' if cu.numel() > 8 else ''}"
        )
