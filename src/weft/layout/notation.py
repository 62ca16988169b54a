"""The papers' notation of layouts: `S0RR`, `RS01R`, and `P1` for terms; sizes that are given follow in braces."""

from __future__ import annotations

import re

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from weft.layout.mesh import Mesh
from weft.layout.value import Layout, ShardSizes


def format_layout(layout: Layout, ndim: int) -> str:
    """A layout of a tensor of `ndim` dims as text."""
    text = ""
    for axes in layout.dim_axes(ndim):
        cuts = "".join(f"{axis}{_sizes_text(layout.placements[axis])}" for axis in axes)
        text += f"S{cuts}" if axes else "R"
    for axis in layout.partial_axes:
        placement = layout.placements[axis]
        assert isinstance(placement, Partial)
        text += f"P{axis}" + ("" if placement.reduce_op == "sum" else f"{{{placement.reduce_op}}}")
    return text


def parse_layout(mesh: Mesh, notation: str) -> Layout:
    """The layout of a text on `mesh`."""
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
    return Layout(mesh, tuple(placements), tuple(order))


def _placement(letter: str, dim: int, inner: str) -> Placement | ShardSizes:
    if letter == "P":
        return Partial(inner or "sum")
    return ShardSizes(dim, tuple(int(size) for size in inner.split(","))) if inner else Shard(dim)


def _bad_notation(notation: str, expected: str) -> ValueError:
    return ValueError(f"got the layout {notation!r}, expected {expected}")


def _sizes_text(placement: Placement | ShardSizes) -> str:
    return "{" + ",".join(map(str, placement.sizes)) + "}" if isinstance(placement, ShardSizes) else ""
