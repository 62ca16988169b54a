"""How a matmul's output is cut into tiles, in which order they are computed, and which are signalled at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TILE_N_MULTIPLE = 32  # a tile starts where a packed panel does, for every instruction set


@dataclass(frozen=True)
class Tiling:
    """An output of shape [m, n] in tiles of tile_m x tile_n, numbered row by row; the last ones may be smaller.

    >>> Tiling(m=100, n=64, tile_m=48, tile_n=32).box(5)
    (96, 100, 32, 64)
    """

    m: int
    n: int
    tile_m: int
    tile_n: int

    def __post_init__(self) -> None:
        if self.m < 0 or self.n < 0:
            raise ValueError(f"a tiling covers an output of shape [m, n] with m, n >= 0, got [{self.m}, {self.n}]")
        if self.tile_m < 1 or self.tile_n < 1 or self.tile_n % TILE_N_MULTIPLE:
            raise ValueError(
                f"tile_m must be >= 1 and tile_n a positive multiple of {TILE_N_MULTIPLE}, "
                f"got {self.tile_m} x {self.tile_n}"
            )

    @property
    def rows(self) -> int:
        return -(-self.m // self.tile_m)

    @property
    def cols(self) -> int:
        return -(-self.n // self.tile_n)

    @property
    def count(self) -> int:
        return self.rows * self.cols

    def box(self, tile: int) -> tuple[int, int, int, int]:
        """The rows [m0, m1) and columns [n0, n1) of a tile, as (m0, m1, n0, n1)."""
        m0, n0 = tile // self.cols * self.tile_m, tile % self.cols * self.tile_n
        return m0, min(m0 + self.tile_m, self.m), n0, min(n0 + self.tile_n, self.n)


def _int32(values: Sequence[int] | Tensor, what: str) -> Tensor:
    tensor = torch.as_tensor(values)
    if tensor.dim() != 1 or (tensor.numel() and (tensor.dtype.is_floating_point or tensor.dtype == torch.bool)):
        raise ValueError(f"{what} must be a flat list of integers, got shape {list(tensor.shape)} of {tensor.dtype}")
    return tensor.to(device="cpu", dtype=torch.int32).contiguous()


@dataclass(frozen=True)
class TileSchedule:
    """A tiling, the order in which its tiles are computed, and the group that each belongs to.

    `order` is a permutation of the tiles (default: row by row), `group_of[tile]` the tile's group, numbered from 0
    without gaps (default: one group). The signalled matmul bumps counter g whenever a tile of group g is finished.

    >>> schedule = TileSchedule(Tiling(m=96, n=64, tile_m=48, tile_n=32), order=[3, 1, 2, 0], group_of=[1, 0, 1, 0])
    >>> schedule.group_sizes.tolist()
    [2, 2]
    """

    tiling: Tiling
    order: Sequence[int] | Tensor | None = None
    group_of: Sequence[int] | Tensor | None = None
    order_table: Tensor = field(init=False, repr=False, compare=False)
    group_table: Tensor = field(init=False, repr=False, compare=False)
    group_sizes: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tiles = self.tiling.count
        order = torch.arange(tiles, dtype=torch.int32) if self.order is None else _int32(self.order, "order")
        groups = torch.zeros(tiles, dtype=torch.int32) if self.group_of is None else _int32(self.group_of, "group_of")
        if not torch.equal(order.sort().values, torch.arange(tiles, dtype=torch.int32)):
            raise ValueError(
                f"order must be a permutation of the {tiles} tiles 0..{tiles - 1}, "
                f"got {order.numel()} entries: {_short(order)}"
            )
        if groups.numel() != tiles:
            raise ValueError(f"group_of must name a group for each of the {tiles} tiles, got {groups.numel()} entries")
        if tiles and int(groups.min()) < 0:
            raise ValueError(f"groups are numbered from 0, got group {int(groups.min())}")
        sizes = torch.bincount(groups).to(torch.int32)
        if tiles and int(sizes.min()) == 0:
            raise ValueError(
                f"every group needs a tile, but group {int(sizes.argmin())} has none; number groups without gaps"
            )
        object.__setattr__(self, "order_table", order)
        object.__setattr__(self, "group_table", groups)
        object.__setattr__(self, "group_sizes", sizes)

    @property
    def groups(self) -> int:
        return self.group_sizes.numel()


def _short(values: Tensor) -> str:
    head = ", ".join(str(v) for v in values[:8].tolist())
    return f"[{head}, ...]" if values.numel() > 8 else f"[{head}]"


@dataclass(frozen=True)
class Ready:
    """Which rows of x have arrived: counter i covers rows [i * rows, (i + 1) * rows) and is there when >= value.

    A tile starts when all counters of its rows are there; each is waited for at most `timeout` seconds, and the
    error then names `what`.
    """

    counters: Tensor
    rows: int
    value: int = 1
    timeout: float = 60.0
    what: str = "rows of x"
