"""One rank's part of a model whose parameters are DTensors: differentiable, back to the DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from weft.packed import spec
from weft.parallel.cut import Heads, Run
from weft.parallel.describe import Cuts, Described, Transform, with_tensors
from weft.parallel.exchange import all_sum
from weft.parallel.rank import RankModel, Words
from weft.parallel.realign import realign


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's model, and what its head does to a token first."""

    model: RankModel
    transform: Transform | None


def part_of(described: Described, found: Cuts, group: ProcessGroup, *, split: bool) -> Part:
    """What this rank computes with.

    Where tokens are `split`, each rank has the gradient of its own rows only of a replicated parameter; then all of
    these are added up over ranks in one message, when the backward pass is through.
    """
    leaves = list({id(t): t for t in spec.tensors((described.transformer, described.head)) if id(t) in found}.values())
    held = [_local(t) for t in leaves]
    known = {id(t): local for t, local in zip(leaves, held, strict=True)}
    whole = [t for t in leaves if found[id(t)] is None and t.requires_grad]
    if split and whole:
        summed = _summing([known[id(t)] for t in whole], group)
        known.update((id(t), local) for t, local in zip(whole, summed, strict=True))
    crossing = [(t, cut) for t in leaves if (cut := found[id(t)]) is not None and not cut.is_aligned]
    moved = realign([known[id(t)] for t, _ in crossing], [cut for _, cut in crossing], group)
    known.update((id(t), local) for (t, _), local in zip(crossing, moved, strict=True))
    return _built(described, found, known, group)


def _local(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        raise ValueError("a parameter is no DTensor; it was replaced after parallelize, put a DTensor there instead")
    if parameter.device_mesh.ndim != 1:
        raise ValueError(
            f"a parameter is sharded over {parameter.device_mesh.ndim} mesh axes during a call, expected one; "
            "give the whole model to fully_shard, not its layers: layers are not called one by one"
        )
    return parameter.to_local()


def _built(described: Described, found: Cuts, known: dict[int, Tensor], group: ProcessGroup) -> Part:
    rank, size = group.rank(), group.size()
    local = with_tensors(described, lambda t: known.get(id(t), t))
    transformer = replace(
        local.transformer,
        layers=tuple(_with_heads(layer, rank, size) for layer in local.transformer.layers),
    )
    words = Words(0, 0, 0)
    embedding, head = described.transformer.embedding, described.head
    if embedding is not None or head is not None:
        table = embedding.tables[0] if embedding is not None else cast(Any, head).projection.weights[0]
        run = Run.of(table.shape[0], rank, size)
        words = Words(run.first, run.end, table.shape[0])
    if local.head is None:
        return Part(RankModel(transformer, group, words), None)
    return Part(RankModel(transformer, group, words, local.head.projection), local.head.transform)


def _with_heads(layer: spec.Layer, rank: int, size: int) -> spec.Layer:
    heads = Heads.of(layer.attention, rank, size)
    return replace(layer, attention=replace(layer.attention, heads=heads.queries.count, kv_heads=heads.keys.count))


def _summing(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    return list(_Summing.apply(group, *tensors))  # type: ignore[no-untyped-call]


class _Summing(torch.autograd.Function):
    """The same tensors; their gradients are sums over ranks. It runs once, when all of them are there."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat = torch.cat([g.reshape(-1) for g in grads])
        total = all_sum(ctx.group, flat, what=f"gradients of {len(grads)} replicated parameters, {flat.numel()}")
        parts = torch.split(total, [g.numel() for g in grads])
        return None, *(part.view_as(g) for part, g in zip(parts, grads, strict=True))
