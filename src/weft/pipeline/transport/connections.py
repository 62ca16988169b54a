"""How the ranks of a pipeline reach each other: process groups of their own, and what is said there beside tensors.

A gloo connection takes messages one after the other, and so does the receiver's word that it is ready. A gradient
that comes down would wait for the activation that goes up on the same connection, though the card could do both at
once. Hence a group for messages to higher ranks, one for those to lower ranks, and one for short messages: the
*header* of a tensor, the end of a step, and the loss of a peer.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import gloo_group
from weft.comm import Group, Transfer
from weft.comm.deadline import Deadline
from weft.comm.tags import DEFAULT_TAG, Line, Mark
from weft.comm.tell import Meeting
from weft.errors import LONGEST_SECONDS, PeerMismatch, WeftError
from weft.layout import Layout


class Connections:
    """Three groups over the ranks of `pg`. Making them is collective over it; a failure leaves `pg` itself alone.

    `send` and `recv` are for the chunks of tensors, between ranks as the groups number them: a `comm.tell.Endpoint`.
    The other messages name ranks as `pg`'s world does.
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float) -> None:
        self.world = tuple(dist.get_process_group_ranks(pg))
        name = _agree_on_name(pg, timeout)
        self._made: list[ProcessGroup] = []
        try:
            self._up, self._down, self.short = (self._make(f"{name}/{use}", timeout) for use in ("up", "down", "short"))
        except BaseException:
            self._destroy()
            raise
        self.rank, self.size, self.hosts = self._up.rank, self._up.size, self._up.hosts

    def _make(self, name: str, timeout: float) -> Group:
        self._made.append(gloo_group(name, self.world, timeout=timeout))
        group = Group(self._made[-1], timeout=timeout)
        # gloo connects when a message is first sent, and cannot tell that a rank died before that.
        group.barrier("pipeline")
        return group

    def _destroy(self) -> None:
        for pg in self._made:
            with suppress(ValueError):  # destroyed already, with all groups of the process
                dist.destroy_process_group(pg)
        self._made = []

    def member(self, rank: int) -> int:
        """The groups' number of a rank."""
        return self.world.index(rank)

    def send(self, tensor: Tensor, dst: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Starts to send on the connection for that direction."""
        return (self._up if dst > self.rank else self._down).send(tensor, dst, tag=tag)

    def recv(self, tensor: Tensor, src: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Starts to receive on the connection for that direction."""
        return (self._up if src < self.rank else self._down).recv(tensor, src, tag=tag)

    def send_header(self, header: Tensor, rank: int, channel: int) -> Transfer:
        """Starts to announce the next tensor of a channel to a rank."""
        return self.short.send(header, self.member(rank), tag=Line.NOTES.data(channel))

    def receive_header(self, header: Tensor, rank: int, channel: int) -> Transfer:
        """Starts to receive such an announcement from a rank."""
        return self.short.recv(header, self.member(rank), tag=Line.NOTES.data(channel))

    def send_end(self, call: Tensor, rank: int) -> Transfer:
        """Starts to tell a rank which step this one has come to the end of; it meets `receive_end`."""
        return self.short.send(call, self.member(rank), tag=Line.NOTES.mark(Mark.END))

    def receive_end(self, call: Tensor, rank: int) -> Transfer:
        """Starts to hear which step a rank has come to the end of."""
        return self.short.recv(call, self.member(rank), tag=Line.NOTES.mark(Mark.END))

    def wait_for_loss(self, rank: int) -> None:
        """Returns when the connection to a rank is gone: it died, or gave up, or all is over."""
        with suppress(WeftError):
            never = self.short.recv(torch.empty(1), self.member(rank), tag=Line.NOTES.mark(Mark.WATCH))
            never.wait(what="nothing", timeout=LONGEST_SECONDS)

    def break_off(self) -> None:
        """Ends all waits of this rank, and those of its peers for it, now."""
        with torch.device("cpu"):
            for group in (self.short, self._up, self._down):
                group.break_off()

    def close(self, *, together: bool) -> None:
        """Ends the groups; `together` once all ranks are here, since they close connections that others may use."""
        if together:
            with suppress(WeftError), torch.device("cpu"):
                self.short.barrier("end of the pipeline")
        # Who waits for a loss would otherwise sit in gloo until the interpreter ends, which aborts the process.
        self.break_off()
        self._destroy()


def _agree_on_name(pg: ProcessGroup, timeout: float) -> str:
    """A name that no group had before: that of the first rank. Collective over `pg`."""
    meeting = Meeting(pg, "pipeline", ("name",), deadline=Deadline.after(timeout), store=None)
    first = meeting.gather("name", secrets.token_hex(8))[0]
    return f"weft/pipeline/{int(first, 16):016x}"


_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_MOST_DIMS = 8
_MOST_BYTES = 1 << 40
HEADER_LENGTH = 4 + _MOST_DIMS


@dataclass(frozen=True)
class Header:
    """What is said about a tensor before it comes, as numbers: never a pickle.

    step:  of which step of the pipeline, counted from its making; odd calls are told from even by `train`
    train: whether a backward pass will follow
    """

    step: int
    train: bool
    dtype: torch.dtype
    shape: tuple[int, ...]

    def to_tensor(self) -> Tensor:
        """int64 [HEADER_LENGTH]."""
        if len(self.shape) > _MOST_DIMS or self.dtype not in _DTYPES or self._nbytes > _MOST_BYTES:
            raise ValueError(
                f"a tensor of shape {self.shape} and {self.dtype} leaves a stage, expected up to {_MOST_DIMS} dims, up "
                f"to {_MOST_BYTES >> 40} TiB, and one of "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            )
        rest = [0] * (_MOST_DIMS - len(self.shape))
        numbers = [self.step, int(self.train), _DTYPES.index(self.dtype), len(self.shape), *self.shape, *rest]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @property
    def _nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def from_tensor(cls, numbers: Tensor) -> Header:
        """What `to_tensor` made; `PeerMismatch` for numbers that it cannot have made, since memory is taken by them.

        >>> header = Header(3, True, torch.bfloat16, (2, 5))
        >>> Header.from_tensor(header.to_tensor()) == header
        True
        """
        step, train, dtype, ndim, *sizes = given = numbers.tolist()
        is_sound = step >= 0 and train in (0, 1) and 0 <= dtype < len(_DTYPES) and 0 <= ndim <= _MOST_DIMS
        if is_sound and min(sizes) >= 0 and not any(sizes[ndim:]):
            header = cls(step, bool(train), _DTYPES[dtype], tuple(sizes[:ndim]))
            if header._nbytes <= _MOST_BYTES and max(sizes) <= _MOST_BYTES:
                return header
        raise PeerMismatch(
            f"a peer announces a tensor as {given}, expected step, 0 or 1, a type below {len(_DTYPES)}, up to "
            f"{_MOST_DIMS} dims and as many sizes; the ranks run different versions of weft, or the message is damaged"
        )


def is_cut(layout: Layout) -> bool:
    """Whether one rank's shard does not tell the whole shape."""
    cut = {axis for axes in layout.dim_axes(_MOST_DIMS) for axis in axes}
    return any(layout.mesh.shape[axis] > 1 for axis in cut)


def whole_shape(layout: Layout, shards: Mapping[int, tuple[int, ...]], what: str) -> tuple[int, ...]:
    """The shape of the whole tensor from its shards' shapes by rank; they must be what the layout makes of it.

    >>> from torch.distributed.tensor import Shard
    >>> from weft.layout import Mesh
    >>> whole_shape(Layout(Mesh.of([0, 1], hosts=[0, 0]), [Shard(0)]), {0: (3, 4), 1: (2, 4)}, "x")
    (5, 4)
    """
    first = shards[layout.mesh.ranks[0]]
    for rank, given in shards.items():
        if len(given) != len(first):
            raise ValueError(
                f"{what} has the shape {given} on rank {rank} and {first} on rank {layout.mesh.ranks[0]}, expected "
                "shards of one tensor, with the same number of dims"
            )
    shape = tuple(_total(layout, shards, dim, axes) for dim, axes in enumerate(layout.dim_axes(len(first))))
    for rank, given in shards.items():
        expected = layout.local_shape(shape, rank)
        if given != expected:
            raise ValueError(
                f"{what} on rank {rank} has the shape {given}, expected {expected} as {layout.notation(len(shape))} of "
                f"{shape}; shards follow torch.chunk; for other sizes give ShardSizes in layouts="
            )
    return shape


def _total(layout: Layout, shards: Mapping[int, tuple[int, ...]], dim: int, axes: Sequence[int]) -> int:
    along = layout.mesh.array[tuple(slice(None) if axis in axes else 0 for axis in range(len(layout.mesh.shape)))]
    return sum(shards[int(rank)][dim] for rank in along.reshape(-1))
