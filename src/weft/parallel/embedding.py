"""A table of embeddings whose rows the ranks share.

    table_r [V_r, width], ids [T]      -> x [T_r, width], or [T, width] where tokens are not split
    forward   the owner of a word sends its row to the rank that holds the token
    wgrad     the gradient of each token's row goes back to the owner, who adds them up in the order of tokens

A row comes from one rank, so nothing is summed: only rows travel that are needed, a P-th of a reduce-scatter, and the
result has the bits of a lookup. All ranks know all ids, so all know who sends what.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.parallel.cut import Run
from weft.parallel.exchange import exchange
from weft.parallel.rank import Words
from weft.parallel.share import Share


def lookup(
    table: Tensor, ids: Tensor, words: Words, share: Share, group: ProcessGroup, *, padding: int | None = None
) -> Tensor:
    """This rank's rows of the embedded tokens; `ids` [T] are the same on all ranks, and below `words.total`.

    The word `padding` gets no gradient.
    """
    rows: Tensor = _Lookup.apply(table, ids, words, share, group, padding)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, words: Words, share: Share, group: ProcessGroup, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.words, ctx.share, ctx.group, ctx.rows, ctx.padding = words, share, group, table.shape[0], padding
        width, mine = table.shape[1], share.mine
        outgoing = []
        for rank in range(share.size):
            run = share.of_rank(rank)
            wanted = ids[run.first : run.end]
            outgoing.append(table[wanted[_owned(wanted, words, share, share.rank)] - words.first])
        places = _places(ids[mine.first : mine.end], words, share)
        incoming = [table.new_empty(at.numel(), width) for at in places]
        exchange(group, outgoing, incoming, what=_what("embedding", share, width, table))
        out = table.new_empty(mine.count, width)
        for at, rows in zip(places, incoming, strict=True):
            out[at] = rows
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,), share, words = ctx.saved_tensors, ctx.share, ctx.words
        (grad,) = grads
        own = ids[_owned(ids, words, share, share.rank)] - words.first
        if share.split:  # else all ranks have the whole gradient, and the owner takes what it needs
            places = _places(ids[share.mine.first : share.mine.end], words, share)
            runs = [share.of_rank(r) for r in range(share.size)]
            counts = [int(_owned(ids[r.first : r.end], words, share, share.rank).sum()) for r in runs]
            rows = grad.new_empty(sum(counts), grad.shape[1])
            what = _what("gradient of the embedding", share, grad.shape[1], grad)
            exchange(ctx.group, [grad[at] for at in places], list(torch.split(rows, counts)), what=what)
        else:
            rows = grad[_owned(ids, words, share, share.rank)]
        total = grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, own, rows)
        if ctx.padding is not None and words.first <= ctx.padding < words.end:
            total[ctx.padding - words.first] = 0.0
        return total, *(None,) * 5


def _owned(ids: Tensor, words: Words, share: Share, rank: int) -> Tensor:
    run = Run.of(words.total, rank, share.size)
    return (ids >= run.first) & (ids < run.end)


def _places(ids: Tensor, words: Words, share: Share) -> list[Tensor]:
    """For each rank, which of these tokens are words of its own."""
    return [_owned(ids, words, share, rank).nonzero().squeeze(1) for rank in range(share.size)]


def _what(name: str, share: Share, width: int, like: Tensor) -> str:
    return f"{name} {share.tokens} x {width} {like.dtype} split={share.split}"
