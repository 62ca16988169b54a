"""`weft.reshard` and `weft.reshard_state_dict`: tensors in, tensors out.

    y = weft.reshard(x, dst_mesh, [Shard(0)])     forward   y = x, laid out as dst
    y.sum().backward()                            backward  dx = dy, laid out as x; a Partial x gets dy whole

A replicated y has, as in DTensor, one gradient that all its replicas hold; it is not summed over them.

What a rank gives is gathered and checked first. Nothing here may raise before the ranks have met: a rank that left
earlier would keep the others waiting, and its next call would meet their last one. So whatever is wrong is kept as the
rank's `problem` until then, and told to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft._torch import leave_to_python
from weft.comm import Group
from weft.comm.deadline import RESHARD, Deadline
from weft.comm.tags import Line, turn
from weft.layout import DeclaredCluster, Layout, Mesh, check_ranks
from weft.reshard.describe import RankRequest, Source, Target, exchange
from weft.reshard.executor.executor import DEFAULT_STAGING, Handle, TransferJob, TransferOptions
from weft.reshard.spec import TensorSpec
from weft.reshard.tensors import (
    check_apart,
    check_mode,
    check_source,
    check_target,
    find_ties,
    layout_of,
    layout_of_dtensor,
    memory_of,
    to_dtensor,
)

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
    """Moves a tensor to another mesh and layout. Collective over `group`, by default the default group.

    tensor: a DTensor; or this rank's local shard, with `src` saying what it is a shard of; or None on a rank
            that has nothing of the source
    dst:    a DeviceMesh, and the result is a DTensor; or a Mesh, and it is this rank's shard. A rank outside
            the destination gets an empty tensor
    dtype:  the result's; the source's by default
    out:    a DTensor or shard to write into, of the right shape and dtype; its version goes up
    timeout: seconds to wait for another rank; 60, and 300 in the first call on a group, when ranks may still load

    Differentiable if `tensor` requires a gradient; then every rank must call backward on (a function of) its
    result, also where that is empty. `async_op=True` copies the source, which may change at once, and returns a
    `Handle`. What cannot be right is refused on all ranks before a byte moves.
    """
    given = _Arguments.of("reshard", group, timeout)
    with given.noting():
        given.add_source(_NAME, tensor, src)
    with given.noting():
        given.add_target(_NAME, (dst_mesh, dst_placements), out, dtype=dtype, only_floating=False, cast=False)
    options = TransferOptions(cluster, strategy, chunk_bytes, max_staging_bytes)
    job, way = given.job(options, differentiable=True)
    source = tensor.to_local() if way is not None and isinstance(tensor, DTensor) else tensor

    def result(shards: Callable[[], dict[str, Tensor]]) -> Tensor:
        shard = shards()[_NAME] if way is None else _differentiate(way, source, lambda: shards()[_NAME])
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
    given = _Arguments.of("reshard_state_dict", group, timeout)
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
    job, _ = given.job(options, differentiable=False)
    mine = {spec.name for spec in job.specs if job.rank in spec.dst.mesh.ranks}

    def result(shards: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in given.wrap(shards, job).items() if name in mine}

    if async_op:
        return Handle(job.start(), lambda: result(job.result()))
    return result(job.run(progress=progress))


for _each in (reshard, reshard_state_dict, Handle.wait):
    leave_to_python(_each, "weft.reshard talks to other ranks")


@dataclass
class _Arguments:
    """This rank's tensors of both sides, by name.

    asked:    the function that the user called
    shards:   of the source, as the user gave them
    outs:     to be written into, as the user gave them
    wrappers: how results become DTensors
    """

    asked: str
    comm: Group
    problem: Exception | None = None
    sources: dict[str, Source] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    shards: dict[str, Tensor] = field(default_factory=dict)
    outs: dict[str, Tensor] = field(default_factory=dict)
    wrappers: dict[str, tuple[DeviceMesh, tuple[Any, ...]]] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.ranks = dist.get_process_group_ranks(self.comm.pg)
        self.rank = self.ranks[self.comm.rank]
        self.hosts = dict(zip(self.ranks, self.comm.hosts, strict=True))

    @classmethod
    def of(cls, asked: str, group: ProcessGroup | Group | None, timeout: float | None) -> _Arguments:
        """None yet; `group` as the public functions take it."""
        pg: Any = dist.group.WORLD if group is None else group
        if pg is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not in the process group, expected a call on the ranks of the group only")
        problem: Exception | None = None
        try:
            Deadline.after(RESHARD.of(timeout))
        except (ValueError, TypeError) as error:
            problem, timeout = error, None
        comm = pg if isinstance(pg, Group) else Group(pg, timeout=RESHARD.of(timeout, pg), what=asked)
        given = cls(asked, comm, problem)
        with given.noting():
            check_mode()
        return given

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keeps what goes wrong inside; the first problem counts."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or error

    def add_source(self, name: str, tensor: Tensor | None, known: Source | None) -> None:
        """A tensor of the source: a DTensor, or a shard of what is `known`; None for one that this rank has not."""
        if known is not None:
            self.sources[name] = Source(tuple(map(int, known.shape)), known.dtype, known.layout)
        if tensor is None or (known is None and _is_nothing(tensor)):
            return
        check_source(name, tensor)
        if isinstance(tensor, DTensor):
            layout = layout_of_dtensor(tensor, self._hosts_of(tensor.device_mesh))
            own = Source(tuple(tensor.shape), tensor.dtype, layout)
            if self.sources.setdefault(name, own) != own:
                raise ValueError(f"tensor {name!r} is {own}, but src= says {known}; leave src= away for a DTensor")
        elif known is None:
            raise ValueError(
                f"tensor {name!r} is a plain tensor of shape {tuple(tensor.shape)}, expected a DTensor, or "
                "src= with the Source (shape, dtype, layout) that it is a shard of"
            )
        elif self.rank not in known.layout.mesh.ranks and tensor.numel():
            raise ValueError(
                f"rank {self.rank} gives a shard of tensor {name!r}, whose mesh has the ranks "
                f"{known.layout.mesh.ranks}, expected None on other ranks"
            )
        self.shards[name] = tensor
        self.device = tensor.device

    def add_target(
        self, name: str, where: Any, out: Tensor | None, *, dtype: torch.dtype | None, only_floating: bool, cast: bool
    ) -> None:
        """Where a tensor goes: a mesh and placements, a Layout, or the DTensor to write into; `out` to write into."""
        if isinstance(where, DTensor):
            if out is not None and out is not where:
                raise ValueError(f"destination {name!r} is a DTensor, and out= another one, expected one of the two")
            out = where
        layout = self._layout(name, where)
        shape = tuple(out.shape) if isinstance(out, DTensor) else None
        if isinstance(out, DTensor):
            own = layout_of_dtensor(out, self._hosts_of(out.device_mesh))
            if own.normal(out.ndim) != layout.normal(out.ndim):
                raise ValueError(f"destination {name!r} is {layout}, but out= lies as {own}, expected the same")
        if out is not None:
            check_target(name, out)
            if self.rank in layout.mesh.ranks:
                self.outs[name] = out
            elif out.numel() and not isinstance(out, DTensor):
                raise ValueError(
                    f"rank {self.rank} gives out= for {name!r}, whose mesh has the ranks {layout.mesh.ranks}, expected "
                    "none on other ranks"
                )
            if cast:
                dtype, only_floating = out.dtype, False
        self.targets[name] = Target(layout, dtype, only_floating, shape)

    def _layout(self, name: str, where: Any) -> Layout:
        if isinstance(where, Layout):
            return where
        if isinstance(where, DTensor):
            return layout_of_dtensor(where, self._hosts_of(where.device_mesh))
        if isinstance(where, Tensor):
            raise ValueError(
                f"destination {name!r} is a plain tensor of shape {tuple(where.shape)}, expected a DTensor; give a "
                "Layout, or a mesh and placements, and the tensor as out="
            )
        mesh, placements = where
        if isinstance(mesh, Mesh):
            return Layout(mesh, tuple(placements))
        if len(placements) != mesh.ndim:
            raise ValueError(
                f"got {len(placements)} placements {tuple(placements)} for a mesh of {mesh.ndim} axes, expected one "
                "for each; use Replicate() for axes that do nothing"
            )
        self.wrappers[name] = (mesh, tuple(placements))
        return layout_of(mesh, placements, self._hosts_of(mesh))

    def _hosts_of(self, mesh: DeviceMesh) -> dict[int, int]:
        check_ranks(mesh.mesh.reshape(-1).tolist(), self.hosts)
        return self.hosts

    def job(self, options: TransferOptions, *, differentiable: bool) -> tuple[TransferJob, _WayBack | None]:
        """The move of all tensors, and the way back if it is to be differentiated, once all ranks have met."""
        records = torch.is_grad_enabled()
        request = RankRequest(f"{self.asked}: {options}", self.sources, self.targets, recording=records)
        request.writes = bool(self.outs)
        request.gradient = differentiable and records and any(x.requires_grad for x in self.shards.values())
        shards: dict[str, Tensor] = {}
        outs: dict[str, Tensor] = {}
        with self.noting():
            shards = {name: memory_of(tensor) for name, tensor in self.shards.items()}
            outs = {name: memory_of(tensor) for name, tensor in self.outs.items()}
            check_apart(shards, outs)
            request.source_ties, request.target_ties = find_ties(shards), find_ties(outs)
        request.problem = self.problem
        with turn(self.comm.pg, Line.RESHARD.title, Deadline.after(self.comm.timeout)):
            joint = exchange(self.comm, self.ranks, request, self.asked)
            note, written = f"{self.asked} {joint.number}", list(self.outs.values())
            job = TransferJob(
                self.comm, joint.specs, shards, outs, options, device=self.device, note=note, written=written
            )
        if not joint.differentiable:
            return job, None
        return job, _WayBack(self.comm, joint.specs[0], options, self.rank, self.device, joint.number)

    def wrap(self, shards: Mapping[str, Tensor], job: TransferJob) -> dict[str, Tensor]:
        """Results as the user is to have them: the tensors of `out=` where there are some, DTensors on a DeviceMesh."""
        result: dict[str, Tensor] = dict(shards)
        for spec in job.specs:
            own = self.outs.get(spec.name)
            # torch cannot differentiate through the empty DTensor of a rank outside of its mesh.
            if spec.name in self.wrappers and not isinstance(own, DTensor) and job.rank in spec.dst.mesh.ranks:
                mesh, placements = self.wrappers[spec.name]
                result[spec.name] = to_dtensor(shards[spec.name], mesh, placements, spec.shape)
            elif own is not None:
                result[spec.name] = own
        return result


def _is_nothing(tensor: object) -> bool:
    """Whether it is what a reshard returns on a rank outside of its destination."""
    return isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.numel() == 0


@dataclass(frozen=True)
class _WayBack:
    """What the backward pass needs to know of a move. Not the move itself: that holds the result, which holds this.

    number: which call it was, so that ranks which go back in different orders notice
    """

    comm: Group
    spec: TensorSpec
    options: TransferOptions
    rank: int
    device: torch.device
    number: int


def _differentiate(way: _WayBack, source: Tensor | None, move: Callable[[], Tensor]) -> Tensor:
    """What `move` returns, as part of the graph on every rank.

    A rank that has nothing of the source still takes part in the backward pass: an empty tensor that
    requires a gradient ties it to the graph.
    """
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    result: Tensor = _MoveFunction.apply(source, anchor, way, move)  # type: ignore[no-untyped-call]
    return result


class _MoveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor | None, anchor: Tensor, way: _WayBack, move: Callable[[], Tensor]) -> Tensor:
        ctx.way = way
        ctx.nothing = None if source is None else source.new_zeros(source.shape if source.numel() == 0 else 0)
        return move()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        way: _WayBack = ctx.way
        spec = way.spec.gradient
        shard = {spec.name: memory_of(grad).contiguous()} if way.rank in spec.src.mesh.ranks else {}
        note = f"gradient of reshard {way.number}"
        job = TransferJob(way.comm, [spec], shard, {}, way.options, device=way.device, note=note)
        back = job.run()[spec.name]
        if way.spec.src.reduce_op == "avg":
            back = back / way.spec.terms
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # A rank that has nothing of the source may have got it from a reshard, whose backward pass it has to join.
        return back if way.rank in spec.dst.mesh.ranks else ctx.nothing, None, None, None
