"""What one rank computes with, of a model whose parameters are DTensors: differentiable, back to the DTensors.

A DTensor is stored in equal chunks; attention needs whole heads. Where the two cuts differ, as for heads that the
ranks do not divide or for a fused q, k, v, rows travel from the ranks that store them to those that compute with them:

    c_attn of 2 heads, 2 ranks        stored   q0 q1 k0 | k1 v0 v1
                                      needed   q0 k0 v0 | q1 k1 v1        q1, v0 move; k0, k1 shift

All such tensors of a model travel in one message for each pair of ranks. Each row is stored once, so the gradient is
the same move backwards; of a row that several ranks computed with, theirs are added up in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from weft.models.spec import Attention, Layer, ModelSpec, tensors, with_tensors
from weft.parallel.cut import Cuts, Heads, TensorCut
from weft.transformer.exchange import all_sum, exchange
from weft.transformer.parts import RankModel, Words


def rank_model_of(model: ModelSpec, found: Cuts, group: ProcessGroup, *, split: bool) -> RankModel:
    """What this rank computes with.

    Where tokens are `split`, each rank has the gradient of its own rows only of a replicated parameter; then all of
    these are added up over ranks in one message, when the backward pass is through. Of norms of heads it has the
    gradient of its own heads only, split or not.
    """
    leaves = list({id(t): t for t in tensors(model) if id(t) in found}.values())
    held = [_local(t) for t in leaves]
    known = {id(t): local for t, local in zip(leaves, held, strict=True)}
    by_head = {id(t) for layer in model.transformer.layers for t in _of_heads(layer.attention)}
    whole = [t for t in leaves if found[id(t)] is None and t.requires_grad and (split or id(t) in by_head)]
    if whole:
        summed = _summing([known[id(t)] for t in whole], group)
        known.update((id(t), local) for t, local in zip(whole, summed, strict=True))
    crossing = [(t, cut) for t in leaves if (cut := found[id(t)]) is not None and not cut.is_aligned]
    moved = realign([known[id(t)] for t, _ in crossing], [cut for _, cut in crossing], group)
    known.update((id(t), local) for (t, _), local in zip(crossing, moved, strict=True))
    return _built(model, known, group)


def _of_heads(attention: Attention) -> list[Tensor]:
    """Replicated parameters that every rank uses for its own heads."""
    return list(tensors((attention.q_norm, attention.k_norm)))


def _local(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        raise ValueError("a parameter is not a DTensor; it was replaced after parallelize, put a DTensor there instead")
    if parameter.device_mesh.ndim != 1:
        raise ValueError(
            f"a parameter is sharded over {parameter.device_mesh.ndim} mesh axes during a call, expected one; "
            "give the whole model to fully_shard, not its layers: layers are not called one by one"
        )
    return parameter.to_local()


def _built(model: ModelSpec, known: dict[int, Tensor], group: ProcessGroup) -> RankModel:
    rank, size = group.rank(), group.size()
    local = with_tensors(model, lambda t: known.get(id(t), t))
    layers = tuple(_with_heads(layer, rank, size) for layer in local.transformer.layers)
    words = 0
    if model.transformer.embedding is not None:
        words = model.transformer.embedding.tables[0].shape[0]
    elif model.head is not None:
        words = model.head.projection.weights[0].shape[0]
    own = RankModel(replace(local.transformer, layers=layers), group, Words.of(words, rank, size))
    head = local.head
    return own if head is None else replace(own, head=head.projection, transform=head.transform, cap=head.cap)


def _with_heads(layer: Layer, rank: int, size: int) -> Layer:
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


# Rows that move --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """`count` rows from row `start` of what `source` stores to row `at` of what `target` computes with."""

    source: int
    target: int
    start: int
    at: int
    count: int


def moves(cut: TensorCut) -> list[Move]:
    """Every row's way, its own rank's too.

    >>> from weft.transformer.parts import IndexRun
    >>> one_each = [IndexRun(i, i + 1) for i in range(6)]
    >>> cut = TensorCut(0, 6, (tuple(one_each[::2]), tuple(one_each[1::2])))
    >>> [(m.source, m.target, m.start, m.at) for m in moves(cut)]
    [(0, 0, 0, 0), (0, 0, 2, 1), (1, 0, 1, 2), (0, 1, 1, 0), (1, 1, 0, 1), (1, 1, 2, 2)]
    """
    found = []
    for target, runs in enumerate(cut.needed):
        at = 0
        for run in runs:
            for source in range(cut.size):
                stored = cut.stored(source)
                first, end = max(run.first, stored.first), min(run.end, stored.end)
                if first < end:
                    found.append(Move(source, target, first - stored.first, at + first - run.first, end - first))
            at += run.count
    return found


def realign(stored: Sequence[Tensor], cuts: Sequence[TensorCut], group: ProcessGroup) -> list[Tensor]:
    """What this rank computes with, of several tensors of which it stores a chunk; differentiable."""
    if not stored:
        return []
    return list(_Realign.apply(tuple(cuts), group, *stored))  # type: ignore[no-untyped-call]


class _Realign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cuts: tuple[TensorCut, ...], group: ProcessGroup, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.cuts, ctx.group = cuts, group
        sizes = [cut.count(group.rank()) for cut in cuts]
        return _moved(stored, cuts, sizes, group, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sizes = [cut.stored(ctx.group.rank()).count for cut in ctx.cuts]
        return None, None, *_moved(grads, ctx.cuts, sizes, ctx.group, back=True)


def _moved(
    tensors: Sequence[Tensor], cuts: Sequence[TensorCut], sizes: list[int], group: ProcessGroup, *, back: bool
) -> tuple[Tensor, ...]:
    """Tensors of `sizes` along the dims of their cuts, filled with rows from everywhere; those that come `back` from
    several ranks are sums, in float32 on the way."""
    rank, ranks = group.rank(), range(group.size())
    added = [back and cut.has_copies for cut in cuts]
    results = [_resized(t, c.dim, s, sums=a) for t, c, s, a in zip(tensors, cuts, sizes, added, strict=True)]
    leaving: list[list[Tensor]] = [[] for _ in ranks]
    coming: list[list[tuple[Tensor, bool]]] = [[] for _ in ranks]
    for tensor, result, cut, sums in zip(tensors, results, cuts, added, strict=True):
        for move in moves(cut):
            here, there = (move.target, move.source) if back else (move.source, move.target)
            begin, at = (move.at, move.start) if back else (move.start, move.at)
            if here == rank:
                leaving[there].append(tensor.narrow(cut.dim, begin, move.count))
            if there == rank:
                coming[here].append((result.narrow(cut.dim, at, move.count), sums))
    outgoing = [_flat(parts, tensors[0]) for parts in leaving]
    incoming = [tensors[0].new_empty(sum(p.numel() for p, _ in parts)) for parts in coming]
    what = f"realign {'gradients' if back else 'weights'} of {len(cuts)} tensors"
    exchange(group, outgoing, incoming, what=what)
    for parts, data in zip(coming, incoming, strict=True):  # in the order of ranks
        for (part, sums), piece in zip(parts, torch.split(data, [p.numel() for p, _ in parts]), strict=True):
            (part.add_ if sums else part.copy_)(piece.view(part.shape))
    return tuple(result.to(t.dtype) for result, t in zip(results, tensors, strict=True))


def _resized(like: Tensor, dim: int, size: int, *, sums: bool) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_zeros(shape, dtype=torch.float32) if sums else like.new_empty(shape)


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parts]) if parts else like.new_empty(0)
