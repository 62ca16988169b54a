"""The layers of `weft.transformer.training` on the ranks of a group.

    split     x [T_r, width] between blocks; all-gather + matmul in, matmul + reduce-scatter out, both overlapped
    whole     x [T, width] on every rank; a matmul in (its gradient is an all-reduce), matmul + all-reduce out

Dropout. All ranks take rank 0's seed of a call. Rows that are split, columns and heads are dropped by each rank on its
own, from the seed and its rank; rows that are whole by all ranks alike. `torch.manual_seed` on rank 0 repeats a run.

Cross-entropy of logits whose columns the ranks share; they are never gathered.

    logits_r [T, V_r], targets [T]     -> the sum of losses over counted targets, the same on all ranks
    forward   lse_r = log sum exp(logits_r), and the target's logit where this rank has it: [2, T] travel
              loss = sum over counted t of (log sum_r exp(lse_r[t]) - logit[t, target])
    dgrad     dlogits_r = (exp(logits_r - lse) - one_hot(target)) dloss, 0 where the target is not counted

Beside the logits there is one array of their size, the gradient, and in the forward none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.kernels import PackedWeight, linear
from weft.kernels.matmul import activated
from weft.models.spec import Embedding, Projection
from weft.overlap.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, replicated_matmul
from weft.packed.inputs import IGNORED_LABEL
from weft.transformer.exchange import gather, gather_rows, lookup, split_rows
from weft.transformer.parts import RankModel, Share, Words, capped
from weft.transformer.training import norm

_BLOCK_ELEMENTS = 1 << 20  # of logits that are widened and exponentiated at once


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
    """How one call runs on this rank. Dropout acts where there is `noise`."""

    def __init__(self, model: RankModel, share: Share, noise: Noise | None = None) -> None:
        self.group, self.share = group_of(model), share
        self._words, self._noise = model.words, noise

    def words(self, embedding: Embedding, ids: Tensor) -> Tensor:
        return lookup(embedding.tables[0], ids, self._words, self.share, self.group, padding=embedding.padding)

    def rows(self, vectors: Tensor) -> Tensor:
        return split_rows(vectors, self.share, self.group)

    def take(self, index: Tensor) -> Tensor:
        return self.share.take(index)

    def column(self, projection: Projection, rows: Tensor, *, activation: str | None = None) -> Tensor:
        weight, bias = PackedWeight.from_dense(projection.weight()), projection.bias()
        if self.share.split:
            y = all_gather_matmul(rows, weight, group=self.group, bias=bias, m=self.share.tokens)
        else:
            y = replicated_matmul(rows, weight, group=self.group, bias=bias)
        return y if activation is None else activated(y, activation)

    def row(self, projection: Projection, x: Tensor, *, residual: Tensor | None, dropout: float) -> Tensor:
        weight = PackedWeight.from_dense(projection.weight())
        run = matmul_reduce_scatter if self.share.split else matmul_all_reduce
        y = run(x, weight, group=self.group, bias=projection.bias())
        y = self.drop_rows(y, dropout)
        return y if residual is None else residual + y

    def drop(self, x: Tensor, p: float) -> Tensor:
        return drop(x, p, self._noise.own) if p and self._noise is not None else x

    def drop_rows(self, rows: Tensor, p: float) -> Tensor:
        if p == 0.0 or self._noise is None:
            return rows
        return drop(rows, p, self._noise.own if self.share.split else self._noise.alike)

    def seed(self) -> Tensor:
        assert self._noise is not None
        return torch.randint(torch.iinfo(torch.int64).max, (1,), generator=self._noise.own)


def group_of(model: RankModel) -> ProcessGroup:
    """The group that shares a model, which has one."""
    assert model.group is not None
    return model.group


def logits(model: RankModel, rows: Tensor, share: Share, *, keep: Tensor | None = None) -> Tensor:
    """[T, V_r], the logits of this rank's words; or [kept, V_r] of the tokens `keep`, which are the same everywhere."""
    head, group = model.head, group_of(model)
    assert head is not None
    if model.transform is not None:
        t = model.transform
        dense = PackedWeight.from_dense(t.dense.weight())
        rows = norm(t.norm, linear(rows, dense, bias=t.dense.bias(), activation=t.activation))
    weight, bias = PackedWeight.from_dense(head.weight()), head.bias()
    if keep is None and share.split:
        return capped(all_gather_matmul(rows, weight, group=group, bias=bias, m=share.tokens), model.cap)
    whole = gather_rows(rows, share, group)
    return capped(replicated_matmul(whole if keep is None else whole[keep], weight, group=group, bias=bias), model.cap)


def cross_entropy(
    logits: Tensor, targets: Tensor, words: Words, *, group: ProcessGroup, items: Tensor | float | None = None
) -> Tensor:
    """The mean over targets [T] that are not -100, or their sum over `items`; logits [T, V_r] are of `words`.

    As Hugging Face counts: without a counted target the mean is nan.
    """
    count = (targets != IGNORED_LABEL).sum() if items is None else items
    summed: Tensor = _CrossEntropy.apply(logits, targets, words, group)  # type: ignore[no-untyped-call]
    return summed / count


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Raises unless each is a word or -100."""
    counted = targets[targets != IGNORED_LABEL]
    if counted.numel():
        low, high = (int(v) for v in counted.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"labels: got {low} to {high}, expected 0 to {vocabulary - 1}, or {IGNORED_LABEL} for none"
            )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, words: Words, group: ProcessGroup) -> Tensor:
        tokens = logits.shape[0]
        own = ((targets >= words.first) & (targets < words.end)).nonzero().squeeze(1)
        columns = targets[own] - words.first
        mine = logits.new_zeros(2, tokens, dtype=torch.float32)
        for part in _blocks(logits):
            mine[0, part] = logits[part].float().logsumexp(1)
        mine[1, own] = logits[own, columns].float()
        parts = torch.stack(gather(group, mine, what=f"loss of {tokens} tokens"))
        lse, hit = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)  # one rank has the target, the others 0
        counted = targets != IGNORED_LABEL
        ctx.save_for_backward(logits, lse, counted, own, columns)
        return torch.where(counted, lse - hit, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, lse, counted, own, columns = ctx.saved_tensors
        scale = (counted * grads[0]).float()
        out = torch.empty_like(logits)
        for part in _blocks(logits):
            block = out[part] if out.dtype == torch.float32 else logits[part].float()
            torch.sub(logits[part], lse[part, None], out=block)
            block.exp_().mul_(scale[part, None])
            if out.dtype != torch.float32:
                out[part] = block
        out[own, columns] -= scale[own].to(out.dtype)
        return out, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(at, at + step) for at in range(0, logits.shape[0], step)]
