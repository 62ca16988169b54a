"""Moves rows of parameters from the ranks that store them to those that compute with them, and gradients back.

A DTensor is stored in equal chunks; attention needs whole heads. Where the two cuts differ, as for heads that the
ranks do not divide or for a fused q, k, v, the rows in question travel:

    c_attn of 2 heads, 2 ranks        stored   q0 q1 k0 | k1 v0 v1
                                      needed   q0 k0 v0 | q1 k1 v1        q1, v0 move; k0, k1 shift

All such tensors of a model travel in one message for each pair of ranks. Each row is stored once and needed once, so
the gradient is the same move backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.parallel.cut import Run
from weft.parallel.exchange import exchange


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut along `dim`: rank r computes with the runs `needed[r]`, one after the other.

    >>> Cut.chunks(0, 10, 4).is_aligned
    True
    """

    dim: int
    total: int
    needed: tuple[tuple[Run, ...], ...]

    @classmethod
    def chunks(cls, dim: int, total: int, size: int) -> Cut:
        """What is needed is what is stored."""
        return cls(dim, total, tuple((Run.of(total, r, size),) for r in range(size)))

    @property
    def size(self) -> int:
        return len(self.needed)

    def stored(self, rank: int) -> Run:
        """What a rank stores: a chunk."""
        return Run.of(self.total, rank, self.size)

    @property
    def is_aligned(self) -> bool:
        """Whether every rank computes with what it stores."""
        return all(runs == (self.stored(r),) for r, runs in enumerate(self.needed))

    def count(self, rank: int) -> int:
        """How many rows a rank computes with."""
        return sum(run.count for run in self.needed[rank])


@dataclass(frozen=True)
class Move:
    """`count` rows from row `start` of what `source` stores to row `at` of what `target` computes with."""

    source: int
    target: int
    start: int
    at: int
    count: int


def moves(cut: Cut) -> list[Move]:
    """Every row's way, its own rank's too.

    >>> cut = Cut(0, 6, ((Run(0, 1), Run(2, 3), Run(4, 5)), (Run(1, 2), Run(3, 4), Run(5, 6))))
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


def realign(stored: Sequence[Tensor], cuts: Sequence[Cut], group: ProcessGroup) -> list[Tensor]:
    """What this rank computes with, of several tensors of which it stores a chunk; differentiable."""
    if not stored:
        return []
    return list(_Realign.apply(tuple(cuts), group, *stored))  # type: ignore[no-untyped-call]


class _Realign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cuts: tuple[Cut, ...], group: ProcessGroup, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.cuts, ctx.group = cuts, group
        sizes = [cut.count(group.rank()) for cut in cuts]
        return _moved(stored, cuts, sizes, group, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sizes = [cut.stored(ctx.group.rank()).count for cut in ctx.cuts]
        return None, None, *_moved(grads, ctx.cuts, sizes, ctx.group, back=True)


def _moved(
    tensors: Sequence[Tensor], cuts: Sequence[Cut], sizes: list[int], group: ProcessGroup, *, back: bool
) -> tuple[Tensor, ...]:
    """Tensors of `sizes` along the dims of their cuts, filled with rows from everywhere."""
    rank, ranks = group.rank(), range(group.size())
    results = [_resized(t, c.dim, s) for t, c, s in zip(tensors, cuts, sizes, strict=True)]
    leaving: list[list[Tensor]] = [[] for _ in ranks]
    coming: list[list[Tensor]] = [[] for _ in ranks]
    for tensor, result, cut in zip(tensors, results, cuts, strict=True):
        for move in moves(cut):
            here, there = (move.target, move.source) if back else (move.source, move.target)
            begin, at = (move.at, move.start) if back else (move.start, move.at)
            if here == rank:
                leaving[there].append(tensor.narrow(cut.dim, begin, move.count))
            if there == rank:
                coming[here].append(result.narrow(cut.dim, at, move.count))
    outgoing = [_flat(parts, tensors[0]) for parts in leaving]
    incoming = [tensors[0].new_empty(sum(p.numel() for p in parts)) for parts in coming]
    what = f"realign {'gradients' if back else 'weights'} of {len(cuts)} tensors"
    exchange(group, outgoing, incoming, what=what)
    for parts, data in zip(coming, incoming, strict=True):
        for part, piece in zip(parts, torch.split(data, [p.numel() for p in parts]), strict=True):
            part.copy_(piece.view(part.shape))
    return tuple(results)


def _resized(like: Tensor, dim: int, size: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = size
    return like.new_empty(shape)


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parts]) if parts else like.new_empty(0)
