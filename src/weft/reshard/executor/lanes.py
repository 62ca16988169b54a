"""The three threads of a rank that executes a plan; see `execute.py`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm import PeerLost, Transfer
from weft.errors import PeerTimeout, WeftError
from weft.reshard.executor.parts import Parts, as_flat, pack, reduce_into, unpack
from weft.reshard.executor.script import ReceiveChunk, Ring, SendChunk, TakeChunk
from weft.reshard.executor.staging import Pool, Stopped, Wait, done_counts
from weft.reshard.order import RECEIVES_AHEAD, SENDS_AHEAD
from weft.reshard.spec import average
from weft.reshard.units import Ranks
from weft.timeline import Kind, record

if TYPE_CHECKING:
    from weft.reshard.executor.executor import Executor

_LANES: dict[Kind, str] = {"send": "out", "recv": "in", "other": "copy"}


class Lane:
    """What the threads of one run share."""

    def __init__(
        self,
        executor: Executor,
        src: Parts,
        dst: Parts,
        run: int,
        recorder: record.Trace | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.executor, self.script = executor, executor.script
        self.plan, self.group, self.rings = executor.plan, executor.group, executor.rings
        self.src, self.dst = src, dst
        self.run = run
        self.recorder, self.on_bytes = recorder, on_bytes
        self.wait = Wait(executor.group.timeout, threading.Event())

    def size(self, chunk: int) -> int:
        """Bytes of a chunk."""
        _, start, stop = self.plan.chunk_rows[chunk]
        return stop - start

    def wire(self, chunk: int) -> tuple[torch.dtype, str | None]:
        """The type of a chunk on the wire, and how its terms are reduced."""
        streams = self.plan.streams
        return streams.kinds[streams.kind[self.plan.chunk_rows[chunk][0]]]

    def patience(self, steps: int) -> float:
        """How long to wait for a message, longer by a little for each step from where a failure is felt first.

        A rank that stops holds up all before and behind it. The next one to it should give up first, because
        its error names the right peer; the others then lose it. Waits for a rank of the same host last for the
        whole `timeout`: whoever gives up tells its host.
        """
        return self.wait.timeout * min(0.9, 0.6 + 0.1 * steps)

    def finish_send(self, transfer: Transfer, chunk: int, depth: int) -> None:
        """Waits until a chunk that is sent for the `depth`-th hop has left."""
        self._finish(transfer, chunk, self.patience(self.script.deepest - depth))

    def finish_receive(self, transfer: Transfer, chunk: int, depth: int) -> None:
        """Waits until a chunk that comes by its `depth`-th hop is there."""
        self._finish(transfer, chunk, self.patience(depth - 1))

    def send(self, data: Tensor, rank: int, chunk: int) -> Transfer:
        """Starts to send a chunk to a rank of the plan."""
        try:
            return self.group.send(data, self.executor.peer(rank), tag=self.executor.tags.tag(chunk))
        except WeftError as error:
            raise self._named(error, chunk) from error

    def receive(self, data: Tensor, rank: int, chunk: int) -> Transfer:
        """Starts to receive a chunk from a rank of the plan."""
        try:
            return self.group.recv(data, self.executor.peer(rank), tag=self.executor.tags.tag(chunk))
        except WeftError as error:
            raise self._named(error, chunk) from error

    def _finish(self, transfer: Transfer, chunk: int, timeout: float) -> None:
        try:
            transfer.wait(what="", timeout=timeout)
        except WeftError as error:
            raise self._named(error, chunk) from error

    def _named(self, error: WeftError, chunk: int) -> Exception:
        """The error with the chunk's name; a lost peer is another thread's business if that failed before."""
        what = self.src.describe(chunk)
        if isinstance(error, PeerTimeout):
            return PeerTimeout(what + error.what, seconds=error.seconds)
        return Stopped() if self.wait.stop.is_set() else PeerLost(f"{what}: {error}")

    def record(self, kind: Kind, chunk: int, peer: int, start: float) -> None:
        """Adds an event to the trace, if there is one."""
        if self.recorder is not None:
            name = f"chunk {chunk} {'to' if kind == 'send' else 'from'} rank {peer}"
            self.recorder.add(kind, name, lane=_LANES[kind], start=start, end=record.now(), bytes=self.size(chunk))

    def break_off(self) -> None:
        """Ends the waits of this rank's other threads and of its peers now, not at their deadline."""
        self.group.break_off()


class LandingLane:
    """Receives: posted a few ahead and waited for in order."""

    name = "receive"

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.has_work = bool(lane.script.receives)
        slots = lane.executor.slots
        self._ahead = min(RECEIVES_AHEAD, slots.receive)
        self._pool = Pool(slots.receive, slots.size)
        self._own = 0  # chunks that went into the pool
        self._counts = done_counts(lane.script.published[Ring.RECEIVED])
        self._total = total_counts(lane.script.published[Ring.RECEIVED])
        self._forwards: dict[object, list[tuple[Transfer, int, int]]] = {}  # by slot, still to be waited for

    def run(self) -> None:
        posted: deque[tuple[ReceiveChunk, Tensor, Transfer, bool]] = deque()
        for receive in self.lane.script.receives:
            if len(posted) >= self._ahead:
                self._arrive(*posted.popleft())
            memory, direct = self._memory(receive)
            posted.append((receive, memory, self.lane.receive(memory, receive.sender, receive.chunk), direct))
        while posted:
            self._arrive(*posted.popleft())
        for key in tuple(self._forwards):
            self._wait_forwards(key)

    def _memory(self, receive: ReceiveChunk) -> tuple[Tensor, bool]:
        """Where a chunk goes: a slot that all see, the destination itself, or a slot of this rank."""
        lane, chunk = self.lane, receive.chunk
        size, ring = lane.size(chunk), Ring.RECEIVED
        if receive.number >= 0:
            slots = lane.rings.slots_of(ring)
            number = receive.number + lane.run * len(self._counts)
            self._wait_forwards(number % slots)
            wait_slot(lane, ring, receive.number - slots, self._counts, self._total)
            return lane.rings.slot(lane.executor.rank, ring, number, size), False
        if receive.takers and not receive.adds:
            flat = as_flat(lane.dst.of_chunk(chunk), lane.wire(chunk)[0])
            if flat is not None:
                return flat, True
        memory = self._pool.slot(self._own, size)
        self._wait_forwards(("own", self._own % self._pool.count))
        self._own += 1
        return memory, False

    def _arrive(self, receive: ReceiveChunk, memory: Tensor, transfer: Transfer, direct: bool) -> None:
        lane, chunk = self.lane, receive.chunk
        start = record.now()
        lane.finish_receive(transfer, chunk, receive.depth)
        lane.record("recv", chunk, receive.sender, start)
        wire, op = lane.wire(chunk)
        if receive.adds:
            assert op is not None
            reduce_into(memory, wire, lane.src.of_chunk(chunk), op)
            if receive.last_term and op == "avg":
                average(memory.view(wire), lane.src.terms(chunk))
        if receive.forward:
            key = self._key(receive, memory, direct)
            sent = [(lane.send(memory, rank, chunk), chunk, receive.depth + 1) for rank in receive.forward]
            self._forwards.setdefault(key, []).extend(sent)
        if receive.number >= 0:
            lane.rings.publish(Ring.RECEIVED)
        elif receive.takers:
            if not direct:
                unpack(memory, wire, lane.dst.of_chunk(chunk))
            lane.on_bytes(lane.size(chunk))

    def _key(self, receive: ReceiveChunk, memory: Tensor, direct: bool) -> object:
        if receive.number >= 0:
            number = receive.number + self.lane.run * len(self._counts)
            return number % self.lane.rings.slots_of(Ring.RECEIVED)
        return ("direct",) if direct else ("own", (memory.data_ptr() - self._base()) // self._pool.size)

    def _base(self) -> int:
        return self._pool.slot(0, 1).data_ptr()

    def _wait_forwards(self, key: object) -> None:
        for transfer, chunk, depth in self._forwards.pop(key, ()):
            self.lane.finish_send(transfer, chunk, depth)


class OutgoingLane:
    """Sends and publishes what this rank holds."""

    name = "send"

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.has_work = bool(lane.script.sends)
        slots = lane.executor.slots
        self._pool = Pool(slots.send, slots.size)
        self._packed = 0
        self._counts = done_counts(lane.script.published[Ring.OWN])
        self._total = total_counts(lane.script.published[Ring.OWN])
        self._flying: deque[tuple[Transfer, int, int, float, int]] = deque()  # the last: its slot's number, or -1

    def run(self) -> None:
        for send in self.lane.script.sends:
            if send.number >= 0:
                self._publish(send)
            else:
                self._send(send)
        while self._flying:
            self._land()

    def _publish(self, send: SendChunk) -> None:
        lane = self.lane
        slots = lane.rings.slots_of(Ring.OWN)
        wait_slot(lane, Ring.OWN, send.number - slots, self._counts, self._total)
        number = send.number + lane.run * len(self._counts)
        memory = lane.rings.slot(lane.executor.rank, Ring.OWN, number, lane.size(send.chunk))
        pack(lane.src.of_chunk(send.chunk), lane.wire(send.chunk)[0], memory)
        lane.rings.publish(Ring.OWN)

    def _send(self, send: SendChunk) -> None:
        lane = self.lane
        views, wire = lane.src.of_chunk(send.chunk), lane.wire(send.chunk)[0]
        data, slot = as_flat(views, wire), -1
        if data is None:
            slot = self._packed
            while self._flying and any(entry[4] == slot - self._pool.count for entry in self._flying):
                self._land()
            data = self._pool.slot(slot, lane.size(send.chunk))
            pack(views, wire, data)
            self._packed += 1
        for rank in send.receivers:
            while len(self._flying) >= SENDS_AHEAD:
                self._land()
            transfer = lane.send(data, rank, send.chunk)
            self._flying.append((transfer, send.chunk, rank, record.now(), slot))

    def _land(self) -> None:
        transfer, chunk, rank, start, _ = self._flying.popleft()
        self.lane.finish_send(transfer, chunk, depth=1)
        self.lane.record("send", chunk, rank, start)


class TakingLane:
    """Copies: what this rank has already, then what others publish."""

    name = "copy"

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.has_work = bool(lane.script.takes) or len(lane.script.keeps) > 0

    def run(self) -> None:
        lane = self.lane
        for unit in lane.script.keeps.tolist():
            lane.dst.of_unit(unit).copy_(lane.src.of_unit(unit).detach())
            lane.on_bytes(int(lane.plan.units.nbytes[unit]))
        for take in lane.script.takes:
            number = take.number + lane.run * lane.script.totals[take.head, take.ring]
            size = lane.size(take.chunk)
            into = as_flat(lane.dst.of_chunk(take.chunk), lane.wire(take.chunk)[0])
            if lane.recorder is None and into is not None and lane.rings.take(take.head, take.ring, number, into):
                lane.on_bytes(size)
                continue
            lane.rings.wait_ready(take.head, take.ring, number, lane.wait, partial(self._what, take))
            start = record.now()
            memory = lane.rings.slot(take.head, take.ring, number, size)
            unpack(memory, lane.wire(take.chunk)[0], lane.dst.of_chunk(take.chunk))
            lane.rings.done(take.head, take.ring)
            lane.record("other", take.chunk, take.head, start)
            lane.on_bytes(size)

    def _what(self, take: TakeChunk) -> str:
        return f"{self.lane.src.describe(take.chunk)} (copy from rank {take.head})"


def total_counts(published: tuple[Ranks, ...]) -> dict[int, int]:
    """How many chunks each taker takes in a whole run."""
    total: dict[int, int] = {}
    for takers in published:
        for taker in takers:
            total[taker] = total.get(taker, 0) + 1
    return total


def wait_slot(lane: Lane, ring: Ring, number: int, counts: list[dict[int, int]], total: dict[int, int]) -> None:
    """Returns when chunk `number` of this run is taken; a negative number is of the run before."""
    run = lane.run
    while number < 0:
        if run == 0:
            return
        number, run = number + len(counts), run - 1
    for taker, count in counts[number].items():
        what = partial("rank {} to copy chunk {} of those {} on this rank".format, taker, number, ring.name.lower())
        lane.rings.wait_done(ring, taker, count + run * total[taker], lane.wait, what)
