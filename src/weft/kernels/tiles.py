"""How a matmul's output is cut into tiles, in which order they are computed, and which are signalled at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.deadline import ROWS

TILE_N_MULTIPLE = 32
"""A tile starts where a packed panel does: the width of a panel divides this (asserted in csrc/isa/matmul.h)."""


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
        if not all(isinstance(size, int) for size in (self.m, self.n, self.tile_m, self.tile_n)):
            raise ValueError(f"the sizes of a tiling are integers, got {self.m, self.n, self.tile_m, self.tile_n}")
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


def _int32(values: Sequence[int] | Tensor, what: str, *, below: int) -> Tensor:
    tensor = torch.as_tensor(values, device="cpu")
    if tensor.dim() != 1 or (tensor.numel() and tensor.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"{what} must be a flat list of integers, got shape {list(tensor.shape)} of {tensor.dtype}")
    if tensor.numel() and not (int(tensor.min()) >= 0 and int(tensor.max()) < below):
        low, high = int(tensor.min()), int(tensor.max())
        raise ValueError(
            f"{what} has numbers from {low} to {high}, expected 0 to {below - 1}: one for each tile at most"
        )
    return tensor.to(torch.int32).contiguous()


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
        straight = torch.arange(tiles, dtype=torch.int32, device="cpu")
        order = straight if self.order is None else _int32(self.order, "order", below=tiles)
        groups = straight * 0 if self.group_of is None else _int32(self.group_of, "group_of", below=tiles)
        if not torch.equal(order.sort().values, straight):
            raise ValueError(
                f"order must be a permutation of the {tiles} tiles 0..{tiles - 1}, "
                f"got {order.numel()} entries: {_short(order)}"
            )
        if groups.numel() != tiles:
            raise ValueError(f"group_of must name a group for each of the {tiles} tiles, got {groups.numel()} entries")
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

    A tile starts when all counters of its rows are there; each is waited for at most `timeout` seconds, and the error
    then names `what`. Signals are handled meanwhile: Ctrl-C ends the call.
    """

    counters: Tensor
    rows: int
    value: int = 1
    timeout: float = ROWS.seconds
    what: str = "rows of x"


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix x [M, K] whose rows lie anywhere: in the windows of several ranks, or in another order.

    Read in place by the matmul, which copies block by block anyway.

    >>> Rows.stack([torch.zeros(2, 8), torch.ones(3, 8)]).m
    5
    """

    addresses: Tensor
    k: int
    dtype: torch.dtype
    sources: tuple[Tensor, ...] = field(repr=False)  # keeps the memory alive

    @property
    def m(self) -> int:
        return self.addresses.numel()

    @classmethod
    def stack(cls, blocks: Sequence[Tensor]) -> Rows:
        """The rows of [m_i, K] blocks, one block after the other."""
        if not blocks or any(b.dim() != 2 or not _same_rows(b, blocks[0]) for b in blocks):
            shapes = [(list(b.shape), b.dtype, b.device.type) for b in blocks]
            raise ValueError(
                f"blocks must be CPU matrices [m, K] of one K and dtype with contiguous rows, got {shapes}"
            )
        addresses = [
            b.data_ptr() + torch.arange(b.shape[0], device="cpu") * (b.stride(0) * b.element_size()) for b in blocks
        ]
        return cls(torch.cat(addresses), blocks[0].shape[1], blocks[0].dtype, tuple(blocks))

    def gather(self, index: Tensor) -> Rows:
        """Row i of the result is row index[i] of this one; index is int64 [M']."""
        if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < self.m):
            raise ValueError(
                f"row numbers must be from 0 to {self.m - 1}, got {int(index.min())} to {int(index.max())}"
            )
        return Rows(self.addresses[index].contiguous(), self.k, self.dtype, self.sources)


def _same_rows(block: Tensor, like: Tensor) -> bool:
    contiguous = block.shape[1] <= 1 or block.stride(1) == 1
    return contiguous and block.is_cpu and (block.shape[1], block.dtype) == (like.shape[1], like.dtype)


@dataclass(frozen=True, eq=False)
class TileOutput:
    """A place of its own for every tile: [tile rows, tile columns] matrices with contiguous rows, anywhere.

    So a group of tiles is stored end to end, ready to be sent, or a tile goes straight into another rank's window.
    """

    tiling: Tiling
    places: tuple[Tensor, ...] = field(repr=False)
    addresses: Tensor = field(init=False, repr=False)
    strides: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.places) != self.tiling.count:
            raise ValueError(f"a tiling of {self.tiling.count} tiles needs as many places, got {len(self.places)}")
        for tile, place in enumerate(self.places):
            m0, m1, n0, n1 = self.tiling.box(tile)
            if tuple(place.shape) != (m1 - m0, n1 - n0) or not _same_rows(place, place):
                raise ValueError(
                    f"tile {tile} needs a CPU matrix {[m1 - m0, n1 - n0]} with contiguous rows, "
                    f"got {list(place.shape)} with strides {place.stride()}"
                )
            if place.dtype != self.places[0].dtype:
                raise ValueError(f"tile {tile} is {place.dtype}, tile 0 {self.places[0].dtype}; use one dtype")
        object.__setattr__(
            self, "addresses", torch.tensor([p.data_ptr() for p in self.places], dtype=torch.int64, device="cpu")
        )
        object.__setattr__(
            self, "strides", torch.tensor([p.stride(0) for p in self.places], dtype=torch.int64, device="cpu")
        )
