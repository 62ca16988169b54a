"""DTensors: the parameters of a model become such, in place and under their names; and logits that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from weft._torch import own_parameters
from weft.errors import Unsupported
from weft.parallel.cut import Cuts, TensorCut
from weft.transformer.ranks import Words


def placement(cut: TensorCut | None) -> Placement:
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


@contextmanager
def local_parameters(
    model: nn.Module, *, without: nn.Module | None = None, known: Cuts | None = None
) -> Iterator[None]:
    """Replicated parameters as plain tensors, for a head's own code; outside of the block they are DTensors.

    Not those of the module `without`, and not those that are described and `known`. Callers take turns by the lock of
    `Ranks`: another thread would find plain tensors where DTensors belong, or the other way round.
    """
    left_out = set() if without is None else set(without.modules())
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            if module not in left_out:
                holder: dict[str, Any] = own_parameters(module)
                for name, p in [*holder.items()]:
                    if isinstance(p, DTensor) and id(p) not in (known or {}):
                        swapped.append((holder, name, p))
                        holder[name] = p.to_local()
        yield
    finally:
        for holder, name, p in swapped:
            holder[name] = p


def as_sharded(part: Tensor, words: Words, mesh: DeviceMesh) -> Tensor:
    """[..., V_r] as a DTensor [..., V] that is sharded along its last dim; nothing is copied."""
    shape = torch.Size([*part.shape[:-1], words.total])
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(
        part, mesh, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=stride
    )  # fmt: skip
    return whole
