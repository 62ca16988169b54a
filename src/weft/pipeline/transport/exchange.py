"""All transfers of one rank in one step: sent once the tensor exists, received before it is needed.

    the caller's thread      computes; `send` and `open` return at once, `take` waits for a tensor that it needs
    a thread for each        announces the shape, plans, moves the bytes, and hands the tensor over
    transfer under way

Forwards, the first message is a short note with the shape; a gradient has the shape of its tensor, which both sides
know. Of the sends that are ready on a rank the most urgent goes first, in the order of the lowered schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from weft._torch import version_of
from weft.comm.deadline import Deadline
from weft.comm.tags import Line
from weft.comm.tell import swap_tensors
from weft.errors import LONGEST_SECONDS, PeerMismatch
from weft.pipeline.predict.lowered import Direction, TensorTransfer
from weft.pipeline.transport.channel import Channel, Way
from weft.pipeline.transport.failure import call_name
from weft.pipeline.transport.links import Payload, TransferContext
from weft.pipeline.transport.routes import LENGTH, Header, Leg, Routes, is_cut, whole_shape
from weft.pipeline.transport.threads import Cell, Gate
from weft.reshard.executor.staging import Stopped
from weft.timeline import record


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


class Exchange:
    """The transfers of one step of this rank, whose stages send and receive them."""

    def __init__(
        self,
        context: TransferContext,
        routes: Routes,
        *,
        step: int,
        train: bool,
        recorder: record.Trace | None,
        in_turn: bool,
    ) -> None:
        """`in_turn` lets urgent sends go first; receivers must then be open whatever they compute."""
        self._in_turn = in_turn
        self._context, self._routes, self._step, self._train = context, routes, step, train
        self._recorder = recorder
        self._gate = Gate(context.stop)
        self._arrived: dict[TensorTransfer, Cell] = {}
        self._sent: dict[TensorTransfer, Cell] = {}
        self._shapes: dict[tuple[int, str, int], Cell] = {}
        self._lock = threading.Lock()
        mine = [leg for leg in routes.legs.values() if context.rank in context.ways[leg.route].dst.mesh.ranks]
        self._incoming = {leg.transfer for leg in mine}
        for leg in routes.legs.values():
            if context.rank in context.ways[leg.route].src.mesh.ranks:
                self._sent[leg.transfer] = Cell()

    # What the caller's thread does -----------------------------------------------------------------------------

    def open_first(self) -> None:
        """Opens every channel of this rank for its first tensor."""
        for route, legs in self._routes.of.items():
            for leg in legs[: self._routes.channels[route]]:
                if leg.transfer in self._incoming:
                    self.open(leg)

    def open(self, leg: Leg) -> None:
        """Begins to receive; the caller goes on."""
        work = self._receive_gradient if leg.route.direction is Direction.GRADIENT else self._receive
        self._put(leg, work)

    def announce(self, producer: int, tensor: str, microbatch: int, local: Tensor, index: int) -> None:
        """Tells of a tensor that a stage of this rank has made; `index` is its number among all such tensors."""
        routes = (r for r in self._context.ways if (r.producer, r.tensor, r.source) == (producer, tensor, producer))
        way = self._context.ways[next(routes)]
        cell, shape = self._shape(producer, tensor, microbatch), tuple(local.shape)
        if not is_cut(way.src):
            cell.set((shape, local.dtype))
            return

        def work() -> None:
            cell.set((self._gather_shape(way, shape, local.dtype, index), local.dtype))

        self._context.start(
            lambda: self._guarded(work, TensorTransfer(producer, tensor, microbatch, producer, producer + 1))
        )

    def send(self, leg: Leg, tensor: Tensor) -> None:
        """Begins to send; the tensor must not change until the step ends: the step fails if it does."""
        kept = KeptTensor.of(tensor, str(leg.transfer))
        self._put(leg, lambda one: self._send(one, kept))

    def arrival(self, transfer: TensorTransfer) -> Cell:
        """Where the tensor of an incoming transfer will be."""
        with self._lock:
            return self._arrived.setdefault(transfer, Cell())

    def departure(self, transfer: TensorTransfer) -> Cell:
        """Set when an outgoing transfer is done."""
        return self._sent[transfer]

    def release(self, leg: Leg) -> None:
        """The tensor is in use: its channel opens for the next one, and nothing here holds it any more."""
        with self._lock:
            del self._arrived[leg.transfer]
        later = self._routes.of[leg.route][leg.number + self._routes.channels[leg.route] :]
        if later:
            self.open(later[0])

    def under_way(self) -> list[TensorTransfer]:
        """Outgoing transfers that are not done."""
        return [transfer for transfer, cell in self._sent.items() if not cell.is_set]

    def check(self) -> None:
        """Raises if a transfer has failed."""
        if self._context.stop.is_set():
            raise Stopped

    # What the threads do ---------------------------------------------------------------------------------------

    def _put(self, leg: Leg, work: Callable[[Leg], None]) -> None:
        channel = self._context.channels[self._routes.first_channel[leg.route] + leg.channel]
        channel.put(lambda: self._guarded(lambda: work(leg), leg.transfer))

    def _guarded(self, work: Callable[[], None], what: TensorTransfer) -> None:
        if self._context.stop.is_set():
            return
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            self._context.fail(error, what)

    def _shape(self, producer: int, tensor: str, microbatch: int) -> Cell:
        with self._lock:
            return self._shapes.setdefault((producer, tensor, microbatch), Cell())

    def _known_shape(self, transfer: TensorTransfer) -> tuple[tuple[int, ...], torch.dtype]:
        cell = self._shape(transfer.producer, transfer.tensor, transfer.microbatch)
        return cell.wait(self._context.stop)  # type: ignore[return-value]

    def _gather_shape(self, way: Way, local: tuple[int, ...], dtype: torch.dtype, index: int) -> tuple[int, ...]:
        """The whole shape, from all ranks of the stage."""
        wires, ranks = self._context.wires, way.src.mesh.ranks
        note = Header(self._step, self._train, dtype, local).to_tensor()
        notes = {wires.member(rank): torch.empty(LENGTH, dtype=torch.int64) for rank in ranks}
        notes[wires.rank] = note
        swap_tensors(
            wires.notes,
            dict.fromkeys(notes, note),
            notes,
            tag=Line.NOTES.data(self._context.first_shape_note + index),
            deadline=Deadline.after(LONGEST_SECONDS),
            what=f"the shape of {way.name}",
            ranks=notes,
        )
        headers = {rank: self._checked(Header.from_tensor(notes[wires.member(rank)]), rank) for rank in ranks}
        for rank, header in headers.items():
            if header.dtype != dtype:
                raise PeerMismatch(
                    f"{way.name} is {dtype} on rank {self._context.rank} and {header.dtype} on rank {rank}; expected "
                    "the shards of one tensor to have one type"
                )
        return whole_shape(way.src, {rank: header.shape for rank, header in headers.items()}, way.name)

    def _send(self, leg: Leg, kept: KeptTensor) -> None:
        context, way = self._context, self._context.ways[leg.route]
        shape, dtype = self._known_shape(leg.transfer)
        notes = []
        if leg.route.direction is Direction.FORWARD or context.payload is Payload.SIGNALS:
            note = Header(self._step, self._train, dtype, shape).to_tensor()
            number = self._routes.first_channel[leg.route] + leg.channel
            notes = [context.wires.send_note(note, rank, number) for rank in _listeners(way, context.rank)]
        if context.payload is Payload.TENSORS:
            plan, script = context.planner.plan(way, shape, dtype)
            with self._gate.passing(leg.urgency) if self._in_turn else nullcontext():
                start = record.now()
                self._channel(leg).move(plan, script, kept.tensor, None)
                self._record("send", leg, start, kept.tensor.nbytes)
        kept.unchanged()
        for transfer in notes:
            transfer.wait(what=f"the announcement of {leg.transfer}", timeout=LONGEST_SECONDS)
        self._sent[leg.transfer].set()

    def _receive(self, leg: Leg) -> None:
        header = self._receive_note(leg)
        transfer = leg.transfer
        # The source of a tensor is told by it as well: who passes it on needs its shape, and so does its gradient.
        self._shape(transfer.producer, transfer.tensor, transfer.microbatch).set((header.shape, header.dtype))
        tensor = self._land(leg, header.shape, header.dtype)
        for other in self._routes.passed_on.get(transfer, ()):
            self.send(other, tensor)
        self.arrival(transfer).set(tensor)

    def _receive_gradient(self, leg: Leg) -> None:
        shape, dtype = self._known_shape(leg.transfer)
        if self._context.payload is Payload.SIGNALS:
            self._receive_note(leg)
        self.arrival(leg.transfer).set(self._land(leg, shape, dtype))

    def _receive_note(self, leg: Leg) -> Header:
        context, way = self._context, self._context.ways[leg.route]
        note = torch.empty(LENGTH, dtype=torch.int64)
        number = self._routes.first_channel[leg.route] + leg.channel
        announcer = way.src.mesh.ranks[way.dst.mesh.ranks.index(context.rank) % way.src.mesh.size]
        what = f"the announcement of {leg.transfer}"
        context.wires.receive_note(note, announcer, number).wait(what=what, timeout=LONGEST_SECONDS)
        return self._checked(Header.from_tensor(note), announcer)

    def _checked(self, header: Header, rank: int) -> Header:
        """The header, if the rank that it comes from is in the same call."""
        if (header.step, header.train) != (self._step, self._train):
            here, there = call_name(self._step, self._train), call_name(header.step, header.train)
            raise PeerMismatch(
                f"rank {self._context.rank} is in {here} and rank {rank} in {there}; call step and eval_step in the "
                "same order on all ranks"
            )
        return header

    def _land(self, leg: Leg, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        context, way = self._context, self._context.ways[leg.route]
        local, device = way.dst.local_shape(shape, context.rank), context.devices[leg.route.target]
        begun = [record.now()]
        if leg.route.direction is Direction.GRADIENT:
            begun.clear()  # it is waited for long before it comes
        if context.payload is Payload.SIGNALS:
            self._record("recv", leg, record.now(), 0)
            return context.zeros.setdefault((local, dtype), torch.zeros(local, dtype=dtype, device=device))
        plan, script = context.planner.plan(way, shape, dtype)
        tensor = context.buffers.take(local, dtype, device)
        self._channel(leg).move(plan, script, None, tensor, lambda _: begun.append(record.now()))
        self._record("recv", leg, begun[0] if begun else record.now(), tensor.nbytes)
        return tensor

    def _channel(self, leg: Leg) -> Channel:
        return self._context.channels[self._routes.first_channel[leg.route] + leg.channel]

    def _record(self, kind: str, leg: Leg, start: float, nbytes: int) -> None:
        if self._recorder is not None:
            lane = "out" if kind == "send" else "in"
            self._recorder.add(
                kind,  # type: ignore[arg-type]
                str(leg.transfer),
                lane=lane,
                start=start,
                end=record.now(),
                bytes=nbytes,
            )


def _listeners(way: Way, rank: int) -> list[int]:
    """The ranks of the destination to which this rank of the source announces a tensor."""
    place, size = way.src.mesh.ranks.index(rank), way.src.mesh.size
    return [other for i, other in enumerate(way.dst.mesh.ranks) if i % size == place]
