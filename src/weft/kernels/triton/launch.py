"""What a launch needs: checked tensors, block sizes, and tables that lie on the device already.

A kernel never checks, so nothing may pass the checks here that would make it read out of bounds.

Of the block sizes the first of a list is the default, the others are worth measuring on a GPU. A default depends on the
type and the head width only, never on M, the batch or the tiles: block sizes choose the instructions, and so the bits.
None has been timed on a GPU: the defaults are sizes that compile without spilling.

Schedules and places are made once, so that a launch copies nothing and can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from weft.kernels.tiles import TileOutput, TileSchedule, Tiling

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, JITFunction)
"""Whether Triton interprets its kernels, on the CPU: it decides that when it is imported."""


def on_device(t: Tensor, name: str) -> None:
    """Refuses tensors that the kernels cannot reach."""
    wanted = "cpu" if INTERPRETED else "cuda"
    if t.device.type != wanted:
        raise ValueError(f"{name} must be on {wanted}, where these kernels run, got {t.device}")
    if wanted == "cuda":
        refuse_rocm()


def refuse_rocm() -> None:
    """ROCm calls its devices cuda, too: kernels would come out, but without their waits, which are PTX."""
    if torch.version.hip is not None:
        raise ValueError(
            f"got a torch built for ROCm {torch.version.hip}, expected one built for CUDA: weft's GPU kernels wait in "
            f"NVIDIA's PTX, and would not wait at all on AMD; move tensors with .cpu(), where all of it runs"
        )


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


# For outputs of few rows: half of the default's block, with the same instructions, so the same bits. Not where these
# differ (tensor cores of sm100 take blocks of 64 rows by another instruction), nor in float32, whose block is small.
SHORT = _matmul(64, 128, 64, 4, 3)
SHORT_ROWS = 64
SHORT_CAPABILITIES = (8, 9)  # major


def matmul_config(dtype: torch.dtype, m: int, device: torch.device) -> Config:
    """The block sizes of an output of `m` rows."""
    if dtype == torch.float32 or m > SHORT_ROWS or device.type != "cuda":
        return MATMUL[dtype][0]
    return SHORT if torch.cuda.get_device_capability(device)[0] in SHORT_CAPABILITIES else MATMUL[dtype][0]


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


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """The tables of a `TileSchedule` on a device: the order of the tiles, and the group of each.

    >>> tiling = Tiling(m=4, n=64, tile_m=4, tile_n=32)
    >>> DeviceSchedule.of(TileSchedule(tiling, order=[1, 0]), "cpu").order
    tensor([1, 0], dtype=torch.int32)
    """

    tiling: Tiling
    order: Tensor
    group_of: Tensor
    groups: int

    @classmethod
    def of(cls, schedule: TileSchedule | DeviceSchedule, device: torch.device | str) -> DeviceSchedule:
        if isinstance(schedule, DeviceSchedule):
            return schedule
        tables = schedule.order_table.to(device), schedule.group_table.to(device)
        return cls(schedule.tiling, *tables, schedule.groups)


@dataclass(frozen=True, eq=False)
class DevicePlaces:
    """Where each tile goes: the address of its first element and the distance of its rows, int64 [tiles] each.

    The addresses may be a peer's, as symmetric memory maps them. `keep` is whatever must stay alive meanwhile.
    """

    tiling: Tiling
    addresses: Tensor
    strides: Tensor
    dtype: torch.dtype
    keep: tuple[Tensor, ...] = ()
    aligned: bool = False  # every row of every tile starts at a multiple of 16 bytes

    @classmethod
    def of(cls, out: TileOutput | DevicePlaces, device: torch.device | str) -> DevicePlaces:
        if isinstance(out, DevicePlaces):
            return out
        dtype = out.places[0].dtype if out.places else torch.float32
        aligned = all_aligned(out.addresses) and all_aligned(out.strides * dtype.itemsize)
        return cls(out.tiling, out.addresses.to(device), out.strides.to(device), dtype, out.places, aligned)


@dataclass(frozen=True, eq=False)
class OwnerRows:
    """An output [M, N] whose rows lie in their owners' memory: row i from addresses[i] on, `owner_rows` rows an owner.

    So a tile may have rows of several owners. The addresses may be peers', as symmetric memory maps them.

    >>> OwnerRows.of([0, 2, 3], [1000, 2000], 8, torch.float32, "cpu").addresses
    tensor([1000, 1032, 2000])
    """

    addresses: Tensor
    n: int
    owner_rows: int
    owners: int
    dtype: torch.dtype
    aligned: bool  # every row starts at a multiple of 16 bytes

    @property
    def m(self) -> int:
        return self.addresses.numel()

    @classmethod
    def of(
        cls, bounds: Sequence[int], starts: Sequence[int], n: int, dtype: torch.dtype, device: torch.device | str
    ) -> OwnerRows:
        """Rows [bounds[p], bounds[p + 1]) belong to rank p, whose buffer [rows of p, N] for them is at starts[p]."""
        each = max(1, bounds[1] - bounds[0])
        if any(bounds[p] != min(p * each, bounds[-1]) for p in range(len(bounds))):
            raise ValueError(f"all owners but the last ones must own as many rows, got bounds {[*bounds]}")
        rows = torch.arange(bounds[-1], device="cpu")
        table = torch.tensor([*starts], device="cpu")[rows // each] + rows % each * (n * dtype.itemsize)
        return cls(table.to(device), n, each, -(-bounds[-1] // each), dtype, all_aligned(table))


@dataclass(frozen=True, eq=False)
class RowSteps:
    """Rows of x that arrive in steps: rows [i * rows, (i + 1) * rows) are there when the one counter is >= steps[i].

    What `Ready` is for rows with a counter each; a stream that brings rows in order has one thing to write a step.
    """

    counters: Tensor
    steps: Tensor
    rows: int
    timeout: float
    what: str = "rows of x"


def all_aligned(addresses: Tensor) -> bool:
    """Whether all of them are multiples of 16; for tensors on the host."""
    return not bool((addresses % 16).any())


_BAND = 12


def banded(rows: Sequence[int], cols: Sequence[int], width: int, after: Sequence[int] = ()) -> list[int]:
    """The tiles of these rows and columns of a tiling that is `width` tiles wide, in bands of rows, column by column.

    Tiles that are computed at the same time then share rows of x and of w in the cache: of about 130, a dozen each.
    Bands are of equal heights, since a last one of a single row would read a row of w for each of its tiles. Each
    begins with the columns with which the one before it ended; the first, where the tiles `after` which it comes did.

    >>> banded([4, 5], [0, 1, 2], 3)
    [12, 15, 13, 16, 14, 17]
    """
    if after and rows and cols:
        row, col = divmod(after[-1], width)
        rows = rows[::-1] if abs(row - rows[-1]) < abs(row - rows[0]) else rows
        cols = cols[::-1] if abs(col - cols[-1]) < abs(col - cols[0]) else cols
    bands = -(-len(rows) // _BAND)
    order = []
    for band in range(bands):
        some = rows[len(rows) * band // bands : len(rows) * (band + 1) // bands]
        order += [row * width + col for col in (cols[::-1] if band % 2 else cols) for row in some]
    return order
