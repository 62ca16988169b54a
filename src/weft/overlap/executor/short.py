"""Runs short calls: the data goes with the agreement, one message each way, and the caller's thread does all.

What is said here before data is looked at is what every call says: see `context`. `overlap.short` says which calls are
short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from weft.kernels import PackedWeight, Rows, TileSchedule, linear_tiles
from weft.overlap.blocks import nested
from weft.overlap.executor.call import MatmulCall
from weft.overlap.executor.context import PAYLOAD_AT
from weft.overlap.executor.resources import Need
from weft.overlap.executor.sums import RowNorm, add_rows
from weft.overlap.plan import Op
from weft.overlap.short import is_short
from weft.timeline import record


def is_carried(run: MatmulCall) -> bool:
    """Whether the data of this call goes with its agreement; the same on all ranks."""
    return is_short(run.plan) and run.context.agreement.carries(run.plan.topology)


@dataclass(frozen=True)
class ShortPlaces:
    """Tables over one bank: the own part and the messages that it goes in, and where the parts of all ranks lie then.

    mine:      [m, n] of the product, or [m_r, K] of x
    messages:  of each rank of another host; `copies` are the rows of `mine` that go into them first
    parts:     of each rank, what this rank needs of it
    """

    mine: Tensor
    messages: dict[int, Tensor]
    copies: tuple[tuple[Tensor, Tensor], ...]
    parts: tuple[Tensor, ...]
    schedule: TileSchedule
    rows: Rows | None = None


def matmul_short(
    run: MatmulCall,
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None,
    meanwhile: Callable[[], None] | None = None,
    after: RowNorm | None = None,
) -> Tensor:
    """x [M, K_r] times weight [N, K_r], summed over ranks: this rank's rows of it, or all (all-reduce)."""
    plan, context = run.plan, run.context
    places = _places(run, plan.m, plan.n)
    context.expect(run.call)
    start = record.now()
    linear_tiles(x, weight, out=places.mine, schedule=places.schedule)
    run.record("compute", "matmul", "compute", start, flops=2.0 * plan.m * plan.n * weight.k)
    for message, rows in places.copies:
        message.copy_(rows)
    _exchange(run, places, meanwhile)
    start = record.now()
    y = context.outputs.empty(places.parts[0].shape[0], plan.n, dtype=x.dtype)
    if after is not None:
        after.prepare(y)
    if y.numel():
        terms = [[places.parts[r] for r in host] for host in nested(plan.hosts, range(plan.size))]
        add_rows(terms, y, bias, 0, y.shape[0], after)
    run.record("other", f"sum of {y.shape[0]} rows", "comm", start)
    return y


def gather_short(
    run: MatmulCall, x: Tensor, weight: PackedWeight, *, out: Tensor, bias: Tensor | None, gathered: Tensor | None
) -> None:
    """out [m, N] = the rows of all ranks' x [m_r, K] times weight [N, K]; `gathered` [m, K] takes the rows."""
    places = _places(run, x.shape[0], run.plan.k)
    run.context.expect(run.call)
    places.mine.copy_(x)
    _exchange(run, places, None)
    assert places.rows is not None
    start = record.now()
    linear_tiles(places.rows, weight, out=out, schedule=places.schedule, bias=bias)
    run.record("compute", "matmul", "compute", start, flops=2.0 * out.shape[0] * out.shape[1] * weight.k)
    if gathered is not None:
        for part, (m0, m1) in zip(places.parts, pairwise(run.plan.shard_bounds), strict=True):
            gathered[m0:m1] = part


def _exchange(run: MatmulCall, places: ShortPlaces, meanwhile: Callable[[], None] | None) -> None:
    """What this rank has goes out; returns when all have told the same and what they have is here."""
    start = record.now()
    run.context.ride(run.call, run.text, places.messages)
    if meanwhile is not None:
        meanwhile()
        run.record("compute", "what is computed meanwhile", "compute", start)
    run.context.land(run.call)
    for peer, message in places.messages.items():
        run.record("send", f"all at once to rank {peer}", "send", start, nbytes=message.nbytes - PAYLOAD_AT)
    run.record("recv", "all at once from every rank", "comm", start)


def _places(run: MatmulCall, rows: int, cols: int) -> ShortPlaces:
    """Found once for a plan and a bank; `rows` and `cols` are those of `mine`."""
    plan, bank, rank = run.plan, run.call.bank, run.context.rank
    bounds, gathers = plan.shard_bounds, plan.op.gathers
    most = bounds[1] if gathers else plan.m
    run.reserve(Need(PAYLOAD_AT + run.nbytes(most * cols), 0))
    inboxes = run.context.agreement.inboxes
    shards = {} if plan.op is not Op.REDUCE_SCATTER else {d: bounds[d + 1] - bounds[d] for d in inboxes}
    sizes = {d: PAYLOAD_AT + run.nbytes(count * cols) for d, count in shards.items()}
    private = bank.private(sum(_aligned(size) for size in sizes.values()))  # before what is bound is looked up
    key = ("short", plan)
    found = bank.bound.get(key)
    if isinstance(found, ShortPlaces):
        return found

    def payload(memory: Tensor, at: int, count: int) -> Tensor:
        """[count, cols] from row `at` of a message on."""
        row = run.nbytes(cols)
        start = PAYLOAD_AT + at * row
        return memory[start : start + count * row].view(run.dtype).view(count, cols)

    own = bank.shared(rank)[: PAYLOAD_AT + run.nbytes(rows * cols)]
    mine = payload(own, 0, rows)
    messages, copies, at = {}, [], 0
    for peer in inboxes:
        messages[peer] = own
        if peer in shards:
            messages[peer] = private[at : at + sizes[peer]]
            at += _aligned(sizes[peer])
            copies.append((payload(messages[peer], 0, shards[peer]), mine[bounds[peer] : bounds[peer + 1]]))
    first, count = (bounds[rank], bounds[rank + 1] - bounds[rank]) if plan.op is Op.REDUCE_SCATTER else (0, rows)
    parts = []
    for r in range(plan.size):
        length = bounds[r + 1] - bounds[r] if gathers else count
        is_remote, skipped = r in inboxes, 0 if gathers or r in inboxes else first
        parts.append(payload(inboxes[r] if is_remote else bank.shared(r), skipped, length))
    schedule = TileSchedule(plan.tiling)
    made = ShortPlaces(mine, messages, tuple(copies), tuple(parts), schedule, Rows.stack(parts) if gathers else None)
    bank.bound[key] = made
    return made


def _aligned(size: int) -> int:
    return -(-size // PAYLOAD_AT) * PAYLOAD_AT
