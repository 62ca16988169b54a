"""Messages between the ranks that share a model, of sizes that all ranks know: what is too small, or too scattered, to
overlap. Each is one call on the group's context: in turn with the overlapped matmuls, all ranks agree on what they do
before a byte moves, one deadline for the whole, and every wait names its peer. Sums are added in the order of all sums
in weft. Rows, columns and embedded words travel differentiably. A table of embeddings whose rows the ranks share:

    table_r [V_r, width], ids [T]      -> x [T_r, width], or [T, width] where tokens are not split
    forward   the owner of a word sends its row to the rank that holds the token
    wgrad     the gradient of each token's row goes back to the owner, who adds them up in the order of tokens

A row comes from one rank, so nothing is summed: only rows travel that are needed, a P-th of a reduce-scatter, and the
result has the bits of a lookup. All ranks know all ids, so all know who sends what.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.tags import Mark
from weft.comm.tell import swap_tensors
from weft.overlap.blocks import chunk_bounds, nested
from weft.overlap.executor.context import Context, context_of
from weft.overlap.executor.sums import add_terms
from weft.timeline import record
from weft.transformer.parts import IndexRun, Share, Words

_WHOLE_BYTES = 1 << 16  # up to here every rank adds up everything: one message instead of two


def agree(group: ProcessGroup, text: str) -> None:
    """Returns when all ranks are here with the same text; `PeerMismatch` names both sides."""
    if group.size() == 1:
        return
    context = context_of(group)
    with context.call() as call:
        context.meet(call, text)


def exchange(group: ProcessGroup, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, what: str) -> None:
    """outgoing[r] goes to rank r and incoming[r] comes from it; contiguous, of sizes that both sides know.

    `what` is the same text on all ranks.
    """
    rank = group.rank()
    incoming[rank].copy_(outgoing[rank])
    if group.size() > 1:
        context = context_of(group)
        with context.call() as call:
            context.meet(call, what)
            nbytes = sum(t.nbytes for r, t in enumerate(incoming) if r != rank)
            tag = context.line.mark(Mark.EXCHANGE)
            with record.span("recv", what, lane="comm", bytes=nbytes):
                swap_tensors(context.group, outgoing, incoming, tag=tag, deadline=call.deadline, what=what)


def gather(group: ProcessGroup, mine: Tensor, *, what: str) -> list[Tensor]:
    """What each rank gave, all of one shape."""
    mine = mine.contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    exchange(group, [mine] * group.size(), parts, what=what)
    return parts


def all_sum(group: ProcessGroup, part: Tensor, *, what: str) -> Tensor:
    """The sum over ranks, the same bits on all of them."""
    if group.size() == 1:
        return part
    context, flat = context_of(group), part.reshape(-1)
    if part.nbytes <= _WHOLE_BYTES:
        return _added(context, gather(group, flat, what=what)).view_as(part)
    bounds = chunk_bounds(flat.numel(), group.size())
    pieces = [flat[a:b] for a, b in pairwise(bounds)]
    parts = [torch.empty_like(pieces[group.rank()]) for _ in pieces]
    exchange(group, pieces, parts, what=f"{what}: parts")
    total = torch.empty_like(flat)
    mine = _added(context, parts)
    wholes = [total[a:b] for a, b in pairwise(bounds)]
    exchange(group, [mine] * len(wholes), wholes, what=f"{what}: sums")
    return total.view_as(part)


def _added(context: Context, parts: list[Tensor]) -> Tensor:
    out = torch.empty_like(parts[0])
    add_terms([[parts[r] for r in ranks] for ranks in nested(context.hosts, range(context.size))], out, None)
    return out


# Rows and columns that ranks share -------------------------------------------------------------------------


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


def gather_columns(part: Tensor, words: Words, group: ProcessGroup) -> Tensor:
    """[M, V_r] -> [M, V] on every rank. What follows must be the same on all ranks, and so its gradient."""
    if group.size() == 1:
        return part
    whole: Tensor = _GatherColumns.apply(part, words, group)  # type: ignore[no-untyped-call]
    return whole


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, words: Words, group: ProcessGroup) -> Tensor:
        ctx.words = words
        counts = [IndexRun.of(words.total, r, group.size()).count for r in range(group.size())]
        parts = [part.new_empty(part.shape[0], count) for count in counts]
        what = f"gather logits {part.shape[0]} x {words.total} {part.dtype}"
        exchange(group, [part.contiguous()] * len(parts), parts, what=what)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][:, ctx.words.first : ctx.words.end], None, None


# A table of embeddings that ranks share --------------------------------------------------------------------


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
    run = IndexRun.of(words.total, rank, share.size)
    return (ids >= run.first) & (ids < run.end)


def _places(ids: Tensor, words: Words, share: Share) -> list[Tensor]:
    """For each rank, which of these tokens are words of its own."""
    return [_owned(ids, words, share, rank).nonzero().squeeze(1) for rank in range(share.size)]


def _what(name: str, share: Share, width: int, like: Tensor) -> str:
    return f"{name} {share.tokens} x {width} {like.dtype} split={share.split}"
