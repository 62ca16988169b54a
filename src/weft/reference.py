"""The plain twins: what each promise computes, in ordinary torch and without it. Slow, and obviously right.

    overlap    `all_gather_matmul` and its kin: the matmul, then the collective; same arguments, shapes and gradients
    reshard    `shard` and `reshard_reference`: one process that has all shards
    pipeline   `step_reference` and `forward_reference`: all stages in one process, micro-batch by micro-batch
    packed     `packed_attention`: sequence by sequence

Values agree closely, not to the bit: torch's matmul sums in another order. Torch's own collectives want even
shards, so these send uneven ones rank to rank. Shards are cut with `torch.chunk` and `torch.split`, not with
`weft.layout`, so that comparisons check that, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor.placement_types import Shard

from weft.kernels.cpu_attention import drop_below
from weft.layout import Layout, ShardSizes
from weft.packed.batch import PackedBatch
from weft.pipeline.run.microbatch import seed_of, seeded, split_arguments, split_batch, split_keywords
from weft.pipeline.run.stage import LossFn
from weft.pipeline.schedules.graph import StageGraph, chain
from weft.reshard.spec import TensorSpec


def _apply(function: Any, *args: object) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def all_gather_matmul(
    x_shard: Tensor, w: Tensor, *, group: ProcessGroup, bias: Tensor | None = None, m: int | None = None
) -> Tensor:
    """[m_r, K], [N, K] -> [M, N]"""
    total = x_shard.shape[0] * group.size() if m is None else m
    return torch.nn.functional.linear(_apply(_AllGather, x_shard, total, group), w, bias)


def matmul_reduce_scatter(x: Tensor, w_shard: Tensor, *, group: ProcessGroup, bias: Tensor | None = None) -> Tensor:
    """[M, K_r], [N, K_r] -> [m_r, N]"""
    y = _apply(_ReduceScatter, x @ w_shard.t(), group)
    return y if bias is None else y + bias


def matmul_all_reduce(x: Tensor, w_shard: Tensor, *, group: ProcessGroup, bias: Tensor | None = None) -> Tensor:
    """[M, K_r], [N, K_r] -> [M, N]"""
    y = _apply(_AllReduce, x @ w_shard.t(), group)
    return y if bias is None else y + bias


def matmul_all_to_all(
    x: Tensor, w: Tensor, destinations: Tensor, *, group: ProcessGroup, bias: Tensor | None = None
) -> Tensor:
    """[M, K], [N, K], [M] -> [R, N]"""
    order = torch.argsort(destinations, stable=True)
    counts = torch.bincount(destinations, minlength=group.size()).tolist()
    return _apply(_AllToAll, torch.nn.functional.linear(x, w, bias)[order], counts, group)


def _shards(whole: Tensor, ranks: int) -> list[Tensor]:
    """The rows of each rank, views; ranks for which torch has no chunk have no rows."""
    pieces = list(torch.chunk(whole, ranks))
    return pieces + [whole[:0]] * (ranks - len(pieces))


def _gather_rows(shard: Tensor, total: int, group: ProcessGroup) -> Tensor:
    whole = shard.new_empty(total, *shard.shape[1:])
    _exchange([shard.contiguous()] * group.size(), _shards(whole, group.size()), group)
    return whole


def _scatter_sum(whole: Tensor, group: ProcessGroup) -> Tensor:
    shards = [shard.contiguous() for shard in _shards(whole, group.size())]
    parts = [torch.empty_like(shards[group.rank()]) for _ in shards]
    _exchange(shards, parts, group)
    return torch.stack([part.float() for part in parts]).sum(0).to(whole.dtype)


def _exchange(outgoing: list[Tensor], incoming: list[Tensor], group: ProcessGroup) -> None:
    """outgoing[r] goes to rank r, incoming[r] comes from it."""
    works = []
    for peer in range(group.size()):
        if peer == group.rank():
            incoming[peer].copy_(outgoing[peer])
            continue
        if incoming[peer].numel():
            works.append(dist.irecv(incoming[peer], group=group, group_src=peer))
        if outgoing[peer].numel():
            works.append(dist.isend(outgoing[peer], group=group, group_dst=peer))
    for work in works:
        assert work is not None
        work.wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_rows(shard, total, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _scatter_sum(grads[0], ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.total = group, whole.shape[0]
        return _scatter_sum(whole, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gather_rows(grads[0], ctx.total, ctx.group), None


class _AllReduce(torch.autograd.Function):
    """The sum is one value that all ranks hold, and so is its gradient: nothing to communicate on the way back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.float()
        dist.all_reduce(total, group=group)
        return total.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
        theirs = [torch.zeros(1, dtype=torch.int64) for _ in counts]
        _exchange([torch.tensor([count]) for count in counts], theirs, group)
        ctx.group, ctx.counts, ctx.theirs = group, counts, [int(count) for count in theirs]
        return _swap(rows, counts, ctx.theirs, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _swap(grads[0], ctx.theirs, ctx.counts, ctx.group), None, None


def _swap(rows: Tensor, counts: list[int], theirs: list[int], group: ProcessGroup) -> Tensor:
    incoming = [rows.new_empty(count, rows.shape[1]) for count in theirs]
    _exchange([part.contiguous() for part in torch.split(rows, counts)], incoming, group)
    return torch.cat(incoming)


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


def step_reference(
    modules: Sequence[nn.Module],
    batch: Any,
    targets: Any,
    *,
    microbatches: int,
    loss_fn: LossFn,
    graph: StageGraph | None = None,
    loss_scale: float = 1.0,
    seed: int | None = None,
    step: int = 0,
    **keywords: Any,
) -> Tensor:
    """The losses [micro-batches] of `Pipeline.step`, and its gradients in the modules.

    >>> layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    >>> step_reference(layers, torch.ones(4, 2), torch.ones(4, 1), microbatches=2, loss_fn=nn.functional.mse_loss).shape
    torch.Size([2])
    """
    graph = chain(len(modules)) if graph is None else graph
    words = split_keywords(keywords, microbatches)
    goals = split_batch(targets, microbatches, "targets")
    parts = split_arguments(batch, microbatches)
    losses = []
    for i in range(microbatches):
        seeds = [None if seed is None else seed_of(seed, step, stage, i) for stage in range(len(modules))]
        output = forward_reference(modules, parts[i], graph=graph, seeds=seeds, keywords=words[i])
        with seeded(seeds[-1]):
            loss = loss_fn(output, goals[i])
        torch.autograd.backward(loss * (loss_scale / microbatches))
        losses.append(loss.detach())
    return torch.stack(losses)


def forward_reference(
    modules: Sequence[nn.Module],
    args: tuple[Any, ...],
    *,
    graph: StageGraph,
    seeds: Sequence[int | None],
    keywords: Mapping[str, Any],
) -> Any:
    """One micro-batch through all stages; the result of the last one."""
    made: dict[tuple[int, str], Tensor] = {}
    result: Any = None
    for stage, module in enumerate(modules):
        inputs = {edge.tensor: made[edge.source, edge.tensor] for edge in graph.into(stage)}
        with seeded(seeds[stage]):
            if len(inputs) <= 1:
                result = module(*(inputs.values() or args), **keywords)
            else:
                result = module(**inputs, **keywords)
        if isinstance(result, Tensor) and (names := {edge.tensor for edge in graph.out_of(stage)}):
            result = {names.pop(): result}
        if graph.out_of(stage):
            made |= {(stage, name): tensor for name, tensor in result.items()}
    return result


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    *,
    keys: PackedBatch | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """See `weft.packed.packed_attention`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lengths = batch.lengths.tolist(), (keys or batch).lengths.tolist()
    parts = ((q, lengths[0]), (k, lengths[1]), (v, lengths[1]))
    outputs = []
    first = 0
    for qs, ks, vs in zip(*(torch.split_with_sizes(t, n) for t, n in parts), strict=True):
        group = q.shape[1] // k.shape[1]
        ks, vs = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (ks, vs))
        scores = scale * qs.transpose(0, 1) @ ks.transpose(1, 2)  # [H, queries, keys]
        distance = _distances(qs.shape[0], ks.shape[1])
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None].to(scores.dtype) * distance.abs()
        if relative_bias is not None:
            reach = relative_bias.shape[1] // 2
            scores = scores + relative_bias[:, distance.clamp(-reach, reach) + reach]
        seen = _seen(distance, causal, window)
        scores = scores.masked_fill(~seen, float("-inf"))
        # A query that sees nothing gets zeros, and no NaN enters its gradient.
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
        weights = scores.softmax(-1) * seen
        if dropout and seed is not None:
            weights = weights * kept(int(seed), q.shape[1], first, qs.shape[0], ks.shape[1], dropout) / (1 - dropout)
        first += qs.shape[0]
        outputs.append((weights @ vs).transpose(0, 1))
    return torch.cat(outputs) if outputs else q.clone()


def kept(seed: int, heads: int, first: int, queries: int, keys: int, dropout: float) -> Tensor:
    """Which weights [heads, queries, keys] dropout leaves. `first` is the place of the first query in the batch."""
    low, high = seed % 2**32, seed // 2**32 % 2**32
    of_head = _mixed(low ^ _times(torch.arange(heads), 0x9E3779B1), high)[:, None]
    one = _mixed((of_head + _times(first + torch.arange(queries), 0x85EBCA77)) % 2**32, high)
    two = _mixed(one ^ high, of_head)
    hashed = _mixed((one[..., None] + _times(torch.arange(keys), 0x9E3779B1)) % 2**32, two[..., None])
    return hashed >= drop_below(dropout)


def _times(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32 for x below 2^32, in halves, as the product of both would not fit."""
    return ((x >> 16) * factor % 2**16 * 2**16 + (x % 2**16) * factor) % 2**32


def _mixed(x: Tensor, between: Tensor | int) -> Tensor:
    """The hash of csrc/isa/dropout.h."""
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15) ^ between, 0x846CA68B)
    return x ^ (x >> 16)


def _distances(queries: int, keys: int) -> Tensor:
    """key - query [queries, keys], the last query level with the last key."""
    return torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)


def _seen(distance: Tensor, causal: bool, window: tuple[int, int] | None) -> Tensor:
    seen = torch.ones_like(distance, dtype=torch.bool)
    left, right = (-1, -1) if window is None else window
    if causal:
        right = 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen
