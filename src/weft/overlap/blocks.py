"""Which rows belong to whom, how an output is cut into blocks that travel at once, and who shares a host with whom.

Everything here is a pure index map: numbers in, numbers out. A *block* is a group of tiles that is signalled and sent
at once. It is a rectangle of the output, and its elements lie end to end, row by row, so that any run of its rows is
one message. Blocks of whole rows therefore need no reordering at all, and blocks of columns are stored one after the
other:

    rows of 6 x 4, cut 4 + 2            columns of 6 x 4, cut 3 + 1

     0  1  2  3   block 0                0  1  2 | 18
     4  5  6  7                          3  4  5 | 19
     8  9 10 11                          6  7  8 | 20     block 0 | block 1
    12 13 14 15                          9 10 11 | 21
    16 17 18 19   block 1               12 13 14 | 22
    20 21 22 23                         15 16 17 | 23
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise

from weft.kernels.tiles import TileSchedule, Tiling

Counts = tuple[tuple[int, ...], ...]  # counts[s][d]: how many rows of rank s go to rank d


# Rows ------------------------------------------------------------------------------------------------------


def chunk_bounds(total: int, parts: int) -> tuple[int, ...]:
    """Where the parts of `torch.chunk` start, and the end; missing chunks are empty parts at the end.

    >>> chunk_bounds(10, 4), chunk_bounds(5, 4)
    ((0, 3, 6, 9, 10), (0, 2, 4, 5, 5))
    """
    size = -(-total // parts)
    return tuple(min(i * size, total) for i in range(parts + 1))


def row_bounds(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each destination's rows start when rows are sorted by destination, and the end.

    >>> row_bounds([2, 0, 3])
    (0, 2, 2, 5)
    """
    return tuple(sum(counts[:i]) for i in range(len(counts) + 1))


def cut_points(units: int, weights: Sequence[int]) -> tuple[int, ...]:
    """`units` cut in proportion to `weights`: the bounds of the parts, from 0 to `units`, no part empty.

    Weights that add up to `units` are the sizes themselves, so that a plan for one size also fits another.

    >>> cut_points(8, [2, 5, 1]), cut_points(4, [2, 5, 1]), cut_points(0, [1, 1])
    ((0, 2, 7, 8), (0, 1, 4), (0,))
    """
    total = sum(weights)
    points = {0, units} | {(2 * units * part + total) // (2 * total) for part in accumulate(weights)}
    return tuple(sorted(points))


def rows_by_destination(tiling: Tiling, bounds: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The tile rows, those of the first destination in `order` first; rows [bounds[d], bounds[d + 1]) go to d.

    A tile row that two destinations share comes with the earlier one.

    >>> rows_by_destination(Tiling(10, 32, tile_m=2, tile_n=32), (0, 5, 10), [1, 0])
    (2, 3, 4, 0, 1)
    """
    seen: dict[int, None] = {}
    for destination in order:
        if bounds[destination] < bounds[destination + 1]:
            first = bounds[destination] // tiling.tile_m
            last = -(-bounds[destination + 1] // tiling.tile_m)
            seen.update(dict.fromkeys(range(first, last)))
    return tuple(seen)


# Blocks ----------------------------------------------------------------------------------------------------


class Axis(str, Enum):
    """Along what an output is cut: rows, or columns where there are too few rows to cut."""

    ROWS = "rows"
    COLS = "cols"


@dataclass(frozen=True)
class Block:
    """Rows [m0, m1) and columns [n0, n1) of an output; `at` is where its first element is stored.

    >>> Block(2, 4, 0, 10, at=20).view_at(3)
    30
    """

    m0: int
    m1: int
    n0: int
    n1: int
    at: int

    @property
    def rows(self) -> int:
        return self.m1 - self.m0

    @property
    def cols(self) -> int:
        return self.n1 - self.n0

    def view_at(self, row: int) -> int:
        """Where the block's part from `row` on is stored."""
        return self.at + (row - self.m0) * self.cols


@dataclass(frozen=True)
class Cut:
    """An output [m, n] in blocks, in the order in which they are computed.

    Blocks are whole tiles of the tiling, and no tile is in two blocks.
    """

    tiling: Tiling
    blocks: tuple[Block, ...]

    def tiles(self, block: Block) -> list[int]:
        """The numbers of the block's tiles, row by row."""
        t = self.tiling
        rows = range(block.m0 // t.tile_m, -(-block.m1 // t.tile_m))
        cols = range(block.n0 // t.tile_n, -(-block.n1 // t.tile_n))
        return [row * t.cols + col for row in rows for col in cols]

    def tile_count(self, block: Block) -> int:
        """How many tiles the block has."""
        t = self.tiling
        rows = -(-block.m1 // t.tile_m) - block.m0 // t.tile_m
        return rows * (-(-block.n1 // t.tile_n) - block.n0 // t.tile_n)

    def schedule(self, blocks: Sequence[int] | None = None) -> TileSchedule:
        """The order of the tiles, and the block of each as its group; `blocks` is another order of the blocks."""
        order: list[int] = []
        group_of = [0] * self.tiling.count
        for number in range(len(self.blocks)) if blocks is None else blocks:
            tiles = self.tiles(self.blocks[number])
            order += tiles
            for tile in tiles:
                group_of[tile] = number
        return TileSchedule(self.tiling, order=order, group_of=group_of)


def cut_rows(tiling: Tiling, weights: Sequence[int], order: Sequence[int]) -> Cut:
    """Blocks of whole rows: the tile rows in `order`, cut in proportion to `weights`.

    A block is a run of neighbouring rows, so it also ends where `order` jumps.

    >>> tiling = Tiling(m=10, n=32, tile_m=2, tile_n=32)
    >>> [(b.m0, b.m1) for b in cut_rows(tiling, [3, 2], [3, 4, 0, 1, 2]).blocks]
    [(6, 10), (0, 2), (2, 6)]
    """
    jumps = {i for i, (a, b) in enumerate(pairwise(order), start=1) if b != a + 1}
    bounds = sorted(jumps | set(cut_points(len(order), weights)))
    blocks = []
    for start, end in pairwise(bounds):
        m0, m1 = order[start] * tiling.tile_m, min((order[end - 1] + 1) * tiling.tile_m, tiling.m)
        blocks.append(Block(m0, m1, 0, tiling.n, at=m0 * tiling.n))
    return Cut(tiling, tuple(blocks) if tiling.n else ())


def cut_cols(tiling: Tiling, weights: Sequence[int]) -> Cut:
    """Blocks of whole columns, from left to right, cut in proportion to `weights`.

    >>> tiling = Tiling(m=6, n=96, tile_m=6, tile_n=32)
    >>> [(b.n0, b.n1, b.at) for b in cut_cols(tiling, [1, 2]).blocks]
    [(0, 32, 0), (32, 96, 192)]
    """
    blocks = []
    for start, end in pairwise(cut_points(tiling.cols, weights)):
        n0, n1 = start * tiling.tile_n, min(end * tiling.tile_n, tiling.n)
        blocks.append(Block(0, tiling.m, n0, n1, at=tiling.m * n0))
    return Cut(tiling, tuple(blocks) if tiling.m else ())


# Hosts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """The host of each rank, hosts numbered from 0 in the order of their first rank.

    >>> t = Topology((0, 0, 1, 1))
    >>> t.ranks_of(1), t.gateway(3, 0), t.destinations(0)
    ((2, 3), 1, (2, 3, 0, 1))
    """

    hosts: tuple[int, ...]

    def __post_init__(self) -> None:
        firsts = list(dict.fromkeys(self.hosts))
        if not self.hosts or firsts != list(range(len(firsts))):
            raise ValueError(
                f"hosts are {self.hosts}, expected one number for each rank, from 0 in the order of first ranks, "
                "such as (0, 0, 1, 1); weft.comm.hosts_of gives them"
            )

    @classmethod
    def apart(cls, size: int) -> Topology:
        """Every rank on a host of its own: how a plan without windows sees its ranks."""
        return cls(tuple(range(size)))

    @property
    def size(self) -> int:
        return len(self.hosts)

    @cached_property
    def count(self) -> int:
        """The number of hosts."""
        return max(self.hosts) + 1

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(r for r, h in enumerate(self.hosts) if h == host) for host in range(self.count))

    def ranks_of(self, host: int) -> tuple[int, ...]:
        """The ranks of a host, in order."""
        return self._ranks[host]

    def local(self, rank: int) -> tuple[int, ...]:
        """The ranks that share the host of `rank`, itself among them."""
        return self._ranks[self.hosts[rank]]

    def gateway(self, rank: int, host: int) -> int:
        """Who on `host` speaks with `rank`: the one in the same place there, so that all take part evenly."""
        there = self._ranks[host]
        return there[self.local(rank).index(rank) % len(there)]

    def other_hosts(self, host: int) -> tuple[int, ...]:
        """The hosts after `host`, and then those before it: everybody starts with a different one."""
        return tuple((host + i) % self.count for i in range(1, self.count))

    def destinations(self, host: int) -> tuple[int, ...]:
        """All ranks in the order in which `host` serves them: other hosts first, its own ranks last."""
        return tuple(rank for other in (*self.other_hosts(host), host) for rank in self._ranks[other])


def nested(hosts: Sequence[int], ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`ranks` grouped by host, hosts in order: the order in which partial results are added up.

    >>> nested((0, 1, 0, 1), range(4))
    ((0, 2), (1, 3))
    """
    topology = Topology(tuple(hosts))
    groups = (tuple(r for r in topology.ranks_of(h) if r in ranks) for h in range(topology.count))
    return tuple(group for group in groups if group)
