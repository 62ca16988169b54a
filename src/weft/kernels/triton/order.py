"""Where the elements of a matrix lie after they were stored in the order in which they travel.

A matrix [M, N] is cut into pieces of `rows` x `cols`, the last ones smaller. The piece at (i, j) starts at
starts[i, j] of a flat buffer, and its rows are strides[i, j] apart. Whole **tiles** travel for an all-reduce, row
**subtiles** (tiles cut by rows into a part for each rank) for a reduce-scatter, single rows of tiles (**subtokens**),
each to its own destination, for an all-to-all. A norm that reads through such a map undoes the order for free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.tiles import Tiling


@dataclass(frozen=True, eq=False)
class Order:
    """The map: `starts` and `strides` are int64 [row pieces, column pieces] on the device that reads them.

    `elements` is how long the flat buffer must be at least.
    """

    m: int
    n: int
    rows: int
    cols: int
    starts: Tensor
    strides: Tensor
    elements: int

    def to(self, device: torch.device | str) -> Order:
        return Order(
            self.m, self.n, self.rows, self.cols, self.starts.to(device), self.strides.to(device), self.elements
        )

    @classmethod
    def of_blocks(cls, tiling: Tiling, blocks: Iterable[tuple[int, int, int, int, int]]) -> Order:
        """Rectangles (m0, m1, n0, n1, at) of whole tiles, the elements of each end to end from `at` on.

        >>> Order.of_blocks(Tiling(2, 64, 2, 32), [(0, 2, 32, 64, 0), (0, 2, 0, 32, 64)]).starts.tolist()
        [[64, 0]]
        """
        starts = torch.full((tiling.rows, tiling.cols), -1, dtype=torch.int64)
        strides, end = torch.zeros_like(starts), 0
        for m0, m1, n0, n1, at in blocks:
            end = max(end, at + (m1 - m0) * (n1 - n0))
            for i in range(m0 // tiling.tile_m, -(-m1 // tiling.tile_m)):
                for j in range(n0 // tiling.tile_n, -(-n1 // tiling.tile_n)):
                    starts[i, j] = at + (i * tiling.tile_m - m0) * (n1 - n0) + j * tiling.tile_n - n0
                    strides[i, j] = n1 - n0
        if bool((starts < 0).any()):
            raise ValueError(f"the blocks must cover every tile of {tiling}; {int((starts < 0).sum())} are in none")
        return cls(tiling.m, tiling.n, tiling.tile_m, tiling.tile_n, starts, strides, end)

    @classmethod
    def of_tiles(cls, tiling: Tiling, order: Sequence[int]) -> Order:
        """Whole tiles end to end, in the order in which they are sent.

        >>> Order.of_tiles(Tiling(4, 32, 2, 32), [1, 0]).starts.tolist()
        [[64], [0]]
        """
        return _end_to_end(tiling, tiling.tile_m, [tiling.box(tile) for tile in order])

    @classmethod
    def of_subtiles(cls, tiling: Tiling, groups: Sequence[Sequence[int]], parts: int) -> Order:
        """For each group of tiles: part 0 of every tile, then part 1 of every tile, ...; so a part is one message.

        >>> Order.of_subtiles(Tiling(4, 64, 4, 32), [[0, 1]], parts=2).starts.tolist()
        [[0, 64], [128, 192]]
        """
        if tiling.tile_m % parts or tiling.m % tiling.tile_m:
            raise ValueError(
                f"{parts} parts must divide tile_m and tile_m the rows, got tile_m {tiling.tile_m} and {tiling.m} rows"
            )
        height, boxes = tiling.tile_m // parts, []
        for group in groups:
            for part in range(parts):
                for tile in group:
                    m0, _, n0, n1 = tiling.box(tile)
                    boxes.append((m0 + part * height, m0 + (part + 1) * height, n0, n1))
        return _end_to_end(tiling, height, boxes)

    @classmethod
    def of_subtokens(cls, tiling: Tiling, groups: Sequence[Sequence[int]], destinations: Sequence[int]) -> Order:
        """For each group of tiles and each destination: the rows that go there, tile by tile.

        >>> Order.of_subtokens(Tiling(2, 64, 2, 32), [[0, 1]], destinations=[1, 0]).starts.tolist()
        [[64, 96], [0, 32]]
        """
        if len(destinations) != tiling.m:
            raise ValueError(f"destinations must name a rank for each of the {tiling.m} rows, got {len(destinations)}")
        boxes = []
        for group in groups:
            for destination in sorted(set(destinations)):
                for m0, m1, n0, n1 in (tiling.box(tile) for tile in group):
                    boxes += [(row, row + 1, n0, n1) for row in range(m0, m1) if destinations[row] == destination]
        return _end_to_end(tiling, 1, boxes)


def _end_to_end(tiling: Tiling, rows: int, boxes: Iterable[tuple[int, int, int, int]]) -> Order:
    starts = torch.full((-(-tiling.m // rows), tiling.cols), -1, dtype=torch.int64)
    strides, at = torch.zeros_like(starts), 0
    for m0, m1, n0, n1 in boxes:
        starts[m0 // rows, n0 // tiling.tile_n], strides[m0 // rows, n0 // tiling.tile_n] = at, n1 - n0
        at += (m1 - m0) * (n1 - n0)
    if at != tiling.m * tiling.n or bool((starts < 0).any()):
        raise ValueError(f"the order must name every tile of {tiling} once; it stores {at} elements")
    return Order(tiling.m, tiling.n, rows, tiling.tile_n, starts, strides, at)
