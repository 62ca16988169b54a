"""Between torch's DeviceMesh and DTensor and weft's Mesh and Layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from weft.layout import Layout, Mesh, ShardSizes


def mesh_of(device_mesh: DeviceMesh, hosts: Mapping[int, int]) -> Mesh:
    """The mesh of a DeviceMesh; `hosts` says on which host each rank is (see `weft.comm.Group.hosts`)."""
    ranks = device_mesh.mesh.numpy()
    names = device_mesh.mesh_dim_names or ()
    return Mesh.of(ranks, hosts=np.vectorize(hosts.__getitem__, otypes=[np.int64])(ranks), axes=names)


def device_mesh_of(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """A DeviceMesh of the same ranks. Collective: all ranks of the default group must call it."""
    return DeviceMesh(device_type, torch.from_numpy(mesh.array), mesh_dim_names=mesh.axes)


def layout_of(
    device_mesh: DeviceMesh, placements: Sequence[Any], hosts: Mapping[int, int], shape: Sequence[int]
) -> Layout:
    """The layout of torch's placements; `shape` is the whole tensor's.

    `_StridedShard`, with which FSDP2 says that a later axis cuts first, becomes an order of the axes.
    """
    mesh = mesh_of(device_mesh, hosts)
    plain: list[Placement | ShardSizes] = []
    order = list(range(len(mesh.shape)))
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            plain.append(Shard(placement.dim))
            _move_back(order, axis, placement, placements, mesh, shape)
        else:
            plain.append(placement)
    return Layout(mesh, tuple(plain), tuple(order))


def _move_back(
    order: list[int], axis: int, placement: Any, placements: Sequence[Any], mesh: Mesh, shape: Sequence[int]
) -> None:
    """Puts `axis` after the later axes that cut the dim before it: as many as make up the split factor."""
    later = [a for a in range(axis + 1, len(placements)) if getattr(placements[a], "dim", None) == placement.dim]
    factor, last = 1, axis
    for other in later:
        if factor < placement.split_factor:
            factor, last = factor * mesh.shape[other], other
    parts = mesh.shape[axis] * factor
    if factor != placement.split_factor or shape[placement.dim] % parts:
        raise ValueError(
            f"axis {axis} is placed as {placement} of a dim of {shape[placement.dim]}, expected a split factor that "
            f"the later axes make up, and {parts} equal parts; give the layout yourself, with Layout(order=...)"
        )
    order.remove(axis)
    order.insert(order.index(last) + 1, axis)


def layout_of_dtensor(tensor: DTensor, hosts: Mapping[int, int]) -> Layout:
    """The layout of a DTensor."""
    return layout_of(tensor.device_mesh, tensor.placements, hosts, tensor.shape)


def to_dtensor(
    local: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of the local shard; no communication. Its strides are those of a contiguous whole."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, tuple(placements), run_check=False, shape=torch.Size(shape), stride=stride
    )
