"""Which ranks share a host, and memory that they all map: a rank writes a tile straight into a peer's buffer.

    header page | rank a: counters, data | rank b: counters, data | ...        each part starts on a page

The host's first rank makes the memory with memfd_create, which has no name: nothing can be left behind,
whoever is killed when. Its peers open it through /proc, check a random token, map it and say so; then every
descriptor is closed and only the mappings hold the memory. A named file in /dev/shm was rejected: a kill
between its creation and its unlinking leaks it, and its size is bounded by that mount.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft.comm.deadline import Deadline
from weft.comm.signal import Counters
from weft.comm.tags import Line
from weft.comm.tell import Meeting, know_all, meeting
from weft.errors import PeerMismatch, WindowUnavailable

_NAME = "weft-window"
_TOKEN_BYTES = 16
_MEMORY = " "  # between what names the card and what names the memory, in a host's id


class Window:
    """One buffer for each rank of this host, mapped by all of them, and counters to signal with.

    `rank` always counts within the group. All ranks of the group create a window together; those on one host
    share:

        with Window.create(pg, 1 << 20, counters_per_rank=1, timeout=30.0) as window:
            window.view(peer, (256, 1024), torch.float32).copy_(tile)
            window.counters(peer).add(0)
            window.counters(window.rank).wait(0, 1, timeout=30.0, what=f"tile from rank {peer}")

    The memory is all 0 at first. It lives as long as any view of it: closing a window while a view is in use
    is safe.
    """

    def __init__(self, memory: Tensor, segments: Segments, *, rank: int, ranks: tuple[int, ...]) -> None:
        self.rank = rank
        self.ranks = ranks
        self._segments = segments
        self._memory: Tensor | None = memory

    @classmethod
    def create(
        cls,
        pg: ProcessGroup,
        bytes_per_rank: int,
        *,
        timeout: float,
        counters_per_rank: int = 0,
        store: Store | None = None,
        line: Line = Line.GROUP,
    ) -> Window:
        """Makes a window of `bytes_per_rank` data bytes and `counters_per_rank` counters for each rank.

        Collective over `pg`, with the same sizes on all ranks (`PeerMismatch` otherwise). All ranks get their
        window or none does: a rank that cannot map it, or does not answer within `timeout` seconds, ends the
        call on all ranks. `store` is for groups that torch.distributed does not know; it must be private to
        this group. Windows of one `line` are made in the same order on all ranks.
        """
        name, steps = f"window creation for {line.title}", ("enter", "offer", "mapped")
        with meeting(pg, name, steps, deadline=Deadline.after(timeout), store=store) as held:
            host = host_id()
            entries = held.gather("enter", [host, index(bytes_per_rank), index(counters_per_rank)])
            _check_sizes([entry[1:] for entry in entries], held.rank)
            ranks = tuple(rank for rank, entry in enumerate(entries) if entry[0] == host)
            segments = Segments(bytes_per_rank, counters_per_rank, len(ranks))
            return cls(_share(held, ranks, segments.total), segments, rank=held.rank, ranks=ranks)

    @property
    def local(self) -> Tensor:
        """This rank's own buffer: uint8 [bytes_per_rank]."""
        return self.peer(self.rank)

    def peer(self, rank: int) -> Tensor:
        """The buffer of `rank`, which must be on this host: uint8 [bytes_per_rank]."""
        return self._part(self._segments.data(self._index(rank)), self._segments.bytes_per_rank)

    def view(self, rank: int, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0) -> Tensor:
        """A tensor of `shape` and `dtype` at byte `offset` of the buffer of `rank`."""
        nbytes = math.prod(shape) * dtype.itemsize
        limit = self._segments.bytes_per_rank
        if nbytes < 0 or offset < 0 or offset % dtype.itemsize or offset + nbytes > limit:
            raise ValueError(
                f"view of shape {tuple(shape)} and {dtype} is {nbytes} bytes at offset {offset}, expected an "
                f"offset that is a multiple of {dtype.itemsize}, and an end of at most {limit}; "
                "create the window with more bytes_per_rank"
            )
        return self.peer(rank)[offset : offset + nbytes].view(dtype).view(tuple(shape))

    def counters(self, rank: int) -> Counters:
        """The counters of `rank`, which must be on this host; by custom the owner waits and its peers add."""
        start, count = self._segments.counters(self._index(rank)), self._segments.counters_per_rank
        return Counters.over(self._part(start, 4 * count).view(torch.int32))

    def close(self) -> None:
        """Lets go of the memory; views taken before stay valid. Not collective. Closing twice is harmless."""
        self._memory = None

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _index(self, rank: int) -> int:
        if rank not in self.ranks:
            raise ValueError(
                f"rank is {rank}, expected one of {self.ranks}, which share a host with rank {self.rank}; "
                "a rank on another host is reached through Group.send and Group.recv"
            )
        return self.ranks.index(rank)

    def _part(self, start: int, nbytes: int) -> Tensor:
        if self._memory is None:
            raise ValueError("the window is closed, expected an open one; take views before close()")
        return self._memory[start : start + nbytes]

    def __repr__(self) -> str:
        s = self._segments
        state = "closed" if self._memory is None else "open"
        return (
            f"Window(rank={self.rank}, ranks={self.ranks}, bytes_per_rank={s.bytes_per_rank}, "
            f"counters_per_rank={s.counters_per_rank}, {state})"
        )


@dataclass(frozen=True)
class Segments:
    """Where each part of a window lies, in bytes from its start.

    >>> s = Segments(bytes_per_rank=5000, counters_per_rank=3, ranks=2)
    >>> s.counters(1), s.data(1), s.total
    (16384, 20480, 28672)
    """

    bytes_per_rank: int
    counters_per_rank: int
    ranks: int

    def counters(self, index: int) -> int:
        """Start of the counters of the host's `index`-th rank."""
        return mmap.PAGESIZE + index * (_pages(4 * self.counters_per_rank) + _pages(self.bytes_per_rank))

    def data(self, index: int) -> int:
        """Start of the data of the host's `index`-th rank."""
        return self.counters(index) + _pages(4 * self.counters_per_rank)

    @property
    def total(self) -> int:
        """Size of the whole mapping."""
        return self.counters(self.ranks)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _check_sizes(sizes: list[list[int]], rank: int) -> None:
    """Sizes are compared before they are judged, so that all ranks take the same way out."""
    for other, theirs in enumerate(sizes):
        if theirs != sizes[rank]:
            raise PeerMismatch(
                "window sizes (bytes_per_rank, counters_per_rank) differ: "
                f"rank {rank} asks for {tuple(sizes[rank])}, rank {other} for {tuple(theirs)}; "
                "give the same sizes on all ranks"
            )
    nbytes, counters = sizes[rank]
    if nbytes < 0 or counters < 0 or nbytes + counters == 0:
        raise ValueError(
            f"bytes_per_rank is {nbytes} and counters_per_rank {counters}, expected 0 or more, and not both 0"
        )


class _NoMemoryError(Exception):
    """Why this rank has no mapping; told to all ranks. (Not an OSError, which `PeerTimeout` is as well.)"""


def _share(meeting: Meeting, ranks: tuple[int, ...], size: int) -> Tensor:
    """The mapping of this host, uint8 [size]; returns when every rank of the group has one, or raises."""
    with ExitStack() as files:
        try:
            if meeting.rank == ranks[0]:
                memory = _offer(meeting, size, files)
            else:
                memory = _accept(meeting, ranks[0], size, files)
            failure = None
        except _NoMemoryError as error:
            failure = str(error)
        failures = meeting.gather("mapped", failure)
    for rank, reason in enumerate(failures):
        if reason is not None:
            raise WindowUnavailable(f"no window of {size} bytes on rank {rank}: {reason}")
    return memory


def _offer(meeting: Meeting, size: int, files: ExitStack) -> Tensor:
    """Makes the memory and posts where it is: process, descriptor, and the token in its first bytes."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        files.callback(os.close, fd)
        os.ftruncate(fd, size)
        # Nobody who has the descriptor can cut the memory while others use it.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, token, 0)
        memory = _map(fd, size)
    except (OSError, OverflowError) as error:
        meeting.post("offer", None)
        raise _NoMemoryError(str(error)) from error
    # /proc/self and not getpid: the number that peers who see the same /proc can follow.
    meeting.post("offer", [os.readlink("/proc/self"), fd, token.hex()])
    return memory


def _accept(meeting: Meeting, first: int, size: int, files: ExitStack) -> Tensor:
    """Maps the memory that rank `first` offers, once it is proven to be that."""
    (offer,) = meeting.read("offer", [first])
    if offer is None:
        raise _NoMemoryError(f"rank {first} could not make it")
    try:
        pid, number, token = checked_offer(offer)
        path = f"/proc/{pid}/fd/{number}"
        # Looked at before it is opened: in another PID namespace this could be anybody's pipe or device.
        name = os.readlink(path)
        if not name.startswith(f"/memfd:{_NAME}"):
            raise OSError(f"{path} is {name}")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        files.callback(os.close, fd)
        if os.fstat(fd).st_size != size or os.pread(fd, _TOKEN_BYTES, 0).hex() != token:
            raise OSError(f"{path} is another window")
        return _map(fd, size)
    except OSError as error:
        raise _NoMemoryError(
            f"{error}, expected the memory of rank {first}: it died, or runs in another PID namespace or as "
            "another user; start the ranks of a host in one PID namespace and as one user"
        ) from error


def checked_offer(offer: object) -> tuple[int, int, str]:
    """The process, descriptor and token that a rank offers; `OSError` for anything else that the store may hold.

    >>> checked_offer(["17", 4, "00" * 16])
    (17, 4, '00000000000000000000000000000000')
    """
    if isinstance(offer, list) and len(offer) == 3:
        pid, number, token = offer
        digits = isinstance(pid, str) and pid.isascii() and pid.isdecimal() and len(pid) < 20
        if digits and type(number) is int and 0 <= number < 1 << 31 and isinstance(token, str):
            return int(pid), number, token
    raise OSError(f"{str(offer)[:100]!r} was offered")


def _map(fd: int, size: int) -> Tensor:
    # from_file closes its descriptor, where the mmap module keeps one for each mapping. But it leaks that
    # descriptor when there is no room for the mapping: hence the trial.
    mmap.mmap(fd, size).close()
    try:
        with torch.inference_mode(False):  # else only code in inference mode could write to it
            return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


def host_id() -> str:
    """A name that two processes have in common exactly if they run on one host: share a network card, and memory.

    The kernel's boot id tells machines apart, the network namespace tells the lab's hosts apart on one
    machine. The hostname is not used: containers of one machine have different ones, and cloned images the
    same. Containers may share the card and still not see each other's processes, which is how memory is shared:
    what is apart in that, or runs as another user, counts as another host.

    >>> host_id() == host_id()
    True
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    net, pid, user = map(_namespace, ("net", "pid", "user"))
    return f"{boot}/net:{net}{_MEMORY}pid:{pid}/user:{user}:{os.geteuid()}"


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except FileNotFoundError:  # a kernel without namespaces of this kind
        return 0


def hosts_of(pg: ProcessGroup, *, timeout: float) -> tuple[int, ...]:
    """The host index of each rank of `pg`, the same on every rank. The first call waits for all ranks of `pg`."""
    return number_hosts(host_ids_of(pg, timeout=timeout, what="hosts_of"))


def host_ids_of(pg: ProcessGroup, *, timeout: float, what: str) -> list[str]:
    """The `host_id` of each rank of `pg`, as `hosts_of`. A rank stays on its host, so that each says it once.

    `what` is what the user called, for errors.
    """
    return know_all(pg, "hosts", host_id(), deadline=Deadline.after(timeout), what=what)


def number_hosts(ids: Sequence[str]) -> tuple[int, ...]:
    """The host index of each rank from its host id; hosts are numbered in the order of their first rank.

    >>> number_hosts(["b", "b", "a", "b"])
    (0, 0, 1, 0)
    """
    index = {name: i for i, name in enumerate(dict.fromkeys(ids))}
    return tuple(index[name] for name in ids)


def why_apart(ids: Sequence[str]) -> str:
    """Why ranks of one machine count as several hosts; "" where none do.

    >>> why_apart(["a/net:1 pid:2/user:3:0", "a/net:1 pid:9/user:3:0"])
    'ranks 0, 1 share a network card but not memory: other PID namespaces or users'
    """
    cards: dict[str, list[int]] = {}
    for rank, name in enumerate(ids):
        cards.setdefault(name.split(_MEMORY)[0], []).append(rank)
    split = [ranks for ranks in cards.values() if len({ids[rank] for rank in ranks}) > 1]
    if not split:
        return ""
    who = "; ranks ".join(", ".join(map(str, ranks)) for ranks in split)
    return f"ranks {who} share a network card but not memory: other PID namespaces or users"
