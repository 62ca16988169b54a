"""All transfers of one rank in one step: sent once the tensor exists, received before it is needed.

    the caller's thread      computes; `send` and `open` return at once; it waits for the `arrival` of what it needs
    a thread for each        sends or receives the header, plans, moves the bytes, and hands the tensor over
    channel that is in use

Forwards, a header with the shape goes first; a gradient has the shape of its tensor, which both sides know. Of the
sends that are ready on a rank the most urgent goes first, in the order of the lowered schedule.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from weft._torch import version_of
from weft.comm.deadline import Deadline
from weft.comm.tags import Line
from weft.comm.tell import swap_tensors
from weft.errors import LONGEST_SECONDS, PeerMismatch
from weft.layout import Layout
from weft.pipeline.schedules.lowered import Direction, TensorTransfer
from weft.pipeline.transport.channels import Channel, Channels, Payload
from weft.pipeline.transport.routes import Message, RouteLayouts, Routes
from weft.pipeline.transport.threads import Future, PriorityLock
from weft.reshard.executor.staging import Stopped
from weft.timeline import record

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

Shape = tuple[tuple[int, ...], torch.dtype]  # of a whole tensor, with its type


class Exchange:
    """The transfers of one step of this rank, whose stages send and receive them."""

    def __init__(
        self,
        channels: Channels,
        routes: Routes,
        *,
        step: int,
        train: bool,
        recorder: record.Trace | None,
        in_turn: bool,
    ) -> None:
        """`in_turn` lets urgent sends go first; receivers must then be open whatever they compute."""
        self._channels, self._routes, self._step, self._train = channels, routes, step, train
        self._recorder, self._in_turn = recorder, in_turn
        self._priority = PriorityLock(channels.stop)
        self._lock = threading.Lock()
        self._arrived: dict[TensorTransfer, Future[Tensor]] = {}
        self._shapes: dict[tuple[int, str, int], Future[Shape]] = {}
        self._sent: dict[TensorTransfer, Future[None]] = {}
        self._incoming: set[TensorTransfer] = set()
        for message in routes.messages.values():
            layouts = channels.layouts[message.route]
            if channels.rank in layouts.dst.mesh.ranks:
                self._incoming.add(message.transfer)
            if channels.rank in layouts.src.mesh.ranks:
                self._sent[message.transfer] = Future()

    # What the caller's thread does -----------------------------------------------------------------------------

    def open_first(self) -> None:
        """Opens every channel of this rank for its first tensor."""
        for route, messages in self._routes.of.items():
            for message in messages[: self._routes.channels[route]]:
                if message.transfer in self._incoming:
                    self.open(message)

    def open(self, message: Message) -> None:
        """Begins to receive; the caller goes on."""
        work = self._receive_gradient if message.route.direction is Direction.GRADIENT else self._receive
        self._put(message, work)

    def announce(self, producer: int, tensor: str, microbatch: int, local: Tensor, index: int) -> None:
        """Tells of a tensor that a stage of this rank has made; `index` is its number among all such tensors."""
        every = self._channels.layouts.items()
        layouts = next(x for r, x in every if (r.producer, r.tensor, r.source) == (producer, tensor, producer))
        known, shape = self._shape(producer, tensor, microbatch), tuple(local.shape)
        if not is_cut(layouts.src):
            known.set((shape, local.dtype))
            return

        def work() -> None:
            known.set((self._gather_shape(layouts, shape, local.dtype, index), local.dtype))

        self._channels.threads.start(
            lambda: self._guarded(work, TensorTransfer(producer, tensor, microbatch, producer, producer + 1))
        )

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begins to send; the tensor must not change until the step ends: the step fails if it does."""
        kept = KeptTensor.of(tensor, str(message.transfer))
        self._put(message, lambda one: self._send(one, kept))

    def arrival(self, transfer: TensorTransfer) -> Future[Tensor]:
        """Where the tensor of an incoming transfer will be."""
        with self._lock:
            return self._arrived.setdefault(transfer, Future())

    def departure(self, transfer: TensorTransfer) -> Future[None]:
        """Set when an outgoing transfer is done."""
        return self._sent[transfer]

    def release(self, message: Message) -> None:
        """The tensor is in use: its channel opens for the next one, and nothing here holds it any more."""
        with self._lock:
            del self._arrived[message.transfer]
        later = self._routes.after(message)
        if later is not None:
            self.open(later)

    def under_way(self) -> list[TensorTransfer]:
        """Outgoing transfers that are not done."""
        return [transfer for transfer, sent in self._sent.items() if not sent.is_set]

    def check(self) -> None:
        """Raises if a transfer has failed."""
        if self._channels.stop.is_set():
            raise Stopped

    # What the threads do ---------------------------------------------------------------------------------------

    def _put(self, message: Message, work: Callable[[Message], None]) -> None:
        self._channel(message).put(lambda: self._guarded(lambda: work(message), message.transfer))

    def _guarded(self, work: Callable[[], None], what: TensorTransfer) -> None:
        if self._channels.stop.is_set():
            return
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._channels.fail_transfer(error, what, self._routes)

    def _shape(self, producer: int, tensor: str, microbatch: int) -> Future[Shape]:
        with self._lock:
            return self._shapes.setdefault((producer, tensor, microbatch), Future())

    def _known_shape(self, transfer: TensorTransfer) -> Shape:
        known = self._shape(transfer.producer, transfer.tensor, transfer.microbatch)
        return known.wait(self._channels.stop)

    def _gather_shape(
        self, layouts: RouteLayouts, local: tuple[int, ...], dtype: torch.dtype, index: int
    ) -> tuple[int, ...]:
        """The whole shape, from all ranks of the stage."""
        connections, ranks = self._channels.connections, layouts.src.mesh.ranks
        mine = Header(self._step, self._train, dtype, local).to_tensor()
        found = {connections.member(rank): torch.empty(HEADER_LENGTH, dtype=torch.int64) for rank in ranks}
        found[connections.rank] = mine
        swap_tensors(
            connections.short,
            dict.fromkeys(found, mine),
            found,
            tag=Line.NOTES.data(self._channels.total + index),  # after those of the channels' headers
            deadline=Deadline.after(LONGEST_SECONDS),
            what=f"the shape of {layouts.name}",
            ranks=found,
        )
        headers = {rank: self._checked(Header.from_tensor(found[connections.member(rank)]), rank) for rank in ranks}
        for rank, header in headers.items():
            if header.dtype != dtype:
                raise PeerMismatch(
                    f"{layouts.name} is {dtype} on rank {self._channels.rank} and {header.dtype} on rank {rank}; "
                    "expected the shards of one tensor to have one type"
                )
        return whole_shape(layouts.src, {rank: header.shape for rank, header in headers.items()}, layouts.name)

    def _send(self, message: Message, kept: KeptTensor) -> None:
        channels, channel = self._channels, self._channel(message)
        shape, dtype = self._known_shape(message.transfer)
        headers = []
        if message.route.direction is Direction.FORWARD or channels.payload is Payload.SIGNALS:
            header = Header(self._step, self._train, dtype, shape).to_tensor()
            listeners = channel.layouts.listeners(channels.rank)
            headers = [channels.connections.send_header(header, rank, channel.number) for rank in listeners]
        if channels.payload is Payload.TENSORS:
            job = channel.assign(shape, dtype)
            with self._priority.held(message.urgency) if self._in_turn else nullcontext():
                start = record.now()
                channel.move(job, src=kept.tensor)
                self._record("send", message, start, kept.tensor.nbytes)
        kept.unchanged()
        for transfer in headers:
            transfer.wait(what=f"the announcement of {message.transfer}", timeout=LONGEST_SECONDS)
        self._sent[message.transfer].set(None)

    def _receive(self, message: Message) -> None:
        header = self._receive_header(message)
        transfer = message.transfer
        # The source of a tensor is told by it as well: who passes it on needs its shape, and so does its gradient.
        self._shape(transfer.producer, transfer.tensor, transfer.microbatch).set((header.shape, header.dtype))
        tensor = self._receive_tensor(message, header.shape, header.dtype)
        for other in self._routes.passed_on.get(transfer, ()):
            self.send(other, tensor)
        self.arrival(transfer).set(tensor)

    def _receive_gradient(self, message: Message) -> None:
        shape, dtype = self._known_shape(message.transfer)
        if self._channels.payload is Payload.SIGNALS:
            self._receive_header(message)
        self.arrival(message.transfer).set(self._receive_tensor(message, shape, dtype))

    def _receive_header(self, message: Message) -> Header:
        channels, channel = self._channels, self._channel(message)
        header = torch.empty(HEADER_LENGTH, dtype=torch.int64)
        announcer = channel.layouts.announcer(channels.rank)
        what = f"the announcement of {message.transfer}"
        transfer = channels.connections.receive_header(header, announcer, channel.number)
        transfer.wait(what=what, timeout=LONGEST_SECONDS)
        return self._checked(Header.from_tensor(header), announcer)

    def _checked(self, header: Header, rank: int) -> Header:
        """The header, if the rank that it comes from is in the same call."""
        if (header.step, header.train) != (self._step, self._train):
            here, there = call_name(self._step, self._train), call_name(header.step, header.train)
            raise PeerMismatch(
                f"rank {self._channels.rank} is in {here} and rank {rank} in {there}; call step and eval_step in the "
                "same order on all ranks"
            )
        return header

    def _receive_tensor(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        channels, channel = self._channels, self._channel(message)
        local = channel.layouts.dst.local_shape(shape, channels.rank)
        device = channels.devices[message.route.target]
        begun = [record.now()]
        if message.route.direction is Direction.GRADIENT:
            begun.clear()  # it is waited for long before it comes
        if channels.payload is Payload.SIGNALS:
            self._record("recv", message, record.now(), 0)
            return channels.zeros.setdefault((local, dtype), torch.zeros(local, dtype=dtype, device=device))
        job = channel.assign(shape, dtype)
        tensor = channels.buffers.take(local, dtype, device)
        channel.move(job, dst=tensor, on_bytes=lambda _: begun.append(record.now()))
        self._record("recv", message, begun[0] if begun else record.now(), tensor.nbytes)
        return tensor

    def _channel(self, message: Message) -> Channel:
        return self._channels.of[self._routes.channel_of(message)]

    def _record(self, kind: str, message: Message, start: float, nbytes: int) -> None:
        if self._recorder is not None:
            lane = "out" if kind == "send" else "in"
            self._recorder.add(
                kind,  # type: ignore[arg-type]
                str(message.transfer),
                lane=lane,
                start=start,
                end=record.now(),
                bytes=nbytes,
            )


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that others will read later: they must find what was there when it was kept."""

    tensor: Tensor
    version: int
    name: str

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> KeptTensor:
        """`name` is for errors."""
        return cls(tensor, version_of(tensor), name)

    def unchanged(self) -> Tensor:
        """The tensor; raises if it was written to meanwhile."""
        if version_of(self.tensor) != self.version:
            raise ValueError(
                f"{self.name} was written to while other stages were to read it, expected it to stay as it was until "
                "the end of the step; return a new tensor from each forward pass, and write to a copy of an input"
            )
        return self.tensor


def call_name(step: int, train: bool) -> str:
    """Which call a rank is in, for errors."""
    return f"{'step' if train else 'eval_step'} number {step}"


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
