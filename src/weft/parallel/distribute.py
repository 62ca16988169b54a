"""Turns the parameters of a model into DTensors, in place and under their names."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from weft._torch import own_parameters
from weft.packed.models.common import Unsupported
from weft.parallel.describe import Cuts
from weft.parallel.realign import Cut


def placement(cut: Cut | None) -> Placement:
    """Where a parameter lies on the axis."""
    return Replicate() if cut is None else Shard(cut.dim)


def distribute(model: nn.Module, mesh: DeviceMesh, found: Cuts) -> None:
    """Rank 0's values count, as with torch's `parallelize_module`; on the meta device there are none, and none move.

    A tensor that several modules hold stays one tensor.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    ]
    for _, name, parameter in places:  # before anything is changed
        if isinstance(parameter, DTensor):
            raise Unsupported(f"{name} is a DTensor already; parallelize a model once, before FSDP or DDP wraps it")
    made: dict[int, nn.Parameter] = {}
    for module, name, parameter in places:
        if id(parameter) not in made:
            spread = distribute_tensor(parameter.detach(), mesh, [placement(found.get(id(parameter)))])
            made[id(parameter)] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
        own_parameters(module)[name] = made[id(parameter)]
