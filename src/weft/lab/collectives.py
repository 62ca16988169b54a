"""The collectives of torch.distributed on cards, each by the algorithm that is best there.

| collective | long | short |
|---|---|---|
| all-reduce | ring: reduce-scatter, then all-gather | recursive doubling |
| reduce-scatter, all-gather | ring | all to all at once |
| broadcast, reduce | chain of segments, from or to the root | the root and everybody |
| all-to-all, gather, scatter | everybody at once | the same |
| barrier | | dissemination |

Rings and chains visit the ranks host by host, so that each card carries a byte once, however many ranks share it. Pairs
of ranks share a card fairly, so that what is sent at once needs no order.

Tensors are flat, contiguous, of one dtype. `tag` is the call's own; its messages have tags from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.lab.card import CardChannel, CardTransfer, wait_all

SHORT_BYTES = 32 * 1024  # a message that takes the wire no longer than a hop takes the ranks
SEGMENT_BYTES = 256 * 1024
MOST_SEGMENTS = 16
TAGS = 1 << 20  # of one call

Combine = Callable[[Tensor, Tensor], None]  # the first becomes the sum (or product, ...) of both


def bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def ring_order(channel: CardChannel) -> list[int]:
    """All ranks, host by host."""
    return sorted(range(channel.size), key=lambda rank: (channel.hosts[rank], rank))


def segments(x: Tensor) -> list[Tensor]:
    """`x` in pieces that travel one after the other.

    >>> [len(s) for s in segments(torch.zeros(200_000))]
    [66667, 66667, 66666]
    """
    count = min(max(1, bytes_of(x) // SEGMENT_BYTES), MOST_SEGMENTS)
    return cut(x, count)


def cut(x: Tensor, count: int) -> list[Tensor]:
    """`count` pieces of almost the same length; the last ones may be empty.

    >>> [len(s) for s in cut(torch.zeros(5), 3)]
    [2, 2, 1]
    """
    whole, rest = divmod(x.numel(), count)
    return list(torch.split(x, [whole + (i < rest) for i in range(count)]))


def all_reduce(channel: CardChannel, x: Tensor, combine: Combine, tag: int) -> None:
    if channel.size == 1:
        return
    if bytes_of(x) <= SHORT_BYTES:
        _recursive_doubling(channel, x, combine, tag)
        return
    order = ring_order(channel)
    parts = [Tensor()] * channel.size
    for rank, part in zip(order, cut(x, channel.size), strict=True):
        parts[rank] = part
    own = parts[channel.rank]
    _ring_reduce(channel, own, parts, combine, tag)
    _ring_gather(channel, parts, tag + TAGS // 2)


def reduce_scatter(channel: CardChannel, out: Tensor, parts: Sequence[Tensor], combine: Combine, tag: int) -> None:
    """`out` becomes the sum of part `rank` of all ranks; it may be that part."""
    if channel.size == 1:
        out.copy_(parts[0])
    elif max(map(bytes_of, parts)) <= SHORT_BYTES:
        _direct_reduce(channel, out, parts, combine, tag)
    else:
        _ring_reduce(channel, out, parts, combine, tag)


def all_gather(channel: CardChannel, parts: Sequence[Tensor], own: Tensor, tag: int) -> None:
    """Part r of every rank becomes what rank r has as `own`."""
    if parts[channel.rank].data_ptr() != own.data_ptr():
        parts[channel.rank].copy_(own)
    if channel.size == 1:
        return
    if max(map(bytes_of, parts)) <= SHORT_BYTES:
        all_to_all(channel, parts, [parts[channel.rank]] * channel.size, tag)
    else:
        _ring_gather(channel, parts, tag)


def all_to_all(channel: CardChannel, into: Sequence[Tensor], out: Sequence[Tensor], tag: int) -> None:
    """`into[r]` becomes what rank r has as `out` for this rank."""
    me, size = channel.rank, channel.size
    others = [(me + step) % size for step in range(1, size)]
    under_way = [channel.recv(into[peer], peer, tag) for peer in reversed(others)]
    under_way += [channel.send(out[peer], peer, tag) for peer in others]
    if into[me].data_ptr() != out[me].data_ptr():
        into[me].copy_(out[me])
    wait_all(under_way)


def broadcast(channel: CardChannel, x: Tensor, root: int, tag: int) -> None:
    if channel.size == 1:
        return
    if bytes_of(x) <= SHORT_BYTES:
        scatter(channel, x, [x] * channel.size if channel.rank == root else None, root, tag)
        return
    before, after = _chain(channel, root)
    pieces = segments(x)
    coming = [] if before is None else [channel.recv(piece, before, tag + i) for i, piece in enumerate(pieces)]
    going: list[CardTransfer] = []
    for i, piece in enumerate(pieces):
        if before is not None:
            coming[i].wait()
        if after is not None:
            going.append(channel.send(piece, after, tag + i))
    wait_all(going)


def reduce(channel: CardChannel, x: Tensor, root: int, combine: Combine, tag: int) -> None:
    """`x` of the root becomes the sum; that of the others stays what it was."""
    if channel.size == 1:
        return
    if bytes_of(x) <= SHORT_BYTES:
        all_of_them = [torch.empty_like(x) for _ in range(channel.size)] if channel.rank == root else None
        gather(channel, all_of_them, x, root, tag)
        if all_of_them is not None:
            _sum(x, all_of_them, combine)
        return
    towards, behind = _chain(channel, root)  # the chain of a broadcast, backwards
    pieces = segments(x)
    found = [torch.empty_like(piece) for piece in pieces] if behind is not None else pieces
    coming = [] if behind is None else [channel.recv(piece, behind, tag + i) for i, piece in enumerate(found)]
    going: list[CardTransfer] = []
    for i, (piece, sums) in enumerate(zip(pieces, found, strict=True)):
        if behind is not None:
            coming[i].wait()
            combine(sums, piece)
        if towards is not None:
            going.append(channel.send(sums, towards, tag + i))
        elif behind is not None:
            piece.copy_(sums)
    wait_all(going)


def gather(channel: CardChannel, into: Sequence[Tensor] | None, own: Tensor, root: int, tag: int) -> None:
    """`into[r]` of the root becomes what rank r has as `own`."""
    if channel.rank != root:
        channel.send(own, root, tag).wait()
        return
    assert into is not None
    coming = [channel.recv(into[peer], peer, tag) for peer in range(channel.size) if peer != root]
    if into[root].data_ptr() != own.data_ptr():
        into[root].copy_(own)
    wait_all(coming)


def scatter(channel: CardChannel, into: Tensor, out: Sequence[Tensor] | None, root: int, tag: int) -> None:
    """`into` becomes what the root has as `out` for this rank."""
    if channel.rank != root:
        channel.recv(into, root, tag).wait()
        return
    assert out is not None
    going = [channel.send(out[peer], peer, tag) for peer in range(channel.size) if peer != root]
    if into.data_ptr() != out[root].data_ptr():
        into.copy_(out[root])
    wait_all(going)


def barrier(channel: CardChannel, tag: int) -> None:
    """After each round a rank knows that twice as many are here."""
    token = torch.zeros(1, dtype=torch.uint8)
    step = 1
    while step < channel.size:
        heard = torch.empty_like(token)
        coming = channel.recv(heard, (channel.rank - step) % channel.size, tag + step)
        going = channel.send(token, (channel.rank + step) % channel.size, tag + step)
        wait_all([coming, going])
        step *= 2


def _chain(channel: CardChannel, root: int) -> tuple[int | None, int | None]:
    """Who comes before this rank, and who after, from the root on, host by host."""
    order = ring_order(channel)
    start = order.index(root)
    chain = order[start:] + order[:start]
    at = chain.index(channel.rank)
    return (chain[at - 1] if at else None), (chain[at + 1] if at + 1 < len(chain) else None)


def _ring_reduce(channel: CardChannel, out: Tensor, parts: Sequence[Tensor], combine: Combine, tag: int) -> None:
    """Sums go round, each rank adds its own. `parts` stay as they are, but for `out`, if it is one of them."""
    order, size = ring_order(channel), channel.size
    at = order.index(channel.rank)
    after, before = order[(at + 1) % size], order[at - 1]

    def part(step: int) -> Tensor:  # what this rank sends in that step, with what others have added
        return parts[order[(at - 1 - step) % size]]

    going: list[CardTransfer] = [channel.send(s, after, tag + i) for i, s in enumerate(segments(part(0)))]
    buffers = [_like_largest(parts) for _ in range(2)]
    sent: list[list[CardTransfer]] = [[], []]
    for step in range(1, size):
        mine = segments(part(step))
        wait_all(sent[step % 2])  # what lies in this buffer has left
        sums = segments(buffers[step % 2][: part(step).numel()])
        first = tag + step * MOST_SEGMENTS - MOST_SEGMENTS
        coming = [channel.recv(piece, before, first + i) for i, piece in enumerate(sums)]
        sent[step % 2] = []
        for i, (piece, own) in enumerate(zip(sums, mine, strict=True)):
            coming[i].wait()
            combine(piece, own)
            if step < size - 1:
                sent[step % 2].append(channel.send(piece, after, first + MOST_SEGMENTS + i))
    wait_all(going)  # before `out` is written, which may be what was sent first
    wait_all(sent[0] + sent[1])
    out.copy_(buffers[(size - 1) % 2][: out.numel()])


def _ring_gather(channel: CardChannel, parts: Sequence[Tensor], tag: int) -> None:
    """Parts go round."""
    order, size = ring_order(channel), channel.size
    at = order.index(channel.rank)
    after, before = order[(at + 1) % size], order[at - 1]
    coming = [channel.recv(parts[order[(at - step) % size]], before, tag + step) for step in range(1, size)]
    going = []
    for step in range(size - 1):
        if step:
            coming[step - 1].wait()
        going.append(channel.send(parts[order[(at - step) % size]], after, tag + step + 1))
    wait_all([coming[-1], *going])


def _direct_reduce(channel: CardChannel, out: Tensor, parts: Sequence[Tensor], combine: Combine, tag: int) -> None:
    found = [torch.empty_like(parts[channel.rank]) for _ in range(channel.size)]
    all_to_all(channel, found, parts, tag)
    _sum(out, found, combine)


def _sum(out: Tensor, found: Sequence[Tensor], combine: Combine) -> None:
    """In the order of ranks."""
    for other in found[1:]:
        combine(found[0], other)
    out.copy_(found[0])


def _recursive_doubling(channel: CardChannel, x: Tensor, combine: Combine, tag: int) -> None:
    """Pairs at distance 1, 2, 4, ... exchange sums; ranks beyond a power of two hand theirs over, and get all back."""
    me, size = channel.rank, channel.size
    power = 1 << (size.bit_length() - 1)
    found = torch.empty_like(x)
    if me >= power:
        channel.send(x, me - power, tag).wait()
        channel.recv(x, me - power, tag + 1).wait()
        return
    if me + power < size:
        channel.recv(found, me + power, tag).wait()
        combine(x, found)
    step = 1
    while step < power:
        peer = me ^ step
        wait_all([channel.recv(found, peer, tag + 1 + step), channel.send(x, peer, tag + 1 + step)])
        combine(x, found)
        step *= 2
    if me + power < size:
        channel.send(x, me + power, tag + 1).wait()


def _like_largest(parts: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(max(parts, key=Tensor.numel))
