"""Runs a matmul whose input travels: the matmul on the caller's thread, the receiving on another."""

from __future__ import annotations

from torch import Tensor

from weft import tracing
from weft.comm import Counters
from weft.kernels import PackedWeight, Ready, Rows, TileSchedule, linear_tiles
from weft.overlap.incoming import Arrival, Source, Store, lower
from weft.overlap.memory import Need, view
from weft.overlap.outgoing import Counts
from weft.overlap.running import Running, as_bytes
from weft.overlap.worker import Job


class IncomingCall(Running):
    """One call of an op whose input travels."""

    def prepare(self, counts: Counts | None = None) -> int:
        """Lowers the plan and makes room; returns how many rows the gathered x has."""
        plan, bank, size = self.plan, self.call.bank, self.context.size
        self.program = lower(plan, self.context.rank, counts)
        self.shared = len(plan.topology.local(self.context.rank)) > 1
        most_m = plan.m if counts is None else max(map(sum, counts))
        most_x = plan.shard_bounds[1] if counts is None else max(sum(row[r] for row in counts) for r in range(size))
        self.inbox_at = most_x * plan.k  # the outbox comes first
        room = Need(as_bytes((most_x + most_m) * plan.k, self.dtype), -(-most_m // plan.tile_m))
        self.context.reserve(self.call, room, self.text)
        self.schedule = self._schedule(counts)
        self.awaited = max(self.program.needs, default=0)
        for row, need in enumerate(self.program.needs):
            # Tile rows that wait for fewer chunks start higher, so that all are full at the same value.
            if need < self.awaited:
                bank.counters(self.context.rank).add(row, self.awaited - need)
        return self.program.tiling.m

    def _schedule(self, counts: Counts | None) -> TileSchedule:
        bound, key = self.call.bank.bound, (self.plan, counts)
        found = bound.get(key)
        if isinstance(found, TileSchedule):
            return found
        made = self.program.schedule()
        if counts is None:  # the rows of an all-to-all are hardly ever the same again
            bound[key] = made
        return made

    def run(
        self, x: Tensor, weight: PackedWeight, *, out: Tensor, bias: Tensor | None, gathered: Tensor | None = None
    ) -> None:
        """out [m, n] = gathered x times weight; `gathered` [m, k] gets the gathered x itself, where it is wanted."""
        # Straight to where it is wanted, unless others read it in the window.
        self.inbox = self._inbox(self.context.rank) if gathered is None or self.shared else gathered
        counters = self.call.bank.counters(self.context.rank)
        job = self.context.sender.start(lambda _: self._receive_all(_, x), on_error=lambda: self._poison(counters))
        blocks = [self._rows(source, x) for source in self.program.sources]
        ready = None
        if self.plan.sequential:
            job.join(seconds=self.patience())
            for row in range(len(self.program.needs)):
                what = f"{self.op}: tile row {row} of the input"
                counters.wait(row, self.awaited, timeout=self.left(), what=what)
        elif self.awaited:
            what = f"{self.op}: rows of x"
            ready = Ready(counters.tensor, self.plan.tile_m, self.awaited, timeout=self.left(), what=what)
        start = tracing.now()
        if blocks:
            linear_tiles(Rows.stack(blocks), weight, out=out, schedule=self.schedule, bias=bias, ready=ready)
        self.record("compute", "matmul", "compute", start, flops=2.0 * out.shape[0] * out.shape[1] * weight.k)
        job.check()
        if gathered is not None:
            self._keep(blocks, gathered)
        job.join(seconds=self.patience())

    def _keep(self, blocks: list[Tensor], gathered: Tensor) -> None:
        at = 0
        for source, block in zip(self.program.sources, blocks, strict=True):
            if self.shared or source.store is Store.X:
                gathered[at : at + source.rows] = block
            at += source.rows

    # The receiving thread -----------------------------------------------------------------------------------

    def _receive_all(self, job: Job, x: Tensor) -> None:
        self.meet()
        job.agreed()
        group, program = self.context.group, self.program
        transfers = [group.recv(self.inbox[e.m0 : e.m1], e.peer, tag=e.tag) for e in program.expects]
        sent = [(s, tracing.now(), group.send(x[s.start : s.end], s.peer, tag=s.tag)) for s in program.sends]
        outbox = view(self.call.bank.shared(self.context.rank), self.dtype, 0, program.x_rows, self.plan.k)
        for offer in program.offers:
            outbox[offer.start : offer.end] = x[offer.start : offer.end]
            self._tell(offer.tell)
        for expect, transfer in zip(program.expects, transfers, strict=True):
            start, what = tracing.now(), f"rows {expect.m0} to {expect.m1} from rank {expect.peer}"
            transfer.wait_until(self.call.deadline, what=f"{self.op}: {what}")
            self._tell(expect.tell)
            nbytes = as_bytes((expect.m1 - expect.m0) * self.plan.k, self.dtype)
            self.record("recv", what, "comm", start, nbytes=nbytes)
        for send, start, transfer in sent:
            what = f"rows {send.start} to {send.end} to rank {send.peer}"
            transfer.wait_until(self.call.deadline, what=f"{self.op}: {what}")
            nbytes = as_bytes((send.end - send.start) * self.plan.k, self.dtype)
            self.record("send", what, "send", start, nbytes=nbytes)

    def _tell(self, arrivals: tuple[Arrival, ...]) -> None:
        for arrival in arrivals:
            counters = self.call.bank.counters(arrival.rank)
            for row in self.program.touched(arrival):
                counters.add(row)

    def _poison(self, counters: Counters) -> None:
        """Lets the matmul run to its end on whatever is there, so that the caller sees the error at once."""
        for row in range(len(self.program.needs)):
            counters.add(row, self.awaited)

    # Memory -------------------------------------------------------------------------------------------------

    def _inbox(self, rank: int) -> Tensor:
        return view(self.call.bank.shared(rank), self.dtype, self.inbox_at, self._inbox_rows(rank), self.plan.k)

    def _inbox_rows(self, rank: int) -> int:
        return self.program.tiling.m if rank == self.context.rank else self.plan.m

    def _rows(self, source: Source, x: Tensor) -> Tensor:
        if source.store is Store.X:
            store = x
        elif source.store is Store.OUTBOX:
            rows = source.start + source.rows
            store = view(self.call.bank.shared(source.rank), self.dtype, 0, rows, self.plan.k)
        else:
            store = self.inbox if source.rank == self.context.rank else self._inbox(source.rank)
        return store[source.start : source.start + source.rows]
