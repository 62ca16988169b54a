"""`Layout`: what each axis of a mesh does to a tensor, and so which rank holds which box; and its notation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from weft.layout.mesh import Ints, Mesh

Box = tuple[tuple[int, int], ...]
"""Where a block lies in a tensor: (first, past the last) of each dim; `()` is the box of a scalar."""


@dataclass(frozen=True)
class ShardSizes:
    """A placement: the mesh axis cuts `dim` into parts of these sizes, 0 allowed.

    >>> Layout(Mesh.grid(1, 3), [Replicate(), ShardSizes(0, (5, 0, 2))]).box((7,), rank=2)
    ((5, 7),)
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"sizes of ShardSizes are {self.sizes}, expected each 0 or more")


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh: one placement for each axis, as in DTensor.

    order: the axes in the order in which they cut; only the order of axes that cut the same dim matters. It
           is by default from the first axis to the last, as in DTensor; (1, 0) is the papers' `S10`, and
           what FSDP2 over tensor parallelism makes (`_StridedShard`).

    >>> layout = Layout(Mesh.grid(2, 2), [Shard(0), Replicate()])
    >>> layout.box((5, 4), rank=3), layout.notation(2)
    (((3, 5), (0, 4)), 'S0R')
    """

    mesh: Mesh
    placements: tuple[Placement | ShardSizes, ...]
    order: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))
        axes = len(self.mesh.shape)
        if len(self.placements) != axes:
            raise ValueError(
                f"got {len(self.placements)} placements {self.placements} for a mesh of {axes} axes "
                f"({', '.join(self.mesh.axes)}), expected one for each; use Replicate() for axes that do nothing"
            )
        order = tuple(self.order) or tuple(range(axes))
        if sorted(order) != list(range(axes)):
            raise ValueError(f"order is {order}, expected each of the {axes} mesh axes once")
        for axis, placement in enumerate(self.placements):
            self._check(axis, placement)
        object.__setattr__(self, "order", self._canonical(order))

    def _check(self, axis: int, placement: object) -> None:
        # Their own types and no others: a Partial that masks or takes norms is not a plain sum of its terms.
        if type(placement) not in (Shard, Replicate, Partial, ShardSizes):
            raise ValueError(
                f"placement of axis {axis} is {placement!r}, expected Shard, ShardSizes, Replicate or Partial"
            )
        if isinstance(placement, ShardSizes) and len(placement.sizes) != self.mesh.shape[axis]:
            raise ValueError(
                f"axis {axis} has {self.mesh.shape[axis]} ranks, but {placement} has {len(placement.sizes)} sizes; "
                "expected one for each"
            )

    def _canonical(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """The order with everything sorted that does not matter, so that equal layouts compare equal.

        While dims count from the end, nobody knows which of them are the same; see `normal`.
        """
        if any((_dim(placement) or 0) < 0 for placement in self.placements):
            return order
        groups: dict[object, list[int]] = {}
        for axis in order:
            dim = _dim(self.placements[axis])
            groups.setdefault(("other", axis) if dim is None else dim, []).append(axis)
        result = list(range(len(order)))
        for axes in groups.values():
            for place, axis in zip(sorted(axes), axes, strict=True):
                result[place] = axis
        return tuple(result)

    def normal(self, ndim: int) -> Layout:
        """The same layout for tensors of `ndim` dims, with dims that count from the first.

        >>> Layout(Mesh.grid(2, 2), [Shard(-1), Replicate()]).normal(3).placements
        (Shard(dim=2), Replicate())
        """
        self.dim_axes(ndim)  # refuses dims that the tensor does not have
        if all((_dim(placement) or 0) >= 0 for placement in self.placements):
            return self
        placements = []
        for placement in self.placements:
            if isinstance(placement, ShardSizes):
                placement = ShardSizes(placement.dim % ndim, placement.sizes)
            elif isinstance(placement, Shard):
                placement = Shard(placement.dim % ndim)
            placements.append(placement)
        return Layout(self.mesh, tuple(placements), self.order)

    def dim_axes(self, ndim: int) -> list[list[int]]:
        """For each dim the axes that cut it, in order."""
        found: list[list[int]] = [[] for _ in range(ndim)]
        for axis in self.order:
            dim = _dim(self.placements[axis])
            if dim is None:
                continue
            if not -ndim <= dim < ndim:
                raise ValueError(
                    f"axis {axis} is placed as {self.placements[axis]}, but the tensor has {ndim} dims; "
                    "expected a dim of the tensor"
                )
            found[dim % ndim].append(axis)
        return found

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The axes along which terms lie that are still to be reduced."""
        return tuple(i for i, placement in enumerate(self.placements) if isinstance(placement, Partial))

    @property
    def reduce_op(self) -> str | None:
        """What reduces the terms of `Partial` ("sum", "avg", "max", "min", "product"); None without them."""
        ops = {placement.reduce_op for placement in self.placements if isinstance(placement, Partial)}
        if len(ops) > 1:
            raise ValueError(f"placements are {self.placements}, expected one way of reducing, got {sorted(ops)}")
        return str(ops.pop()) if ops else None

    def intervals(self, shape: Sequence[int]) -> list[tuple[Ints, Ints]]:
        """For each dim the (first, past the last) of its parts, as two arrays; parts count as in `holders`."""
        result = []
        for size, axes in zip(shape, self.dim_axes(len(shape)), strict=True):
            first, last = np.zeros(1, np.int64), np.full(1, size, np.int64)
            for axis in axes:
                sizes = self._part_sizes(axis, last - first)  # [parts so far, ranks of the axis]
                ends = first[:, None] + np.cumsum(sizes, axis=1)
                first, last = (ends - sizes).reshape(-1), ends.reshape(-1)
            result.append((first, last))
        return result

    def _part_sizes(self, axis: int, lengths: Ints) -> Ints:
        placement, count = self.placements[axis], self.mesh.shape[axis]
        if isinstance(placement, ShardSizes):
            if np.any(lengths != sum(placement.sizes)):
                raise ValueError(
                    f"{placement} adds up to {sum(placement.sizes)}, but axis {axis} cuts "
                    f"{sorted(set(lengths.tolist()))} elements; expected sizes that add up to that"
                )
            return np.broadcast_to(np.array(placement.sizes, np.int64), (len(lengths), count))
        step = -(-lengths // count)  # the rule of torch.chunk: all equal but the last ones
        return np.clip(lengths[:, None] - step[:, None] * np.arange(count), 0, step[:, None])

    def holders(self, ndim: int) -> Ints:
        """Who holds what: int64 [cells, terms, replicas].

        A cell is one part of each dim, row by row over the dims' parts. Its value is the reduction of its
        terms, one for each place on the partial axes; each term is held alike by its replicas.
        """
        cutting = [axis for axes in self.dim_axes(ndim) for axis in axes]
        partial = list(self.partial_axes)
        others = [axis for axis in range(len(self.mesh.shape)) if axis not in cutting + partial]
        ordered = self.mesh.array.transpose(cutting + partial + others)
        terms = math.prod(self.mesh.shape[axis] for axis in partial)
        replicas = math.prod(self.mesh.shape[axis] for axis in others)
        return ordered.reshape(-1, terms, replicas)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """The box of the tensor that a rank of the mesh holds."""
        cells = self.holders(len(shape))
        cell = int(np.nonzero(cells == rank)[0][0])
        parts = self.intervals(shape)
        index = np.unravel_index(cell, [len(first) for first, _ in parts]) if parts else ()
        return tuple((int(first[i]), int(last[i])) for (first, last), i in zip(parts, index, strict=True))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's local tensor; `(0,)` for a rank that is not in the mesh, as in DTensor."""
        if rank not in self.mesh.ranks:
            return (0,)
        return tuple(last - first for first, last in self.box(shape, rank))

    def notation(self, ndim: int) -> str:
        """The papers' notation; sizes that are given follow in braces: `S0{5,0,2}R`.

        >>> Layout(Mesh.grid(2, 4), [Shard(1), Shard(1)], order=(1, 0)).notation(3)
        'RS10R'
        """
        text = ""
        for axes in self.dim_axes(ndim):
            cuts = "".join(f"{axis}{_sizes_text(self.placements[axis])}" for axis in axes)
            text += f"S{cuts}" if axes else "R"
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Partial):
                text += f"P{axis}" + ("" if placement.reduce_op == "sum" else f"{{{placement.reduce_op}}}")
        return text

    @classmethod
    def parse(cls, mesh: Mesh, notation: str) -> Layout:
        """The layout of that notation on `mesh`; the number of R and S is the number of dims.

        >>> Layout.parse(Mesh.grid(2, 4), "RS01R").placements
        (Shard(dim=1), Shard(dim=1))
        """
        placements: list[Placement | ShardSizes] = [Replicate() for _ in mesh.shape]
        order: list[int] = []
        dim = 0
        tokens = re.findall(r"R|S(?:\d(?:\{[\d,]*\})?)+|P\d(?:\{\w+\})?", notation)
        if "".join(tokens) != notation:
            raise _bad_notation(notation, "S and R with axes, such as S0RR or RS01R, and P1 for terms")
        for token in tokens:
            for axis, inner in ((int(a), b) for a, b in re.findall(r"(\d)(?:\{([^}]*)\})?", token)):
                if axis >= len(mesh.shape) or axis in order:
                    raise _bad_notation(notation, f"each of the {len(mesh.shape)} mesh axes at most once")
                order.append(axis)
                placements[axis] = _placement(token[0], dim, inner)
            dim += token[0] != "P"
        order += [axis for axis in range(len(mesh.shape)) if axis not in order]
        return cls(mesh, tuple(placements), tuple(order))


def _dim(placement: Placement | ShardSizes) -> int | None:
    return int(placement.dim) if isinstance(placement, Shard | ShardSizes) else None


def _placement(letter: str, dim: int, inner: str) -> Placement | ShardSizes:
    if letter == "P":
        return Partial(inner or "sum")
    return ShardSizes(dim, tuple(int(size) for size in inner.split(","))) if inner else Shard(dim)


def _bad_notation(notation: str, expected: str) -> ValueError:
    return ValueError(f"got the layout {notation!r}, expected {expected}")


def _sizes_text(placement: Placement | ShardSizes) -> str:
    return "{" + ",".join(map(str, placement.sizes)) + "}" if isinstance(placement, ShardSizes) else ""
