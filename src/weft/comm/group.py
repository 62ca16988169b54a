"""Point-to-point messages over a torch process group, with a deadline and a named peer on every wait.

Any backend that sends CPU tensors will do. How the failures of gloo, the usual one, show here:

- A peer dies: waits for that peer end at once with `PeerLost`; messages among the others go on.
- A wait passes its deadline: `PeerTimeout`. gloo then closes all connections that this rank has in this
  process group, so that every rank which waits for this one gets `PeerLost` in turn, and nobody hangs. The
  process group is unusable; a new one (`torch.distributed.new_group`) works.

So one failure ends the operation on all ranks within the deadline. The rank to blame is the one that a
`PeerTimeout`, or the first `PeerLost`, names.

gloo moves bytes on a thread of its own, which wakes up for every packet and then takes a core from the matmul that
runs there, thousands of times a second. As a *batch* thread (`make_way_for_compute`) it waits for the end of the
matmul's time slice, a few milliseconds, and finds many packets at once. Measured in turns on three ops: overlapped
matmuls gain 6 to 18 %, and sequential ones lose nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from weft.comm.deadline import Deadline, listening
from weft.comm.tags import CLAIM_BYTES, DEFAULT_TAG, FIRST_TAG, Lease, Line, Mark, Tag, ledger_of, refuse_unusable, turn
from weft.comm.tell import MOST_BYTES, swap, tell
from weft.comm.window import host_ids_of, number_hosts, why_apart
from weft.errors import PeerLost, PeerMismatch, PeerTimeout

_DIGEST_BYTES = 32
_LOOPS = ("gloo_tcp_loop",)
# Backends whose receives may have more room than what comes: known of gloo's TCP, which it has on Linux, and our cards.
_TAKE_SHORTER = ("gloo", "dma") if sys.platform == "linux" else ()
_leave_alone: ContextVar[bool] = ContextVar("weft_leave_gloo_threads_alone", default=False)


class Group:
    """A process group whose waits all end, with its ranks' hosts. Making the first one is collective over `pg`.

    Ranks count within the group. `timeout` seconds is the deadline of each operation that is not given its
    own. `hosts` has the host of each rank; `apart` says why ranks of one machine count as several, where they do.
    `takes_shorter` says whether a message may be shorter than the tensor that it is received into.

        group = Group(pg, timeout=30.0)
        group.agree("all_gather_matmul", "x_shard [512, 4096] bfloat16")
        there, here = group.send(x, right), group.recv(y, left)
        here.wait(what="step 1 of the ring")
        there.wait(what="step 1 of the ring")
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float, line: Line = Line.GROUP, what: str = "Group") -> None:
        """`line` is that of `agree`, `barrier` and `tell`, unless they are told another one.

        `what` is what the user called, for errors.
        """
        backends = dist.get_backend_config(pg)
        if "cpu:" not in backends:
            raise ValueError(
                f"backends of the process group are {backends}, expected one for the CPU, for agree(); "
                'make the group with backend="cpu:gloo,cuda:nccl"'
            )
        self.pg = pg
        self.takes_shorter = any(f"cpu:{name}" in backends.split(",") for name in _TAKE_SHORTER)
        self.rank, self.size = pg.rank(), pg.size()
        self.timeout, self.line = timeout, line
        ids = host_ids_of(pg, timeout=timeout, what=what)
        self.hosts, self.apart = number_hosts(ids), why_apart(ids)

    def send(self, tensor: Tensor, dst: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Starts to send `tensor` to rank `dst`, as bytes: any dtype and shape, contiguous.

        It meets the `recv` with the same tag, in order among equal tags (NCCL has no tags: in order
        altogether). A tensor without elements is not sent, just as `recv` does not wait for one.
        """
        self._check(dst, tag)
        return self._start(self.pg.send, _as_bytes(tensor), dst, tag, f"send to rank {dst}")

    def recv(self, tensor: Tensor, src: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Starts to receive into `tensor`, contiguous, from rank `src`, which sends as many bytes.

        Where the group `takes_shorter` it may send fewer, which come first in `tensor`; never more.
        """
        self._check(src, tag)
        return self._start(self.pg.recv, _as_bytes(tensor), src, tag, f"receive from rank {src}")

    def agree(self, what: str, value: str, *, timeout: float | None = None, line: Line | None = None) -> None:
        """Returns when all ranks are here with the same `what` and `value`: a text of what they will do.

        `PeerMismatch`, on every rank, when they differ: it names the ranks and what they said. Only hashes
        travel while ranks agree; it is also a barrier. Agreements of one `line` come in the same order on all ranks;
        those of different lines are independent.
        """
        line, deadline = line or self.line, Deadline.after(self.timeout if timeout is None else timeout)
        with turn(self.pg, line.title, deadline):
            self._agree(what, value, line, deadline)

    def lease(self, what: str, value: str, *, tags: int, line: Line) -> Lease:
        """`agree`, and `tags` tags for what all ranks are about to do, until each releases them.

        `WeftError`, on every rank, when too much is under way already.
        """
        deadline = Deadline.after(self.timeout)
        with turn(self.pg, line.title, deadline):
            return ledger_of(self.pg, line).lease(self._agree(what, value, line, deadline), tags)

    def tell(self, what: str, mine: str, *, most: int = MOST_BYTES) -> list[str]:
        """What each rank gave as `mine`, a text of up to `most` bytes, in rank order. Collective."""
        deadline = Deadline.after(self.timeout)
        with turn(self.pg, self.line.title, deadline):
            found = tell(self, mine.encode(), tag=self.line.mark(Mark.TEXT), deadline=deadline, what=what, most=most)
        return [as_text(data, what, rank) for rank, data in enumerate(found)]

    def barrier(self, what: str = "barrier", *, timeout: float | None = None) -> None:
        """Returns when all ranks are here; `PeerMismatch` when one of them is at an `agree` instead."""
        self.agree("barrier", what, timeout=timeout)

    def break_off(self) -> None:
        """Ends all waits of this rank in the process group, and those of its peers for it, now: it is unusable then.

        gloo closes all connections that a rank has in a group when one of its waits runs out of time.
        """
        close_connections(self.pg, self.line)

    def _agree(self, what: str, value: str, line: Line, deadline: Deadline) -> list[bytes]:
        """Compares, and returns what each rank claims of the line's tags."""
        mine = f"{what}: {value}".encode()
        digest = hashlib.sha256(mine).digest()
        word, size = digest + ledger_of(self.pg, line).claim(), _DIGEST_BYTES + CLAIM_BYTES
        about, tag = f"agreement on {what}", line.mark(Mark.DIGEST)
        words = swap(self, word, [size] * self.size, tag=tag, deadline=deadline, what=about)
        if any(word[:_DIGEST_BYTES] != digest for word in words):
            about = f"the mismatch in {what}"
            texts = tell(self, mine[:MOST_BYTES], tag=line.mark(Mark.TEXT), deadline=deadline, what=about)
            raise PeerMismatch(differences([as_text(text, about, rank) for rank, text in enumerate(texts)]))
        return [word[_DIGEST_BYTES:] for word in words]

    def _check(self, peer: int, tag: int) -> None:
        refuse_unusable(self.pg)
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"peer is rank {peer}, expected 0 to {self.size - 1} except this rank, {self.rank}; "
                "ranks count within the group"
            )
        if not 0 <= tag < FIRST_TAG and type(tag) is not Tag:
            raise ValueError(f"tag is {tag}, expected 0 <= tag < {FIRST_TAG}; higher ones are weft's own")

    # Straight to the process group: dist.isend and dist.irecv check again what is checked here, and cost as much
    # as the message itself where it is short.
    def _start(self, call: Callable[..., Work], data: Tensor, peer: int, tag: int, route: str) -> Transfer:
        if data.numel() == 0:
            return Transfer(None, self, route=route)
        try:
            return Transfer(call([data], peer, tag), self, route=route)
        except RuntimeError as error:
            raise _lost(route, error) from error


def close_connections(pg: ProcessGroup, line: Line = Line.GROUP) -> None:
    """Closes all connections of this rank in a group, by a wait that runs out of time."""
    if pg.size() > 1:
        with suppress(RuntimeError):
            nothing, never = torch.empty(1, dtype=torch.uint8, device="cpu"), line.mark(Mark.NEVER)
            pg.recv([nothing], (pg.rank() + 1) % pg.size(), never).wait(timedelta(milliseconds=1))


class Transfer:
    """A message under way; `wait` for it, and keep the tensor unchanged until then.

    A transfer that is dropped without a wait may never be sent. gloo cannot say whether a message has arrived
    without waiting for it, so there is no test for completion.
    """

    def __init__(self, work: Work | None, group: Group, *, route: str) -> None:
        self._work, self._group, self._route = work, group, route
        self._is_interrupted = False

    def wait(self, *, what: str, timeout: float | None = None) -> None:
        """Returns when the tensor may be used again (sent) or holds the message (received).

        `PeerTimeout` after `timeout` seconds (the group's own if not given), `PeerLost` when the connection
        closed; both say `what`, the direction and the peer. Waiting again for a finished transfer returns at
        once. A signal handler that raises (Ctrl-C) ends the wait, and breaks the group off.
        """
        self.wait_until(Deadline.after(self._group.timeout if timeout is None else timeout), what=what)

    def wait_until(self, deadline: Deadline, *, what: str) -> None:
        """`wait` with a deadline that several transfers share."""
        if self._is_interrupted:
            raise PeerLost(f"{what} ({self._route}): an earlier wait was interrupted; a new process group is needed")
        if self._work is not None:
            listening(partial(self._wait, self._work, deadline, what), on_interrupt=self._interrupt)

    def _interrupt(self) -> None:
        self._is_interrupted = True
        self._group.break_off()

    def _wait(self, work: Work, deadline: Deadline, what: str) -> None:
        # Rounded up, and 1 at least: gloo counts milliseconds, and takes 0 for its own default.
        milliseconds = max(1, math.ceil(1000 * deadline.left()))
        try:
            work.wait(timedelta(milliseconds=milliseconds))
        except RuntimeError as error:
            if deadline.left() == 0.0:
                raise PeerTimeout(f"{what} ({self._route})", seconds=deadline.seconds) from error
            raise _lost(f"{what} ({self._route})", error) from error
        self._work = None  # gloo would wait for a second message


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


def as_text(data: bytes, what: str, rank: int) -> str:
    """What a rank said, once it is a text.

    >>> as_text(b"four steps", "a plan", 1)
    'four steps'
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PeerMismatch(f"rank {rank} sent {len(data)} bytes as {what}, expected UTF-8: {error}") from error


def _lost(what: str, error: RuntimeError) -> PeerLost:
    reason = str(error).splitlines()[0]
    return PeerLost(
        f"{what}: the connection failed: {reason}. The rank died, or it gave up and its own error says why; "
        "a new process group is needed to go on"
    )


def differences(texts: Sequence[str]) -> str:
    """Who says what, at the first line that is not the same on all ranks.

    >>> print(differences(["plan: 4 steps", "plan: 5 steps", "plan: 4 steps"]))
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


def make_way_for_compute() -> int:
    """Lets this process's gloo threads wait for a time slice; returns how many there are. Where it can't: 0.

    For threads that exist, so after the process group is made; again is harmless.
    """
    if _leave_alone.get():
        return 0
    found = 0
    with suppress(OSError, AttributeError):  # no /proc, or no such policy: then it stays as it is
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that ended meanwhile, or that we may not change
                if (task / "comm").read_text().strip() in _LOOPS:
                    os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
                    found += 1
    return found


@contextmanager
def keep_gloo_priority() -> Iterator[None]:
    """Process groups that weft first meets in this block leave gloo's threads as they are.

    Otherwise the first call on a group makes all gloo threads of the process batch threads, those of other groups and
    of torch's own collectives among them: a message alone then takes a little longer where all cores are busy.

        with weft.overlap.keep_gloo_priority():
            y = weft.matmul_all_reduce(x, w, group=group)
    """
    token = _leave_alone.set(True)
    try:
        yield
    finally:
        _leave_alone.reset(token)
