"""`weft.reshard` and `weft.reshard_state_dict`: tensors in, tensors out.

    y = weft.reshard(x, dst_mesh, [Shard(0)])     forward   y = x, laid out as dst
    y.sum().backward()                            backward  dx = dy, laid out as x; a Partial x gets dy whole

A replicated y has, as in DTensor, one gradient that all its replicas hold; it is not summed over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.cluster import Cluster
from weft.comm import Group
from weft.comm.deadline import RESHARD, Deadline
from weft.comm.tags import Line, turn
from weft.layout import Layout, Mesh
from weft.reshard.autograd import move
from weft.reshard.describe import Source, Target, exchange, join
from weft.reshard.dtensor import layout_of, layout_of_dtensor, to_dtensor
from weft.reshard.execute import DEFAULT_STAGING
from weft.reshard.job import Job, Options

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
    cluster: Cluster | None = None,
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
    out:    a DTensor or shard to write into, of the right shape and dtype
    timeout: seconds to wait for another rank; 60, and 300 in the first call on a group, when ranks may still load

    Differentiable if `tensor` requires a gradient; then every rank must call backward on (a function of) its
    result, also where that is empty. `async_op=True` returns a `Handle`; its result is not differentiable.
    """
    state = {} if tensor is None else {_NAME: tensor}
    sides = _Sides(_group(group, timeout), dtype)
    sides.add_sources(state, {} if src is None else {_NAME: src})
    sides.add_target(_NAME, (dst_mesh, dst_placements), out, src)
    options = Options(cluster, strategy, chunk_bytes, max_staging_bytes)
    job, differentiable = sides.job(options)
    if async_op:
        return job.start(lambda result: sides.wrap(job, result)[_NAME])
    if differentiable:
        return sides.wrap(job, {_NAME: move(job)})[_NAME]
    return sides.wrap(job, job.run())[_NAME]


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
    cluster: Cluster | None = None,
    strategy: str = "optimal",
    chunk_bytes: int | None = None,
    max_staging_bytes: int = DEFAULT_STAGING,
    timeout: float | None = None,
    async_op: bool = False,
) -> Any:
    """Moves a whole model in one plan, such as a trainer's weights to the inference mesh. Collective.

    state: name -> DTensor, or this rank's local shard with `src[name]`; None on a rank without any
    dst:   name -> (DeviceMesh or Mesh, placements), or a Layout, or the DTensor to write into; None on a rank
           that knows nothing of the destination
    out:   name -> local shard to write into
    dtype: floating tensors are cast to it; `cast` casts each to the dtype of the tensor it is written into
    timeout: as in `reshard`

    Returns name -> tensor for what this rank has of the destination, or a `Handle`. Not differentiable.
    """
    sides = _Sides(_group(group, timeout), dtype, cast=cast)
    sides.add_sources(state or {}, src or {})
    for name, where in (dst or {}).items():
        sides.add_target(name, where, (out or {}).get(name), (src or {}).get(name))
    job, _ = sides.job(Options(cluster, strategy, chunk_bytes, max_staging_bytes))

    def finish(result: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = {spec.name for spec in job.specs if job.rank in spec.dst.mesh.ranks}
        return {name: tensor for name, tensor in sides.wrap(job, result).items() if name in mine}

    return job.start(finish) if async_op else finish(job.run(progress=progress))


def _group(group: ProcessGroup | Group | None, timeout: float | None) -> Group:
    if isinstance(group, Group):
        return group
    pg: Any = dist.group.WORLD if group is None else group
    return Group(pg, timeout=RESHARD.of(timeout, pg))


@dataclass
class _Sides:
    """What this rank brings: gathered first, so that a problem of one rank is told to all."""

    comm: Group
    dtype: torch.dtype | None
    cast: bool = False
    sources: dict[str, Source] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    shards: dict[str, Tensor] = field(default_factory=dict)
    outs: dict[str, Tensor] = field(default_factory=dict)
    wrappers: dict[str, tuple[DeviceMesh, Sequence[Any]]] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    problem: ValueError | None = None

    def __post_init__(self) -> None:
        ranks = dist.get_process_group_ranks(self.comm.pg)
        self.hosts = dict(zip(ranks, self.comm.hosts, strict=True))

    def add_sources(self, state: Mapping[str, Tensor], known: Mapping[str, Source]) -> None:
        """The source's shards of this rank, and what all know of the whole tensors."""
        self.sources.update(known)
        for name, tensor in state.items():
            if not isinstance(tensor, DTensor) and name not in known and tensor.numel() == 0:
                continue  # what a reshard returned on a rank outside of its destination
            try:
                if isinstance(tensor, DTensor):
                    layout = layout_of_dtensor(tensor, self._hosts_of(tensor.device_mesh))
                    self.sources[name] = Source(tuple(tensor.shape), tensor.dtype, layout)
                elif name not in known:
                    raise ValueError(
                        f"tensor {name!r} is a plain tensor of shape {tuple(tensor.shape)}, expected a DTensor, or "
                        "src= with the Source (shape, dtype, layout) that it is a shard of"
                    )
            except ValueError as error:
                self.problem = self.problem or error
                continue
            self.shards[name] = tensor
            self.device = tensor.device

    def add_target(self, name: str, where: Any, out: Tensor | None, source: Source | None) -> None:
        """Where a tensor goes: a mesh and placements, a Layout, or the DTensor to write into."""
        try:
            layout, out = self._layout(name, where, out, source)
        except ValueError as error:
            self.problem = self.problem or error
            return
        dtype = self.dtype
        if self.cast and out is not None:
            dtype = out.dtype
        self.targets[name] = Target(layout, dtype)
        if out is not None:
            self.outs[name] = out.to_local() if isinstance(out, DTensor) else out

    def _layout(self, name: str, where: Any, out: Tensor | None, source: Source | None) -> tuple[Layout, Tensor | None]:
        if isinstance(where, Layout):
            return where, out
        if isinstance(where, DTensor):
            self.wrappers[name] = (where.device_mesh, where.placements)
            return layout_of_dtensor(where, self._hosts_of(where.device_mesh)), where
        mesh, placements = where
        if isinstance(mesh, Mesh):
            return Layout(mesh, tuple(placements)), out
        if len(placements) != mesh.ndim:
            raise ValueError(
                f"got {len(placements)} placements {tuple(placements)} for a mesh of {mesh.ndim} axes, expected one "
                "for each; use Replicate() for axes that do nothing"
            )
        self.wrappers[name] = (mesh, placements)
        shape = self.sources[name].shape if name in self.sources else ()
        return layout_of(mesh, placements, self._hosts_of(mesh), shape), out

    def _hosts_of(self, mesh: DeviceMesh) -> dict[int, int]:
        missing = [rank for rank in mesh.mesh.reshape(-1).tolist() if rank not in self.hosts]
        if missing:
            raise ValueError(
                f"the mesh has the ranks {missing}, which are not in the process group of ranks {sorted(self.hosts)}; "
                "expected a group with all of them; pass group="
            )
        return self.hosts

    def job(self, options: Options) -> tuple[Job, bool]:
        """The move of all tensors; and whether it is to be differentiated."""
        wants = any(shard.requires_grad for shard in self.shards.values()) and torch.is_grad_enabled()
        shards = {n: x.to_local() if isinstance(x, DTensor) else x for n, x in self.shards.items()}
        with turn(self.comm.pg, Line.RESHARD.title, Deadline.after(self.comm.timeout)):
            known = exchange(self.comm, self.sources, self.targets, requires_grad=wants, problem=self.problem)
            specs = join(known.sources, known.targets)
            job = Job(self.comm, specs, shards, self.outs, options, device=self.device)
        return job, known.differentiable

    def wrap(self, job: Job, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shards as DTensors where the destination is a DeviceMesh."""
        result: dict[str, Tensor] = dict(shards)
        for spec in job.specs:
            # torch cannot differentiate through the empty DTensor of a rank outside of its mesh.
            if spec.name in self.wrappers and job.rank in spec.dst.mesh.ranks:
                mesh, placements = self.wrappers[spec.name]
                result[spec.name] = to_dtensor(shards[spec.name], mesh, placements, spec.shape)
        return result
