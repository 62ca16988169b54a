"""Random moves for the tests of resharding."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.layout import Layout, Mesh, ShardSizes
from weft.reshard import TensorSpec

WORLD = 8


@st.composite
def meshes(draw: st.DrawFn, per_host: int, world: int = WORLD) -> Mesh:
    """Some of the ranks of a world with `per_host` ranks a host, in any order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).filter(lambda s: math.prod(s) <= world))
    ranks = np.array(draw(st.permutations(range(world)))[: math.prod(shape)]).reshape(shape)
    return Mesh.of(ranks, hosts=ranks // per_host)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], *, partial: bool) -> Layout:
    """Any placements; one axis may have explicit sizes."""
    placements: list[object] = []
    used: set[int] = set()
    for count in mesh.shape:
        choices: list[object] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        if partial:
            choices.append(Partial())
        placement = draw(st.sampled_from(choices))
        if isinstance(placement, Shard) and placement.dim not in used and draw(st.booleans()):
            cuts = sorted(draw(st.lists(st.integers(0, shape[placement.dim]), min_size=count - 1, max_size=count - 1)))
            bounds = [0, *cuts, shape[placement.dim]]
            used.add(placement.dim)
            placement = ShardSizes(placement.dim, tuple(b - a for a, b in pairwise(bounds)))
        elif isinstance(placement, Shard):
            used.add(placement.dim)
        placements.append(placement)
    sized = any(isinstance(placement, ShardSizes) for placement in placements)
    axes = range(len(mesh.shape))
    order = tuple(axes) if sized else tuple(draw(st.permutations(axes)))
    return Layout(mesh, _whole_first(placements), order)  # type: ignore[arg-type]


def _whole_first(placements: list[object]) -> list[object]:
    """Sizes add up to the whole dim, so no axis before may have cut it: the others of that dim replicate."""
    dims = {p.dim for p in placements if isinstance(p, ShardSizes)}
    return [Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in placements]


@st.composite
def specs(draw: st.DrawFn, *, partial: bool = True, world: int = WORLD) -> TensorSpec:
    """A tensor between two meshes that may be the same, overlap or be disjoint."""
    per_host = draw(st.sampled_from([1, 2, 4]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40]), max_size=3)))
    src = draw(layouts(draw(meshes(per_host, world)), shape, partial=partial))
    dst = draw(layouts(draw(meshes(per_host, world)), shape, partial=False))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    wide = torch.float64 if dtype.is_floating_point else dtype
    return TensorSpec("x", shape, dtype, src, dst, draw(st.sampled_from([dtype, wide])))
