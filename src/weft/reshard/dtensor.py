"""Between torch's DeviceMesh and DTensor and weft's Mesh and Layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from weft._torch import shard_order, strided_shard, strides_are_order
from weft.layout import Layout, Mesh

StridedShard = strided_shard()


def mesh_of(device_mesh: DeviceMesh, hosts: Mapping[int, int]) -> Mesh:
    """The mesh of a DeviceMesh; `hosts` says on which host each rank is (see `weft.comm.Group.hosts`)."""
    ranks = device_mesh.mesh.numpy()
    names = device_mesh.mesh_dim_names or ()
    return Mesh.of(ranks, hosts=np.vectorize(hosts.__getitem__, otypes=[np.int64])(ranks), axes=names)


def device_mesh_of(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """A DeviceMesh of the same ranks. Collective: all ranks of the default group must call it."""
    return DeviceMesh(device_type, torch.from_numpy(mesh.array), mesh_dim_names=mesh.axes)


def layout_of(
    device_mesh: DeviceMesh, placements: Sequence[Any], hosts: Mapping[int, int], *, order: Sequence[int] = ()
) -> Layout:
    """The layout of torch's placements.

    `_StridedShard`, with which FSDP2 says that a later axis cuts first, becomes an order of the axes.
    """
    mesh = mesh_of(device_mesh, hosts)
    for axis, placement in enumerate(placements):
        # torch's groups are sorted: it gathers the shards of such an axis in another order than it counts them in.
        if hasattr(placement, "dim") and np.any(np.diff(mesh.array, axis=axis) < 0):
            raise ValueError(
                f"axis {axis} of the DeviceMesh {mesh.array.tolist()} is placed as {placement}, expected ranks that "
                "ascend along it: torch itself mixes up the shards of others; use such a mesh, or weft.layout.Mesh"
            )
    plain = [Shard(each.dim) if isinstance(each, StridedShard) else each for each in placements]
    return Layout(mesh, tuple(plain), tuple(order or _cutting_order(placements, mesh.shape)))


def _cutting_order(placements: Sequence[Any], sizes: Sequence[int]) -> list[int]:
    """The axes in the order in which they cut: a split factor says into how many parts others have cut before.

    >>> _cutting_order([StridedShard(0, split_factor=2), StridedShard(0, split_factor=2), Shard(0)], (4, 3, 2))
    [2, 0, 1]
    """
    result = list(range(len(placements)))
    if not any(isinstance(each, StridedShard) for each in placements):
        return result
    if any(getattr(each, "dim", 0) < 0 for each in placements):
        raise ValueError(f"got the placements {tuple(placements)}, expected dims that count from the first")
    for dim in {each.dim for each in placements if isinstance(each, StridedShard)}:
        axes: list[int] = []
        for axis in reversed(range(len(placements))):
            if getattr(placements[axis], "dim", None) == dim:
                axes.insert(_place(axis, placements[axis], [sizes[other] for other in axes]), axis)
        for place, axis in zip(sorted(axes), axes, strict=True):
            result[place] = axis
    return result


def _place(axis: int, placement: Any, sizes: Sequence[int]) -> int:
    """After how many of the later axes, of these sizes, an axis cuts."""
    factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    before = [math.prod(sizes[:count]) for count in range(len(sizes) + 1)]
    if factor not in before:
        raise ValueError(
            f"axis {axis} is placed as {placement}, expected a split factor that later axes make up, one of {before}; "
            "give the layout yourself, with Layout(order=...)"
        )
    return before.index(factor)


def layout_of_dtensor(tensor: DTensor, hosts: Mapping[int, int]) -> Layout:
    """The layout of a DTensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    strided = [each for each in placements if isinstance(each, StridedShard)]
    if not strided:
        order = list(range(mesh.ndim))
        for axes in shard_order(tensor).values():
            for place, axis in zip(sorted(axes), axes, strict=True):
                order[place] = axis
        return layout_of(mesh, placements, hosts, order=order)
    for each in () if strides_are_order(tensor) else strided:
        parts = math.prod(mesh.size(axis) for axis, other in enumerate(placements) if _same_dim(each, other))
        if tensor.shape[each.dim] % parts:
            raise ValueError(
                f"a DTensor of shape {tuple(tensor.shape)} is placed as {placements} by a view, expected {parts} equal "
                "parts; redistribute() it before"
            )
    return layout_of(mesh, placements, hosts)


def _same_dim(a: Any, b: Any) -> bool:
    return bool(getattr(b, "dim", None) == a.dim)


def to_dtensor(
    local: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of the local shard; no communication. Its strides are those of a contiguous whole."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride
    )
