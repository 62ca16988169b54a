"""How a rank tells all others something small: with a deadline, and a bound on what it believes of a size.

- `tell`: any short text or bytes, as messages of a `Group`. Up to `_FRAME` bytes in one round, what is longer in a
  second one.
- `swap`: the same where all sizes are known beforehand; one round.
- `tell_all`: values that JSON can say, through the group's store, where there is no `Group`: files, set-up.

A size that comes from a peer is compared with the bound before memory is taken for it. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.deadline import Deadline
from weft.comm.listen import listening
from weft.comm.rendezvous import meeting
from weft.comm.tags import Tag
from weft.errors import PeerMismatch

MOST_BYTES = 1 << 26
"""The longest thing that can be told unless a caller sets another bound: plans of a large model are a tenth of it."""
_FRAME = 512
_LENGTH = 8


class Arrival(Protocol):
    """A message under way; see `comm.Transfer`."""

    def wait_until(self, deadline: Deadline, *, what: str) -> None: ...


class Endpoint(Protocol):
    """Who can be told: what `comm.Group` is to this module."""

    rank: int
    size: int

    def send(self, tensor: Tensor, dst: int, *, tag: int) -> Arrival: ...

    def recv(self, tensor: Tensor, src: int, *, tag: int) -> Arrival: ...

    def break_off(self) -> None: ...


def tell(
    group: Endpoint, mine: bytes, *, tag: Tag, deadline: Deadline, what: str, most: int = MOST_BYTES
) -> list[bytes]:
    """What each rank gave as `mine`, of any length up to `most` bytes. Collective.

    `PeerMismatch` if a rank says that it has more. A rank with too much of its own raises `ValueError`, before it has
    told anything: whether it fits must not depend on the rank.
    """
    if len(mine) > most:
        raise ValueError(f"{what} has {len(mine)} bytes, expected up to {most}")
    room = _FRAME - _LENGTH
    frame = (len(mine).to_bytes(_LENGTH, "big") + mine[:room]).ljust(_FRAME, b"\0")
    frames = swap(group, frame, [_FRAME] * group.size, tag=tag, deadline=deadline, what=what)
    lengths = [checked_length(int.from_bytes(frame[:_LENGTH], "big"), most, what, r) for r, frame in enumerate(frames)]
    found = [frame[_LENGTH : _LENGTH + length] for frame, length in zip(frames, lengths, strict=True)]
    if max(lengths) <= room:
        return found
    rests = swap(group, mine[room:], [max(0, n - room) for n in lengths], tag=tag, deadline=deadline, what=what)
    return [start + rest for start, rest in zip(found, rests, strict=True)]


def checked_length(length: int, most: int, what: str, rank: int) -> int:
    """`length`, once it is no more than was agreed on.

    >>> checked_length(3, 10, "a text", 1)
    3
    """
    if not 0 <= length <= most:
        raise PeerMismatch(f"rank {rank} announces {length} bytes as {what}, expected 0 to {most}")
    return length


def swap(group: Endpoint, mine: bytes, sizes: Sequence[int], *, tag: Tag, deadline: Deadline, what: str) -> list[bytes]:
    """What each rank gave as `mine`, `sizes[rank]` bytes; directly, so that a timeout can name the rank."""
    outgoing = (
        torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if mine
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    incoming = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
    incoming[group.rank] = outgoing
    swap_tensors(group, [outgoing] * group.size, incoming, tag=tag, deadline=deadline, what=what)
    return [data.numpy().tobytes() for data in incoming]


def swap_tensors(
    group: Endpoint,
    outgoing: Sequence[Tensor] | Mapping[int, Tensor],
    incoming: Sequence[Tensor] | Mapping[int, Tensor],
    *,
    tag: Tag,
    deadline: Deadline,
    what: str,
    ranks: Iterable[int] | None = None,
) -> None:
    """outgoing[r] goes to rank r and incoming[r] comes from it; contiguous, of sizes that both sides know.

    Among all ranks of the group, or some `ranks` of it, who all call it.
    """
    peers = [rank for rank in (range(group.size) if ranks is None else ranks) if rank != group.rank]
    transfers = [group.recv(incoming[peer], peer, tag=tag) for peer in peers]
    transfers += [group.send(outgoing[peer], peer, tag=tag) for peer in peers]

    def wait() -> None:
        for transfer in transfers:
            transfer.wait_until(deadline, what=what)

    listening(wait, on_interrupt=group.break_off)


def tell_all(what: str, mine: Any, *, group: ProcessGroup | None, timeout: float, most: int = MOST_BYTES) -> list[Any]:
    """What each rank says, in rank order; values that JSON can say. Collective, and a barrier.

    Without a process group there is one rank. `PeerTimeout` names the ranks that did not come.

    >>> tell_all("a test", ["nothing"], group=None, timeout=1.0)
    [['nothing']]
    """
    if group is None and not dist.is_initialized():
        return [mine]
    if (length := len(json.dumps(mine))) > most:
        raise ValueError(f"{what} has {length} bytes to tell, expected up to {most}")
    pg: Any = dist.group.WORLD if group is None else group
    with meeting(pg, what, ("said",), deadline=Deadline.after(timeout), store=None) as held:
        return held.gather("said", mine)
