"""Resharding in plain torch, in one process, with all shards at hand: what the executor is compared with.

Shards are cut with `torch.chunk` and `torch.split`, not with `weft.layout`, so that it checks that too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from weft.layout import Layout, ShardSizes
from weft.reshard.spec import TensorSpec


def shard(whole: Tensor, layout: Layout) -> dict[int, Tensor]:
    """The shard of each rank, as views of `whole`; a Partial axis does not cut.

    >>> from weft.layout import Mesh
    >>> pieces = shard(torch.arange(5), Layout(Mesh.grid(1, 2), [Shard(0), Shard(0)]))
    >>> pieces[1]
    tensor([3, 4])
    """
    # By the coordinates along the axes so far, in the order in which they cut.
    parts: dict[tuple[int, ...], Tensor] = {(): whole}
    for axis in layout.order:
        parts = {
            (*place, i): piece for place, part in parts.items() for i, piece in enumerate(_cut(part, layout, axis))
        }
    ranks = layout.mesh.array.transpose(layout.order)
    return {int(ranks[place]): part for place, part in parts.items()}


def _cut(part: Tensor, layout: Layout, axis: int) -> list[Tensor]:
    placement, count = layout.placements[axis], layout.mesh.shape[axis]
    if isinstance(placement, ShardSizes):
        return list(torch.split(part, list(placement.sizes), dim=placement.dim))
    if isinstance(placement, Shard):
        pieces = list(torch.chunk(part, count, dim=placement.dim))
        return pieces + [part.narrow(placement.dim, 0, 0)] * (count - len(pieces))
    return [part] * count


def reshard_reference(spec: TensorSpec, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The destination's shard of each rank, from the source's.

    Each element is read from the first rank that holds its term; terms are reduced in the order of the mesh.
    """
    terms = spec.src.holders(len(spec.shape)).shape[1]
    total: Tensor | None = None
    for term in range(terms):
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        places = shard(whole, spec.src)
        for cell in spec.src.holders(len(spec.shape))[:, term, :]:
            places[int(cell[0])].copy_(shards[int(cell[0])])
        total = whole if total is None else _reduce(total, whole, spec.src.reduce_op)
    assert total is not None
    if spec.src.reduce_op == "avg":
        total = total / terms
    return {rank: part.to(spec.dst_dtype) for rank, part in shard(total, spec.dst).items()}


def _reduce(total: Tensor, term: Tensor, op: str | None) -> Tensor:
    if op in ("max", "min"):
        return torch.maximum(total, term) if op == "max" else torch.minimum(total, term)
    return total * term if op == "product" else total + term
