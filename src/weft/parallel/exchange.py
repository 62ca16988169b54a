"""Messages between the ranks of a group whose sizes all ranks know: what is too small, or too scattered, to overlap.

Each is one call on the group's context: in turn with the overlapped matmuls, all ranks agree on what they do before a
byte moves, one deadline for the whole, and every wait names its peer. Sums are added in the order of all sums in weft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.tags import Mark
from weft.comm.tell import swap_tensors
from weft.overlap.blocks import chunk_bounds, nested
from weft.overlap.executor.context import Context, context_of
from weft.overlap.executor.outgoing import add_terms
from weft.timeline import record

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
