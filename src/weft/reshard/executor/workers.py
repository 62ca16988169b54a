"""One run of a plan on one rank: three workers, each on a thread, and the handle to wait for them.

    ChunkReceiver   posts receives a few ahead, in order; reduces terms; passes chunks on; publishes them
    ChunkSender     packs and sends what this rank holds, a few ahead; publishes it inside the host
    ChunkCopier     copies what this rank has already, and what others on its host published

Chunks that lie in one piece of memory are sent from there and received there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.comm import PeerLost
from weft.comm.deadline import Deadline, at_work
from weft.comm.tags import Span
from weft.comm.tell import Arrival, Endpoint
from weft.errors import PeerTimeout, WeftError
from weft.reshard.executor.parts import Parts, as_flat, pack, reduce_into, unpack
from weft.reshard.executor.script import ReceiveChunk, Ring, Script, SendChunk, TakeChunk
from weft.reshard.executor.staging import Pool, Rings, Slots, Stopped, Wait
from weft.reshard.order import RECEIVES_AHEAD, SENDS_AHEAD
from weft.reshard.plan import Plan
from weft.reshard.spec import average
from weft.reshard.units import Ranks
from weft.timeline import Kind, record

_LANES: dict[Kind, str] = {"send": "out", "recv": "in", "other": "copy"}


@dataclass(frozen=True)
class Assignment:
    """One rank's part in a plan, the same in every run.

    script: what the rank does
    world:  the endpoint's ranks by the numbers that the plan gives them
    slots:  staging memory
    tags:   of the chunks' messages
    """

    plan: Plan
    script: Script
    rank: int
    world: Ranks
    slots: Slots
    tags: Span


class PlanRun:
    """What the workers of one run share. Making one begins a run of the rings."""

    def __init__(
        self,
        job: Assignment,
        src: Parts,
        dst: Parts,
        endpoint: Endpoint,
        rings: Rings,
        *,
        timeout: float,
        stop: threading.Event | None = None,
        recorder: record.Trace | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """`stop` ends the run from outside; `on_bytes` is told, on some thread, of every chunk that has landed."""
        self.job, self.src, self.dst = job, src, dst
        self.plan, self.script = job.plan, job.script
        self.endpoint, self.rings = endpoint, rings
        self.recorder, self.on_bytes = recorder, on_bytes or _ignore
        self.wait = Wait(timeout, stop or threading.Event())
        rings.begin(job.script)

    def workers(self) -> list[Worker]:
        """Those that have something to do; not kept, as the tensors of a run must be free when it has ended."""
        every: list[Worker] = [ChunkReceiver(self), ChunkSender(self), ChunkCopier(self)]
        return [worker for worker in every if worker.has_work]

    def size(self, chunk: int) -> int:
        """Bytes of a chunk."""
        _, start, stop = self.plan.chunk_rows[chunk]
        return stop - start

    def wire(self, chunk: int) -> tuple[torch.dtype, str | None]:
        """The type of a chunk on the wire, and how its terms are reduced."""
        streams = self.plan.streams
        return streams.kinds[streams.kind[self.plan.chunk_rows[chunk][0]]]

    def send(self, data: Tensor, rank: int, chunk: int) -> Arrival:
        """Starts to send a chunk to a rank of the plan."""
        return self._start(self.endpoint.send, data, rank, chunk)

    def receive(self, data: Tensor, rank: int, chunk: int) -> Arrival:
        """Starts to receive a chunk from a rank of the plan."""
        return self._start(self.endpoint.recv, data, rank, chunk)

    def finish_send(self, transfer: Arrival, chunk: int, depth: int) -> None:
        """Waits until a chunk that is sent for the `depth`-th hop has left."""
        self._finish(transfer, chunk, self.script.deepest - depth)

    def finish_receive(self, transfer: Arrival, chunk: int, depth: int) -> None:
        """Waits until a chunk that comes by its `depth`-th hop is there."""
        self._finish(transfer, chunk, depth - 1)

    def record(self, kind: Kind, chunk: int, peer: int, start: float) -> None:
        """Adds an event to the trace, if there is one."""
        if self.recorder is not None:
            name = f"chunk {chunk} {'to' if kind == 'send' else 'from'} rank {peer}"
            self.recorder.add(kind, name, lane=_LANES[kind], start=start, end=record.now(), bytes=self.size(chunk))

    def fail(self) -> None:
        """Ends the waits of this rank's other workers and of its peers now, not at their deadline."""
        self.wait.stop.set()
        self.rings.fail()
        self.endpoint.break_off()

    def _start(self, call: Callable[..., Arrival], data: Tensor, rank: int, chunk: int) -> Arrival:
        try:
            return call(data, self.job.world.index(rank), tag=self.job.tags.tag(chunk))
        except WeftError as error:
            raise self._named(error, chunk) from error

    def _finish(self, transfer: Arrival, chunk: int, steps: int) -> None:
        """Waits, longer by a little for each step from where a failure is felt first.

        A rank that stops holds up all before and behind it. The next one to it should give up first, because
        its error names the right peer; the others then lose it. Waits for a rank of the same host last for the
        whole timeout: whoever gives up tells its host.
        """
        try:
            transfer.wait_until(Deadline.after(self.wait.timeout * min(0.9, 0.6 + 0.1 * steps)), what="")
        except WeftError as error:
            raise self._named(error, chunk) from error

    def _named(self, error: WeftError, chunk: int) -> Exception:
        """The error with the chunk's name; a lost peer is another worker's business if that failed before."""
        what = self.src.describe(chunk)
        if isinstance(error, PeerTimeout):
            return PeerTimeout(what + error.what, seconds=error.seconds)
        return Stopped() if self.wait.stop.is_set() else PeerLost(f"{what}: {error}")


class ChunkReceiver:
    """Receives: posted a few ahead and waited for in order."""

    name = "receive"

    def __init__(self, run: PlanRun) -> None:
        self._run = run
        self.has_work = bool(run.script.receives)
        slots = run.job.slots
        self._ahead = min(RECEIVES_AHEAD, slots.receive)
        self._pool = Pool(slots.receive, slots.size)
        self._pooled = 0  # chunks that went into the pool
        # By slot, until it is used again: what is being passed on from there.
        self._forwards: dict[_Slot, list[tuple[Arrival, int, int]]] = {}

    def run(self) -> None:
        posted: deque[tuple[ReceiveChunk, Tensor, _Slot, Arrival]] = deque()
        for receive in self._run.script.receives:
            if len(posted) >= self._ahead:
                self._arrive(*posted.popleft())
            memory, slot = self._memory(receive)
            posted.append((receive, memory, slot, self._run.receive(memory, receive.sender, receive.chunk)))
        while posted:
            self._arrive(*posted.popleft())
        for slot in tuple(self._forwards):
            self._wait_forwards(slot)

    def _memory(self, receive: ReceiveChunk) -> tuple[Tensor, _Slot]:
        """Where a chunk goes: a slot that all see, the destination itself, or a slot of this rank."""
        run, chunk = self._run, receive.chunk
        size, ring = run.size(chunk), Ring.RECEIVED
        if receive.number >= 0:
            slot: _Slot = (ring, receive.number % run.rings.slots_of(ring))
            self._wait_forwards(slot)
            run.rings.wait_free(ring, receive.number, run.wait)
            return run.rings.slot(run.job.rank, ring, receive.number, size), slot
        if receive.takers and not receive.adds:
            flat = as_flat(run.dst.of_chunk(chunk), run.wire(chunk)[0])
            if flat is not None:
                return flat, None
        number, slot = self._pooled, (None, self._pooled % self._pool.count)
        self._wait_forwards(slot)
        self._pooled += 1
        return self._pool.slot(number, size), slot

    def _arrive(self, receive: ReceiveChunk, memory: Tensor, slot: _Slot, transfer: Arrival) -> None:
        run, chunk = self._run, receive.chunk
        start = record.now()
        run.finish_receive(transfer, chunk, receive.depth)
        run.record("recv", chunk, receive.sender, start)
        wire, op = run.wire(chunk)
        if receive.adds:
            assert op is not None
            reduce_into(memory, wire, run.src.of_chunk(chunk), op)
            if receive.last_term and op == "avg":
                average(memory.view(wire), run.src.terms(chunk))
        if receive.forward:
            sent = [(run.send(memory, rank, chunk), chunk, receive.depth + 1) for rank in receive.forward]
            self._forwards.setdefault(slot, []).extend(sent)
        if receive.number >= 0:
            run.rings.publish(Ring.RECEIVED)
        elif receive.takers:
            if slot is not None:
                unpack(memory, wire, run.dst.of_chunk(chunk))
            run.on_bytes(run.size(chunk))

    def _wait_forwards(self, slot: _Slot) -> None:
        for transfer, chunk, depth in self._forwards.pop(slot, ()):
            self._run.finish_send(transfer, chunk, depth)


# Where a chunk is received: a slot of the ring, one of the pool (None, ...), or (None) the destination itself.
_Slot = tuple[Ring | None, int] | None


class ChunkSender:
    """Sends and publishes what this rank holds."""

    name = "send"

    def __init__(self, run: PlanRun) -> None:
        self._run = run
        self.has_work = bool(run.script.sends)
        slots = run.job.slots
        self._pool = Pool(slots.send, slots.size)
        self._packed = 0
        self._flying: deque[tuple[Arrival, int, int, float, int]] = deque()  # the last: its slot's number, or -1

    def run(self) -> None:
        for send in self._run.script.sends:
            if send.number >= 0:
                self._publish(send)
            else:
                self._send(send)
        while self._flying:
            self._finish_first()

    def _publish(self, send: SendChunk) -> None:
        run = self._run
        run.rings.wait_free(Ring.OWN, send.number, run.wait)
        memory = run.rings.slot(run.job.rank, Ring.OWN, send.number, run.size(send.chunk))
        pack(run.src.of_chunk(send.chunk), run.wire(send.chunk)[0], memory)
        run.rings.publish(Ring.OWN)

    def _send(self, send: SendChunk) -> None:
        run = self._run
        views, wire = run.src.of_chunk(send.chunk), run.wire(send.chunk)[0]
        data, slot = as_flat(views, wire), -1
        if data is None:
            slot = self._packed
            while any(entry[4] == slot - self._pool.count for entry in self._flying):
                self._finish_first()
            data = self._pool.slot(slot, run.size(send.chunk))
            pack(views, wire, data)
            self._packed += 1
        for rank in send.receivers:
            while len(self._flying) >= SENDS_AHEAD:
                self._finish_first()
            transfer = run.send(data, rank, send.chunk)
            self._flying.append((transfer, send.chunk, rank, record.now(), slot))

    def _finish_first(self) -> None:
        transfer, chunk, rank, start, _ = self._flying.popleft()
        self._run.finish_send(transfer, chunk, depth=1)
        self._run.record("send", chunk, rank, start)


class ChunkCopier:
    """Copies: what this rank has already, then what others publish."""

    name = "copy"

    def __init__(self, run: PlanRun) -> None:
        self._run = run
        self.has_work = bool(run.script.takes) or len(run.script.keeps) > 0

    def run(self) -> None:
        run = self._run
        for unit in run.script.keeps.tolist():
            run.dst.of_unit(unit).copy_(run.src.of_unit(unit).detach())
            run.on_bytes(int(run.plan.units.nbytes[unit]))
        for take in run.script.takes:
            self._take(take)
            run.on_bytes(run.size(take.chunk))

    def _take(self, take: TakeChunk) -> None:
        run = self._run
        at = (take.head, take.ring, take.number)
        into = as_flat(run.dst.of_chunk(take.chunk), run.wire(take.chunk)[0])
        if run.recorder is None and into is not None and run.rings.take(*at, into):
            return
        run.rings.wait_ready(*at, run.wait, partial(self._what, take))
        start = record.now()
        memory = run.rings.slot(*at, run.size(take.chunk))
        unpack(memory, run.wire(take.chunk)[0], run.dst.of_chunk(take.chunk))
        run.rings.done(take.head, take.ring)
        run.record("other", take.chunk, take.head, start)

    def _what(self, take: TakeChunk) -> str:
        return f"{self._run.src.describe(take.chunk)} (copy from rank {take.head})"


Worker = ChunkReceiver | ChunkSender | ChunkCopier


class Pending:
    """A reshard under way; `wait` for it. Sources must not change before that."""

    def __init__(self, run: PlanRun, workers: Sequence[Worker], end: Callable[[], None] | None = None) -> None:
        """Each worker has a thread; `end` is called by the last of them, at once if there is none."""
        self._run = run
        self._end = end or _do_nothing
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._do, args=(worker.run,), name=f"weft-reshard-{worker.name}", daemon=True)
            for worker in workers
        ]
        self._running = len(self._threads)
        self._done = threading.Event()
        for thread in self._threads:
            thread.start()
        if not self._threads:
            self._end()
            self._done.set()

    def wait(self) -> None:
        """Returns when this rank's part is done; raises what went wrong.

        Of several errors it is the one of a thread that ran out of time: what the others lost, they lost by
        that.
        """
        try:
            self.join()
        except BaseException:  # a signal handler raised, as Ctrl-C does
            self.abandon()
            raise
        if self._errors:
            raise min(self._errors, key=lambda error: not isinstance(error, PeerTimeout))

    def join(self) -> None:
        """Returns when this rank's part is done, or has failed; at once for a thread of its own."""
        # Not by joining threads: Python 3.11 takes a thread for ended whose join was interrupted.
        if threading.current_thread() not in self._threads:
            self._done.wait()

    def abandon(self) -> None:
        """Ends it now, on the peers too: they lose this rank."""
        if not self._done.is_set():
            self._fail(WeftError("the transfer was interrupted"))

    @at_work()
    def _do(self, work: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():  # so that tensors made in that mode can be written to, too
                work()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        with self._lock:
            self._running -= 1
            is_last = self._running == 0
        if is_last:
            try:
                self._end()
            except BaseException as error:
                self._errors.append(error)
            self._done.set()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._errors.append(error)
            first = len(self._errors) == 1
        if first:
            self._run.fail()


def _do_nothing() -> None:
    pass


def _ignore(_: int) -> None:
    pass
