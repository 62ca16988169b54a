"""How the T tokens of a call lie on the ranks between blocks: split into runs of rows, or whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.parallel.cut import Run
from weft.parallel.exchange import exchange

# With fewer rows a rank, a reduce-scatter and an all-gather cost two latencies where an all-reduce costs one, and
# norms on so few rows are not worth sharing.
FEWEST_ROWS = 8


@dataclass(frozen=True)
class Share:
    """Rank `rank`'s share of `tokens` rows: a run of them where they are `split`, else all.

    >>> Share.of(37, rank=1, size=2).mine, Share.of(5, rank=1, size=2).mine
    (Run(first=19, end=37), Run(first=0, end=5))
    """

    tokens: int
    rank: int
    size: int
    split: bool

    @classmethod
    def of(cls, tokens: int, *, rank: int, size: int) -> Share:
        """Split where every rank has enough rows."""
        return cls(tokens, rank, size, size > 1 and tokens >= FEWEST_ROWS * size)

    @property
    def mine(self) -> Run:
        return self.of_rank(self.rank)

    def of_rank(self, rank: int) -> Run:
        """The rows that a rank holds."""
        return Run.of(self.tokens, rank, self.size) if self.split else Run(0, self.tokens)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's rows of [T, ...]: a view."""
        return whole[self.mine.first : self.mine.end]


def gather_rows(rows: Tensor, share: Share, group: ProcessGroup) -> Tensor:
    """[T_r, ...] -> [T, ...] on every rank. What follows must be the same on all ranks, and so its gradient."""
    if not share.split:
        return rows
    whole: Tensor = _GatherRows.apply(rows, share, group)  # type: ignore[no-untyped-call]
    return whole


def split_rows(whole: Tensor, share: Share, group: ProcessGroup) -> Tensor:
    """[T, ...], the same on every rank, -> this rank's rows; the gradient is whole on every rank."""
    if not share.split:
        return whole
    rows: Tensor = _SplitRows.apply(whole, share, group)  # type: ignore[no-untyped-call]
    return rows


def _all_rows(rows: Tensor, share: Share, group: ProcessGroup) -> Tensor:
    whole = rows.new_empty(share.tokens, *rows.shape[1:])
    runs = [share.of_rank(r) for r in range(share.size)]
    what = f"rows of {share.tokens} x {list(rows.shape[1:])} {rows.dtype}"
    exchange(group, [rows.contiguous()] * share.size, [whole[r.first : r.end] for r in runs], what=f"gather {what}")
    return whole


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Share, group: ProcessGroup) -> Tensor:
        ctx.share = share
        return _all_rows(rows, share, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.share.take(grads[0]), None, None


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, share: Share, group: ProcessGroup) -> Tensor:
        ctx.share, ctx.group = share, group
        return share.take(whole).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_rows(grads[0], ctx.share, ctx.group), None, None
