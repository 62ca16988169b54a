"""How ranks that know only their own side of a reshard learn of the other side.

A trainer knows its shards, an inference engine its own: the first rank that has a side posts what that is, and
all read it. The texts are JSON in the group's store; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.comm import Group
from weft.comm.deadline import Deadline
from weft.comm.rendezvous import Meeting
from weft.errors import PeerMismatch
from weft.layout import Layout, Mesh, ShardSizes
from weft.reshard.units import TensorSpec


@dataclass(frozen=True)
class Source:
    """What a tensor is before the move."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class Target:
    """What it is to become; `dtype` is None for the source's own."""

    layout: Layout
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Known:
    """Both sides, as all ranks know them; `differentiable` if the source requires a gradient on any rank."""

    sources: dict[str, Source]
    targets: dict[str, Target]
    differentiable: bool


def exchange(
    group: Group,
    sources: Mapping[str, Source],
    targets: Mapping[str, Target],
    *,
    requires_grad: bool = False,
    problem: ValueError | None = None,
) -> Known:
    """What the first rank that has sources, and the first that has targets, says of them. Collective.

    A rank with a `problem` raises it here, and all others say what it is.
    """
    deadline = Deadline.after(group.timeout)
    meeting = Meeting(group.pg, "reshard", ("has", "src", "dst"), deadline=deadline, store=None)
    complaint = None if problem is None else str(problem)
    has = meeting.gather("has", [bool(sources), bool(targets), requires_grad, complaint])
    if problem is not None:
        raise problem
    for rank, row in enumerate(has):
        if row[3] is not None:
            raise PeerMismatch(f"rank {rank} refused to reshard: {row[3]}")
    firsts = [next((rank for rank, row in enumerate(has) if row[side]), None) for side in (0, 1)]
    if firsts[0] is None or firsts[1] is None:
        raise ValueError(
            f"no rank has {'a source' if firsts[0] is None else 'a destination'}, expected at least one that gives it"
        )
    if group.rank == firsts[0]:
        meeting.post("src", {name: _source_text(source) for name, source in sources.items()})
    if group.rank == firsts[1]:
        meeting.post("dst", {name: _target_text(target) for name, target in targets.items()})
    (src,), (dst,) = meeting.read("src", [firsts[0]]), meeting.read("dst", [firsts[1]])
    meshes: dict[str, Mesh] = {}
    return Known(
        {name: Source(tuple(row[0]), _dtype(row[1]), _layout(row[2], meshes)) for name, row in src.items()},
        {name: Target(_layout(row[1], meshes), row[0] and _dtype(row[0])) for name, row in dst.items()},
        any(row[2] for row in has),
    )


def join(sources: Mapping[str, Source], targets: Mapping[str, Target]) -> list[TensorSpec]:
    """The tensors of a plan; both sides must name the same ones. Only floating tensors are cast."""
    if sources.keys() != targets.keys():
        only = [sorted(set(a) - set(b))[:5] for a, b in ((sources, targets), (targets, sources))]
        raise ValueError(
            f"sources without a destination: {only[0]}, destinations without a source: {only[1]}; expected the same "
            "names on both sides; leave out what is not to be moved"
        )
    return [
        TensorSpec(name, source.shape, source.dtype, source.layout, targets[name].layout, _final(source, targets[name]))
        for name, source in sources.items()
    ]


def _final(source: Source, target: Target) -> torch.dtype:
    if target.dtype is None or source.dtype.is_floating_point != target.dtype.is_floating_point:
        return source.dtype
    return target.dtype


def _source_text(source: Source) -> list[Any]:
    return [list(source.shape), _dtype_text(source.dtype), _layout_text(source.layout)]


def _target_text(target: Target) -> list[Any]:
    return [None if target.dtype is None else _dtype_text(target.dtype), _layout_text(target.layout)]


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(text: str) -> torch.dtype:
    value = getattr(torch, text, None)
    if not isinstance(value, torch.dtype):
        raise ValueError(f"got the dtype {text!r} from another rank, expected one that this torch has")
    return value


def _layout_text(layout: Layout) -> list[Any]:
    return [str(layout.mesh), [_placement_text(placement) for placement in layout.placements], list(layout.order)]


def _placement_text(placement: object) -> list[Any]:
    if isinstance(placement, ShardSizes):
        return ["sizes", placement.dim, list(placement.sizes)]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    return ["partial", placement.reduce_op] if isinstance(placement, Partial) else ["replicate"]


def _layout(row: list[Any], meshes: dict[str, Mesh]) -> Layout:
    text, placements, order = row
    mesh = meshes.setdefault(text, Mesh.parse(text))
    return Layout(mesh, tuple(_placement(*placement) for placement in placements), tuple(order))


def _placement(kind: str, *rest: Any) -> Any:
    if kind == "sizes":
        return ShardSizes(rest[0], tuple(rest[1]))
    return {"shard": Shard, "partial": Partial, "replicate": Replicate}[kind](*rest)
