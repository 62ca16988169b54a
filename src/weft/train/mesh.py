"""The ranks of a run as a mesh whose every group has the run's timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "tp")


def make_mesh(shape: tuple[int, int, int], *, timeout: float) -> DeviceMesh:
    """All ranks as stages x copies x ranks of a layer; neighbours share a layer, as they talk the most. Collective.

    `init_device_mesh` would give the groups of its axes the default group's timeout, half an hour unless told.
    """
    ranks = torch.arange(dist.get_world_size()).reshape(shape)
    own: list[Any] = []
    for axis, size in enumerate(shape):
        for row in ranks.movedim(axis, -1).reshape(-1, size).tolist():
            group = dist.new_group(row, timeout=timedelta(seconds=timeout))
            if dist.get_rank() in row:
                own.append(group)
    return DeviceMesh.from_group(own, "cpu", mesh=ranks, mesh_dim_names=AXES)
