"""`weft.reshard` and `weft.reshard_state_dict`: tensors in, tensors out.

    y = weft.reshard(x, dst_mesh, [Shard(0)])     forward   y = x, laid out as dst
    y.sum().backward()                            backward  dx = dy, laid out as x; a Partial x gets dy whole

A replicated y has, as in DTensor, one gradient that all its replicas hold; it is not summed over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft._torch import leave_to_python
from weft.comm import Group
from weft.layout import DeclaredCluster, Mesh
from weft.reshard.arguments import Arguments, differentiate
from weft.reshard.executor.executor import DEFAULT_STAGING
from weft.reshard.executor.job import Handle, TransferOptions
from weft.reshard.sides import Source

_NAME = "tensor"


def reshard(
    tensor: Tensor | None,
    dst_mesh: DeviceMesh | Mesh,
    dst_placements: Sequence[Any],
    *,
    src: Source | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    group: ProcessGroup | Group | None = None,
    cluster: DeclaredCluster | None = None,
    strategy: str = "optimal",
    chunk_bytes: int | None = None,
    max_staging_bytes: int = DEFAULT_STAGING,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Moves a tensor to another mesh and layout. Collective over `group`, the default group unless told.

    tensor: a DTensor; or this rank's local shard, with `src` saying what it is a shard of; or None on a rank
            that has nothing of the source
    dst:    a DeviceMesh, and the result is a DTensor; or a Mesh, and it is this rank's shard. A rank outside
            the destination gets an empty tensor
    dtype:  the result's; the source's unless told
    out:    a DTensor or shard to write into, of the right shape and dtype; its version goes up
    timeout: seconds to wait for another rank; 60, and 300 in the first call on a group, when ranks may still load

    Differentiable if `tensor` requires a gradient; then every rank must call backward on (a function of) its
    result, also where that is empty. `async_op=True` copies the source, which may change at once, and returns a
    `Handle`. What cannot be right is refused on all ranks before a byte moves.
    """
    given = Arguments.of(group, timeout)
    with given.noting():
        given.add_source(_NAME, tensor, src)
    with given.noting():
        given.add_target(_NAME, (dst_mesh, dst_placements), out, dtype=dtype, only_floating=False, cast=False)
    options = TransferOptions(cluster, strategy, chunk_bytes, max_staging_bytes)
    job, way = given.job("reshard", options, differentiable=True)
    source = tensor.to_local() if way is not None and isinstance(tensor, DTensor) else tensor

    def result(shards: Callable[[], dict[str, Tensor]]) -> Tensor:
        shard = shards()[_NAME] if way is None else differentiate(way, source, lambda: shards()[_NAME])
        return given.wrap({_NAME: shard}, job)[_NAME]

    return Handle(job.start(), lambda: result(job.result)) if async_op else result(job.run)


def reshard_state_dict(
    state: Mapping[str, Tensor] | None,
    dst: Mapping[str, Any] | None,
    *,
    src: Mapping[str, Source] | None = None,
    out: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    cast: bool = False,
    progress: bool = False,
    group: ProcessGroup | Group | None = None,
    cluster: DeclaredCluster | None = None,
    strategy: str = "optimal",
    chunk_bytes: int | None = None,
    max_staging_bytes: int = DEFAULT_STAGING,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Moves a whole model in one plan, such as a trainer's weights to the inference mesh. Collective.

    state: name -> DTensor, or this rank's local shard with `src[name]`: what this rank has, such as the layers of
           its stage; None on a rank without any
    dst:   name -> (DeviceMesh or Mesh, placements), or a Layout, or the DTensor to write into; None on a rank
           that knows nothing of the destination
    out:   name -> local shard to write into
    dtype: floating tensors are cast to it; `cast` casts each to the dtype of the tensor it is written into
    timeout: as in `reshard`

    Returns name -> tensor for what this rank has of the destination, or a `Handle`. Not differentiable.
    """
    given = Arguments.of(group, timeout)
    with given.noting():
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, expected a floating one: only floating tensors are cast to it")
        for name in {**(src or {}), **(state or {})}:
            given.add_source(name, (state or {}).get(name), (src or {}).get(name))
        strange = sorted(set(out or {}) - set(dst or {}))
        if strange:
            raise ValueError(f"out has {strange[:5]}, which dst has not, expected names of dst")
        for name, where in (dst or {}).items():
            given.add_target(name, where, (out or {}).get(name), dtype=dtype, only_floating=True, cast=cast)
    options = TransferOptions(cluster, strategy, chunk_bytes, max_staging_bytes)
    job, _ = given.job("reshard_state_dict", options, differentiable=False)
    mine = {spec.name for spec in job.specs if job.rank in spec.dst.mesh.ranks}

    def result(shards: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in given.wrap(shards, job).items() if name in mine}

    if async_op:
        return Handle(job.start(), lambda: result(job.result()))
    return result(job.run(progress=progress))


for _each in (reshard, reshard_state_dict, Handle.wait):
    leave_to_python(_each, "weft.reshard talks to other ranks")
