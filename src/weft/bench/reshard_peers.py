"""What a torch user writes today to bring a state dict to another mesh: two ways, each at its best."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from weft._torch import redistribution_logger
from weft.lab import Rank
from weft.layout import ShardSizes
from weft.reshard import TensorSpec
from weft.reshard.dtensor import to_dtensor

Shards = Mapping[int, Tensor]


def full_broadcast(specs: Sequence[TensorSpec], rank: Rank, src: Shards, dst: Shards) -> Callable[[], None]:
    """`DTensor.full_tensor` on the trainer, a broadcast to the inference ranks, and a slice there; one by one."""
    mesh, group = _device_mesh(specs[0], "src"), _receivers(specs[0])
    # It advises to flatten the mesh; but nested and flat cuts differ where a dim does not divide.
    redistribution_logger().setLevel(logging.ERROR)

    def run() -> None:
        for i, spec in enumerate(specs):
            if rank.rank in spec.src.mesh.ranks:
                full = to_dtensor(src[i], mesh, _placements(spec, "src"), spec.shape).full_tensor()
            else:
                full = torch.empty(spec.shape, dtype=spec.dtype)
            if group is not None:
                dist.broadcast(full, spec.src.mesh.ranks[0], group=group)
            if rank.rank in spec.dst.mesh.ranks:
                box = spec.dst.box(spec.shape, rank.rank)
                dst[i].copy_(full[tuple(slice(a, b) for a, b in box)])

    return run


def dcp_files(specs: Sequence[TensorSpec], rank: Rank, src: Shards, dst: Shards, folder: Path) -> Callable[[], None]:
    """torch.distributed.checkpoint: the trainer saves, the inference ranks load into their layout.

    The files are on this machine, in its page cache: they cross no network card, which real ones would.
    """
    meshes = {side: _device_mesh(specs[0], side) for side in ("src", "dst")}
    groups = {side: mesh_group(specs[0], side) for side in ("src", "dst")}

    def state(side: str, shards: Shards) -> dict[str, Tensor]:
        return {
            spec.name: to_dtensor(shards[i], meshes[side], _placements(spec, side), spec.shape)
            for i, spec in enumerate(specs)
        }

    def run() -> None:
        if rank.rank in specs[0].src.mesh.ranks:
            state_dict_saver.save(state("src", src), checkpoint_id=folder, process_group=groups["src"])
        dist.barrier()
        if rank.rank in specs[0].dst.mesh.ranks:
            state_dict_loader.load(state("dst", dst), checkpoint_id=folder, process_group=groups["dst"])
        dist.barrier()
        if rank.rank == 0:
            shutil.rmtree(folder)

    return run


def _placements(spec: TensorSpec, side: str) -> list[Placement]:
    placements = getattr(spec, side).placements
    assert not any(isinstance(placement, ShardSizes) for placement in placements), "DTensor has no such placement"
    return list(placements)


def _device_mesh(spec: TensorSpec, side: str) -> DeviceMesh:
    mesh = getattr(spec, side).mesh
    return DeviceMesh("cpu", torch.from_numpy(mesh.array), mesh_dim_names=mesh.axes)


def mesh_group(spec: TensorSpec, side: str) -> dist.ProcessGroup | None:
    """A process group of all ranks of one side; None elsewhere. Collective."""
    group = dist.new_group(list(getattr(spec, side).mesh.ranks))
    return group if isinstance(group, dist.ProcessGroup) else None


def _receivers(spec: TensorSpec) -> dist.ProcessGroup | None:
    group = dist.new_group([spec.src.mesh.ranks[0], *spec.dst.mesh.ranks])
    return group if isinstance(group, dist.ProcessGroup) else None
