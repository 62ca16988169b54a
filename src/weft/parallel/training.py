"""The layers of `weft.packed.training` on the ranks of a group, differentiable.

    split     x [T_r, width] between blocks; all-gather + matmul in, matmul + reduce-scatter out, both overlapped
    whole     x [T, width] on every rank; a matmul in (its gradient is an all-reduce), matmul + all-reduce out

Dropout. All ranks take rank 0's seed of a call. Rows that are split, columns and heads are dropped by each rank on its
own, from the seed and its rank; rows that are whole by all ranks alike. `torch.manual_seed` on rank 0 repeats a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.kernels import PackedWeight, linear
from weft.kernels.matmul import activated
from weft.overlap.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, replicated_matmul
from weft.packed import training
from weft.packed.call import Inputs, Kept
from weft.packed.spec import Embedding, Projection
from weft.parallel.embedding import lookup
from weft.parallel.part import Part
from weft.parallel.share import Share, gather_rows, split_rows


@dataclass(frozen=True, eq=False)
class Noise:
    """Where dropout draws from: `alike` gives the same on all ranks, `own` something else on each."""

    alike: torch.Generator
    own: torch.Generator

    @classmethod
    def of(cls, seed: int, rank: int) -> Noise:
        """Both follow from the seed of a call."""
        alike = torch.Generator().manual_seed(seed)
        seeds = torch.randint(torch.iinfo(torch.int64).max, (rank + 1,), generator=torch.Generator().manual_seed(~seed))
        return cls(alike, torch.Generator().manual_seed(int(seeds[rank])))


def drop(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Dropout that draws from `generator`."""
    if p == 0.0:
        return x
    return x * torch.empty_like(x).bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)


class RankOps:
    """How the matmuls of one call run on this rank."""

    def __init__(self, part: Part, share: Share, noise: Noise | None) -> None:
        self.group, self.share, self._noise = part.model.group, share, noise

    def column(self, projection: Projection, rows: Tensor, *, activation: str | None = None) -> Tensor:
        weight, bias = PackedWeight.from_dense(projection.weight()), projection.bias()
        if self.share.split:
            y = all_gather_matmul(rows, weight, group=self.group, bias=bias, m=self.share.tokens)
        else:
            y = replicated_matmul(rows, weight, group=self.group, bias=bias)
        return y if activation is None else activated(y, activation)

    def row(self, projection: Projection, x: Tensor, *, residual: Tensor, dropout: float) -> Tensor:
        weight = PackedWeight.from_dense(projection.weight())
        run = matmul_reduce_scatter if self.share.split else matmul_all_reduce
        y = run(x, weight, group=self.group, bias=projection.bias())
        return residual + self.drop_rows(y, dropout)

    def drop(self, x: Tensor, p: float) -> Tensor:
        return drop(x, p, self._noise.own) if p and self._noise is not None else x

    def drop_rows(self, rows: Tensor, p: float) -> Tensor:
        """Dropout between blocks."""
        if p == 0.0 or self._noise is None:
            return rows
        return drop(rows, p, self._noise.own if self.share.split else self._noise.alike)

    def seed(self) -> Tensor:
        assert self._noise is not None
        return torch.randint(torch.iinfo(torch.int64).max, (1,), generator=self._noise.own)


def forward(
    part: Part, inputs: Inputs, share: Share, *, noise: Noise | None, drops_attention: bool, kept: Kept
) -> Tensor:
    """The rank's rows of the hidden states after the last layer. Dropout acts where there is `noise`."""
    ops = RankOps(part, share, noise)
    model = part.model.transformer
    x = _embed(part, model.embedding, inputs, ops)
    return training.layers(model, x, training.Call(inputs, noise is not None, drops_attention, kept, ops))


def _embed(part: Part, embedding: Embedding | None, inputs: Inputs, ops: RankOps) -> Tensor:
    share, group = ops.share, ops.group
    if inputs.vectors is not None:
        x = split_rows(inputs.vectors, share, group)
    else:
        assert embedding is not None
        table, ids = embedding.tables[0], inputs.indices[0]
        x = lookup(table, ids, part.model.words, share, group, padding=embedding.padding)
    if embedding is None:
        return x
    for table, index in zip(embedding.tables[1:], inputs.indices[1:], strict=True):
        x = x + F.embedding(share.take(index), table)
    if embedding.norm is not None:
        x = training.norm(embedding.norm, x)
    return ops.drop_rows(x, embedding.dropout)


def logits(part: Part, rows: Tensor, share: Share, *, keep: Tensor | None = None) -> Tensor:
    """[T, V_r], the logits of this rank's words; or [kept, V_r] of the tokens `keep`, which are the same everywhere."""
    head, group = part.model.head, part.model.group
    assert head is not None
    if part.transform is not None:
        t = part.transform
        dense = PackedWeight.from_dense(t.dense.weight())
        rows = training.norm(t.norm, linear(rows, dense, bias=t.dense.bias(), activation=t.activation))
    weight, bias = PackedWeight.from_dense(head.weight()), head.bias()
    if keep is None and share.split:
        return all_gather_matmul(rows, weight, group=group, bias=bias, m=share.tokens)
    whole = gather_rows(rows, share, group)
    return replicated_matmul(whole if keep is None else whole[keep], weight, group=group, bias=bias)
