"""Schedules and places on the device: made once, so that a launch copies nothing and can be captured in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.tiles import TileOutput, TileSchedule, Tiling


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

    @classmethod
    def of(cls, out: TileOutput | DevicePlaces, device: torch.device | str) -> DevicePlaces:
        if isinstance(out, DevicePlaces):
            return out
        dtype = out.places[0].dtype if out.places else torch.float32
        return cls(out.tiling, out.addresses.to(device), out.strides.to(device), dtype, out.places)

    @classmethod
    def by_owner(
        cls,
        tiling: Tiling,
        bounds: Sequence[int],
        starts: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> DevicePlaces:
        """Rows [bounds[p], bounds[p + 1]) of the output belong to rank p, whose buffer for them is at starts[p].

        The buffers are [rows of p, N], row by row. A tile may not lie across two owners.

        >>> places = DevicePlaces.by_owner(Tiling(4, 32, 2, 32), [0, 2, 4], [1000, 2000], torch.float32, "cpu")
        >>> places.addresses.tolist()
        [1000, 2000]
        """
        addresses = []
        for tile in range(tiling.count):
            m0, m1, n0, _ = tiling.box(tile)
            owner = next(p for p in range(len(starts)) if bounds[p] <= m0 < bounds[p + 1])
            if m1 > bounds[owner + 1]:
                raise ValueError(
                    f"rows {m0} to {m1} of tile {tile} belong to two ranks, bounds are {[*bounds]}; "
                    f"choose a tile_m that divides every rank's rows, got {tiling.tile_m}"
                )
            addresses.append(starts[owner] + ((m0 - bounds[owner]) * tiling.n + n0) * dtype.itemsize)
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return cls(tiling, table, torch.full_like(table, tiling.n), dtype)


def owners_first(tiling: Tiling, bounds: Sequence[int], rank: int) -> list[int]:
    """The tiles in the order of their owners rank + 1, rank + 2, ..., rank: so no two ranks write to one peer at once.

    >>> owners_first(Tiling(4, 64, 1, 32), [0, 2, 4], rank=0)
    [4, 5, 6, 7, 0, 1, 2, 3]
    """
    ranks = len(bounds) - 1
    turn = {(rank + 1 + i) % ranks: i for i in range(ranks)}

    def key(tile: int) -> tuple[int, int]:
        m0 = tiling.box(tile)[0]
        return turn[next(p for p in range(ranks) if bounds[p] <= m0 < bounds[p + 1])], tile

    return sorted(range(tiling.count), key=key)
