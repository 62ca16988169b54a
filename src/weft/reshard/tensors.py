"""Users' tensors: the layouts of DTensors, and what memory must be like before a byte moves and is told afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from weft._torch import (
    has_memory,
    is_faking,
    is_tracing,
    is_wrapper,
    local_tensor,
    settled,
    shard_order,
    strided_shard,
    strides_are_order,
)
from weft.kernels.freshness import written
from weft.layout import Layout, Mesh

StridedShard = strided_shard()
Tie = tuple[str, str]
"""Two names of one memory, such as those of tied weights."""


def mesh_of(device_mesh: DeviceMesh, hosts: Mapping[int, int]) -> Mesh:
    """The mesh of a DeviceMesh; `hosts` says on which host each rank is (see `weft.comm.Group.hosts`)."""
    ranks = device_mesh.mesh.numpy()
    names = device_mesh.mesh_dim_names or ()
    return Mesh.of(ranks, hosts=np.vectorize(hosts.__getitem__, otypes=[np.int64])(ranks), axes=names)


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


def memory_of(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor or DTensor, without its graph; a collective that still writes it is waited for.

    What is not its memory as it stands (zeros without any, conjugates and negatives that are yet to be computed) is
    made.
    """
    local = settled(local_tensor(tensor)).detach().resolve_conj().resolve_neg()
    return local if has_memory(local) else local.clone()


def check_mode() -> None:
    """Raises where torch only pretends to compute: nothing can be sent then, and nothing would be recorded."""
    if is_tracing():
        raise ValueError("reshard was called inside torch.jit.trace, which cannot record it; trace the parts around it")
    if is_faking():
        raise ValueError("reshard was called with fake tensors, which have nothing to be sent; call it outside")


def check_source(name: str, tensor: object) -> None:
    """Raises unless bytes can be read from a tensor and the result is all that there is to it."""
    local = _check(name, tensor)
    if unpack_dual(local).tangent is not None:  # type: ignore[no-untyped-call]
        raise ValueError(
            f"tensor {name!r} has a tangent, expected none: reshard has no forward-mode derivative; use backward()"
        )


def check_target(name: str, tensor: object) -> None:
    """Raises unless bytes can be written into a tensor, each to a place of its own."""
    local = _check(name, tensor)
    assert isinstance(tensor, Tensor)
    if _overlaps_itself(local):
        raise ValueError(
            f"destination {name!r} has strides {local.stride()} for shape {tuple(local.shape)}: several elements share "
            "memory, expected a place for each; give a clone()"
        )
    if local.is_conj() or local.is_neg():
        raise ValueError(f"destination {name!r} is a conjugate or negative of its memory, expected the memory itself")
    if tensor.requires_grad and not tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            f"destination {name!r} is the result of operations that are recorded for gradients, expected one that is "
            "not; what is written into it has no gradient: give detach() of it, or call under torch.no_grad()"
        )


def _check(name: str, tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}, expected a tensor; leave it out")
    local = settled(local_tensor(tensor))
    strange = {
        "is sparse or nested": local.layout != torch.strided,
        "is on the meta device": local.is_meta,
        "is quantised": local.is_quantized,
        f"is a {type(local).__name__}, or wrapped by torch.func": is_wrapper(local),
    }
    for what, found in strange.items():
        if found:
            raise ValueError(f"tensor {name!r} {what}, expected a plain tensor with memory of its own")
    return local


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory: True in doubt, which only tensors made with `as_strided` leave."""
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def find_ties(tensors: Mapping[str, Tensor]) -> list[Tie]:
    """Names whose tensors are the very same elements of one memory, each with the first name of it.

    >>> x = torch.zeros(4, 4)
    >>> find_ties({"a": x, "b": torch.zeros(4), "c": x, "d": x[:, :2]})
    [('a', 'c')]
    """
    first: dict[Any, str] = {}
    ties = []
    for name, tensor in tensors.items():
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if first.setdefault(key, name) != name:
                ties.append((first[key], name))
    return ties


def check_apart(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Raises where a destination lies in memory of a source, which is read after it was written, or of another one.

    Destinations that are wholly the same are left to `describe.join`, which knows whether their sources are too.
    """
    again = {name for _, name in find_ties(targets)}
    parts = [(tensor.device, *_span(tensor), name, False) for name, tensor in sources.items() if tensor.numel()]
    parts += [(t.device, *_span(t), n, True) for n, t in targets.items() if t.numel() and n not in again]
    ends: dict[tuple[torch.device, bool], tuple[int, str]] = {}
    for device, start, end, name, is_target in sorted(parts, key=lambda part: (str(part[0]), part[1])):
        for other_is_target in (True, False):
            last, other = ends.get((device, other_is_target), (0, ""))
            if start < last and (is_target or other_is_target):
                kinds = ["destination" if each else "source" for each in (is_target, other_is_target)]
                raise ValueError(
                    f"{kinds[0]} {name!r} lies in the same memory as {kinds[1]} {other!r}, expected memory of its own "
                    "for each destination; leave out= away, or clone() one"
                )
        if end > ends.get((device, is_target), (0, ""))[0]:
            ends[device, is_target] = (end, name)


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Says that bytes were written into tensors by ways that torch does not see: its counts of versions go up.

    Of a DTensor both counts: some look at the wrapper, others at the shard inside. Keepers of packed copies are told.
    """
    marked = list(tensors)
    for tensor in marked:
        torch.autograd.graph.increment_version(tensor)
        if isinstance(tensor, DTensor):
            torch.autograd.graph.increment_version(local_tensor(tensor))
    written(marked)
