"""Point-to-point messages over a torch process group, with a deadline and a named peer on every wait.

Any backend that sends CPU tensors will do. How the failures of gloo, the usual one, show here:

- A peer dies: waits for that peer end at once with `PeerLost`; messages among the others go on.
- A wait passes its deadline: `PeerTimeout`. gloo then closes all connections that this rank has in this
  process group, so that every rank which waits for this one gets `PeerLost` in turn, and nobody hangs. The
  process group is of no more use; a new one (`torch.distributed.new_group`) works.

So one failure ends the operation on all ranks within the deadline. The rank to blame is the one that a
`PeerTimeout`, or the first `PeerLost`, names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from weft.comm.deadline import Deadline
from weft.comm.hosts import hosts_of
from weft.errors import PeerLost, PeerMismatch, PeerTimeout

# Tags from here on are for weft's own messages.
_TAG_LIMIT = 1 << 30
_AGREE_TAG = _TAG_LIMIT
_LENGTH_BYTES = 8


class Transfer:
    """A message under way; `wait` for it, and keep the tensor unchanged until then.

    A transfer that is dropped without a wait may never be sent. gloo cannot say whether a message has arrived
    without waiting for it, so there is no test for completion.
    """

    def __init__(self, work: Work | None, *, route: str, timeout: float) -> None:
        self._work = work
        self._route = route
        self._timeout = timeout

    def wait(self, *, what: str, timeout: float | None = None) -> None:
        """Returns when the tensor may be used again (sent) or holds the message (received).

        `PeerTimeout` after `timeout` seconds (the group's own if not given), `PeerLost` when the connection
        closed; both say `what`, the direction and the peer. Waiting again for a finished transfer returns at
        once.
        """
        self.wait_until(Deadline.after(self._timeout if timeout is None else timeout), what=what)

    def wait_until(self, deadline: Deadline, *, what: str) -> None:
        """`wait` with a deadline that several transfers share."""
        if self._work is None:
            return
        # Rounded up, and 1 at least: gloo counts milliseconds, and takes 0 for its own default.
        milliseconds = max(1, math.ceil(1000 * deadline.left()))
        try:
            self._work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError as error:
            if deadline.left() == 0.0:
                raise PeerTimeout(f"{what} ({self._route})", seconds=deadline.seconds) from error
            raise _lost(f"{what} ({self._route})", error) from error
        self._work = None  # gloo would wait for a second message


class Group:
    """A process group whose waits all end, with its ranks' hosts. Making one is collective over `pg`.

    Ranks count within the group. `timeout` seconds is the deadline of each operation that is not given its
    own.

        group = Group(pg, timeout=30.0)
        group.agree("all_gather_matmul", "x_shard [512, 4096] bfloat16")
        there, here = group.send(x, right), group.recv(y, left)
        here.wait(what="step 1 of the ring")
        there.wait(what="step 1 of the ring")
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float) -> None:
        backends = dist.get_backend_config(pg)
        if "cpu:" not in backends:
            raise ValueError(
                f"backends of the process group are {backends}, expected one for the CPU, for agree(); "
                'make the group with backend="cpu:gloo,cuda:nccl"'
            )
        self.pg = pg
        self.rank, self.size = pg.rank(), pg.size()
        self.timeout = timeout
        self.hosts = hosts_of(pg, timeout=timeout)

    def send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> Transfer:
        """Starts to send `tensor` to rank `dst`, as bytes: any dtype and shape, contiguous.

        It meets the `recv` with the same tag, in order among equal tags (NCCL has no tags: in order
        altogether). A tensor without elements is not sent, just as `recv` does not wait for one.
        """
        self._check(dst, tag)
        return self._send(_as_bytes(tensor), dst, tag)

    def recv(self, tensor: Tensor, src: int, *, tag: int = 0) -> Transfer:
        """Starts to receive into `tensor`, contiguous, from rank `src`, which sends as many bytes."""
        self._check(src, tag)
        return self._recv(_as_bytes(tensor), src, tag)

    def agree(self, what: str, value: str, *, timeout: float | None = None) -> None:
        """Returns when all ranks are here with the same `what` and `value`: a text of what they will do.

        `PeerMismatch`, on every rank, when they differ: it names the ranks and what they said. Only hashes
        travel while ranks agree; it is also a barrier.
        """
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        mine = f"{what}: {value}".encode()
        digest = len(mine).to_bytes(_LENGTH_BYTES, "big") + hashlib.sha256(mine).digest()
        digests = self._exchange(digest, [len(digest)] * self.size, deadline=deadline, what=f"agreement on {what}")
        if all(other == digest for other in digests):
            return
        lengths = [int.from_bytes(other[:_LENGTH_BYTES], "big") for other in digests]
        texts = self._exchange(mine, lengths, deadline=deadline, what=f"the mismatch in {what}")
        raise PeerMismatch(_differences([text.decode() for text in texts]))

    def barrier(self, what: str = "barrier", *, timeout: float | None = None) -> None:
        """Returns when all ranks are here; `PeerMismatch` when one of them is at an `agree` instead."""
        self.agree("barrier", what, timeout=timeout)

    def _check(self, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"peer is rank {peer}, expected 0 to {self.size - 1} except this rank, {self.rank}; "
                "ranks count within the group"
            )
        if not 0 <= tag < _TAG_LIMIT:
            raise ValueError(f"tag is {tag}, expected 0 <= tag < {_TAG_LIMIT}; higher ones are weft's own")

    # Straight to the process group: dist.isend and dist.irecv check again what is checked here, and cost as much
    # as the message itself where it is short.
    def _send(self, data: Tensor, dst: int, tag: int) -> Transfer:
        return self._start(self.pg.send, data, dst, tag, f"send to rank {dst}")

    def _recv(self, data: Tensor, src: int, tag: int) -> Transfer:
        return self._start(self.pg.recv, data, src, tag, f"receive from rank {src}")

    def _start(self, call: Callable[..., Work], data: Tensor, peer: int, tag: int, route: str) -> Transfer:
        if data.numel() == 0:
            return Transfer(None, route=route, timeout=self.timeout)
        try:
            return Transfer(call([data], peer, tag), route=route, timeout=self.timeout)
        except RuntimeError as error:
            raise _lost(route, error) from error

    def _exchange(self, mine: bytes, sizes: Sequence[int], *, deadline: Deadline, what: str) -> list[bytes]:
        """What each rank gave as `mine`, `sizes[rank]` bytes; directly, so that a timeout can name it."""
        outgoing = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        incoming = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        incoming[self.rank] = outgoing
        peers = [rank for rank in range(self.size) if rank != self.rank]
        transfers = [self._recv(incoming[peer], peer, _AGREE_TAG) for peer in peers]
        transfers += [self._send(outgoing, peer, _AGREE_TAG) for peer in peers]
        for transfer in transfers:
            transfer.wait_until(deadline, what=what)
        return [data.numpy().tobytes() for data in incoming]


def _as_bytes(tensor: Tensor) -> Tensor:
    """`tensor` as uint8 [bytes], the same memory: backends know few dtypes, and all know this one."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"strides of the {tuple(tensor.shape)} tensor are {tensor.stride()}, expected a contiguous one; "
            "call contiguous() first, which copies"
        )
    if tensor.dtype == torch.uint8 and tensor.dim() == 1:
        return tensor
    # Not view(-1): the one element of a strided tensor counts as contiguous, and keeps its stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _lost(what: str, error: RuntimeError) -> PeerLost:
    reason = str(error).splitlines()[0]
    return PeerLost(
        f"{what}: the connection failed: {reason}. The rank died, or it gave up and its own error says why; "
        "a new process group is needed to go on"
    )


def _differences(texts: Sequence[str]) -> str:
    """Who says what, at the first line that is not the same on all ranks.

    >>> print(_differences(["plan: 4 steps", "plan: 5 steps", "plan: 4 steps"]))
    ranks are about to do different things:
      rank 0, 2: plan: 4 steps
      rank 1: plan: 5 steps
    """
    rows = list(zip_longest(*(text.split("\n") for text in texts), fillvalue="(nothing)"))
    number = next(i for i, row in enumerate(rows) if len(set(row)) > 1)
    ranks: dict[str, list[str]] = {}
    for rank, line in enumerate(rows[number]):
        ranks.setdefault(line, []).append(str(rank))
    where = f", first at line {number + 1}" if len(rows) > 1 else ""
    sides = "".join(f"\n  rank {', '.join(who)}: {line}" for line, who in ranks.items())
    return f"ranks are about to do different things{where}:{sides}"
