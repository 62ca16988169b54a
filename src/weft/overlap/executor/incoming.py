"""Runs a matmul whose input travels: the matmul on the caller's thread, the receiving on another.

Where all ranks share a host, and with a sequential plan, the caller's thread does all.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor

from weft.comm import Counters, Transfer
from weft.errors import PeerTimeout
from weft.kernels import PackedWeight, Ready, Rows, TileSchedule, linear_tiles
from weft.overlap.blocks import Counts, row_bounds
from weft.overlap.executor.call import MatmulCall, Request, row_major, run_call
from weft.overlap.executor.context import Context, Statement
from weft.overlap.executor.resources import Need, WorkerJob, view
from weft.overlap.executor.short import gather_short, is_carried
from weft.overlap.incoming import RowArrival, RowSource, SendRows, Store, lower
from weft.overlap.plan import Op
from weft.timeline import record


def gather_matmul(
    context: Context, x: Tensor, weight: PackedWeight, *, m: int, bias: Tensor | None, plan: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """All-gather x [m_r, K], times weight [N, K] -> [m, N]; and the gathered x [m, K] if `keep`, else [0, K]."""
    y, gathered = (
        context.outputs.empty(m, weight.n, dtype=x.dtype),
        context.outputs.empty(m if keep else 0, weight.k, dtype=x.dtype),
    )
    x = row_major(x)

    def compute(run: IncomingCall) -> None:
        if is_carried(run):
            return gather_short(run, x, weight, out=y, bias=bias, gathered=gathered if keep else None)
        run.prepare()
        return run.run(x, weight, out=y, bias=bias, gathered=gathered if keep else None)

    request = Request(Op.ALL_GATHER, m, weight.n, weight.k, x.dtype, plan, bias is not None)
    run_call(context, request, IncomingCall, compute)
    return y, gathered


def gather_rows_matmul(context: Context, x: Tensor, weight: PackedWeight, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The way back: x [R, K] returns to the ranks that its rows came from, times weight [N, K] -> [M, N].

    Both results, the product and the gathered x [M, K], are in the order of destinations.
    """
    table = tuple(map(tuple, counts.tolist()))
    m = sum(table[context.rank])
    y, gathered = (context.outputs.empty(m, cols, dtype=x.dtype) for cols in (weight.n, weight.k))
    x = row_major(x)

    def compute(run: IncomingCall) -> None:
        run.prepare(table)
        run.run(x, weight, out=y, bias=None, gathered=gathered)

    request = Request(Op.GATHER_BACK, m, weight.n, weight.k, x.dtype, "", bias=False)
    run_call(context, request, IncomingCall, compute)
    return y, gathered


class IncomingCall(MatmulCall):
    """One call of an op whose input travels."""

    def prepare(self, counts: Counts | None = None) -> None:
        """Lowers the plan and makes room."""
        plan, bank, size = self.plan, self.call.bank, self.context.size
        self.program = lower(plan, self.context.rank, counts)
        self.bounds = plan.shard_bounds if counts is None else row_bounds(counts[self.context.rank])
        self.shared = len(plan.topology.local(self.context.rank)) > 1
        most_m = plan.m if counts is None else max(map(sum, counts))
        most_x = plan.shard_bounds[1] if counts is None else max(sum(row[r] for row in counts) for r in range(size))
        self.inbox_at = most_x * plan.k  # the outbox comes first
        self.reserve(Need(self.nbytes((most_x + most_m) * plan.k), -(-most_m // plan.tile_m)))
        self.schedule = self._schedule(counts)
        self.awaited = max(self.program.needs, default=0)
        for row, need in enumerate(self.program.needs):
            # Tile rows that wait for fewer chunks start higher, so that all are full at the same value.
            if need < self.awaited:
                bank.counters(self.context.rank).add(row, self.awaited - need)

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
        self.outbox = view(self.call.bank.shared(self.context.rank), self.dtype, 0, self.program.x_rows, self.plan.k)
        one_host = self.plan.topology.count == 1
        job, sent = None, list[tuple[SendRows, float, Transfer]]()
        if one_host:
            self._run_one_host(x)
        elif self.plan.sequential:
            self.listening(lambda: sent.extend(self._receive(x)))
            self._wait_for_rows()
        else:
            on_error = partial(self._poison, self.call.bank.counters(self.context.rank))
            job = self.context.sender.start(lambda _: self._receive_all(x), on_error=on_error)
        blocks = [self._rows(source, x) for source in self.program.sources]
        start = record.now()
        if blocks:
            self._matmul(blocks, weight, out, bias, job)
        self.record("compute", "matmul", "compute", start, flops=2.0 * out.shape[0] * out.shape[1] * weight.k)
        if job is not None:
            job.check()
        if gathered is not None:
            self._keep(blocks, gathered)
        if sent:
            self.listening(lambda: self._wait_for_sends(sent))
        if job is not None:
            job.join(seconds=self.patience())

    def _run_one_host(self, x: Tensor) -> None:
        """Every rank puts its rows into its window before it says that it is here: who has met all has all rows.

        So there is nothing to wait for during the matmul, and nothing to do for a second thread.
        """
        start = record.now()
        for offer in self.program.offers:
            self.outbox[offer.start : offer.end] = x[offer.start : offer.end]
        self.record("other", "own rows to the window", "comm", start)
        start = record.now()
        if self.call.agreed:  # the ranks met to make room, which was before the rows were there: all of them, or none
            self.context.agreement.meet(Statement(self.text), deadline=self.call.deadline)
        self.context.meet(self.call, self.text)
        self.record("recv", "rows of the other ranks", "comm", start)

    def _wait_for_rows(self) -> None:
        counters = self.call.bank.counters(self.context.rank)
        for row in range(len(self.program.needs)):
            counters.wait(row, self.awaited, timeout=self.left(), what=f"{self.op}: {self._rows_of(row)}")

    def _matmul(
        self, blocks: list[Tensor], weight: PackedWeight, out: Tensor, bias: Tensor | None, job: WorkerJob | None
    ) -> None:
        counters = self.call.bank.counters(self.context.rank)
        ready = None
        if job is not None and self.awaited:
            what = f"{self.op}: rows of x"
            ready = Ready(counters.tensor, self.plan.tile_m, self.awaited, timeout=self.left(), what=what)
        try:
            linear_tiles(Rows.stack(blocks), weight, out=out, schedule=self.schedule, bias=bias, ready=ready)
        except PeerTimeout as error:
            if job is not None:
                job.check()  # the reason, if the other thread knows it
            late = [row for row in range(len(self.program.needs)) if counters.read(row) < self.awaited]
            what = self._rows_of(late[0]) if late else "rows of x, which came just now"
            raise PeerTimeout(f"{self.op}: {what}", seconds=self.call.deadline.seconds) from error

    def _rows_of(self, tile_row: int) -> str:
        """The rows of x that a tile row reads, and whose they are."""
        m0, m1 = tile_row * self.plan.tile_m, min((tile_row + 1) * self.plan.tile_m, self.program.tiling.m)
        ranks = [r for r, (a, b) in enumerate(pairwise(self.bounds)) if a < m1 and m0 < b and r != self.context.rank]
        return f"rows {m0} to {m1} of x, from rank {', '.join(map(str, ranks))}"

    def _keep(self, blocks: list[Tensor], gathered: Tensor) -> None:
        at = 0
        for source, block in zip(self.program.sources, blocks, strict=True):
            if self.shared or source.store is Store.X:
                gathered[at : at + source.rows] = block
            at += source.rows

    # Receiving ----------------------------------------------------------------------------------------------

    def _receive_all(self, x: Tensor) -> None:
        """What the receiving thread does."""
        self._wait_for_sends(self._receive(x))

    def _receive(self, x: Tensor) -> list[tuple[SendRows, float, Transfer]]:
        """Receives all that comes, and tells who reads it; returns the sends that are still under way."""
        self.context.meet(self.call, self.text)
        program = self.program
        transfers = [self.recv(self.inbox[e.m0 : e.m1], e.peer, e.tag) for e in program.expects]
        sent = [(s, record.now(), self.send(x[s.start : s.end], s.peer, s.tag)) for s in program.sends]
        for offer in program.offers:
            self.outbox[offer.start : offer.end] = x[offer.start : offer.end]
            self._tell(offer.tell)
        for expect, transfer in zip(program.expects, transfers, strict=True):
            start, what = record.now(), f"rows {expect.m0} to {expect.m1} from rank {expect.peer}"
            transfer.wait_until(self.call.deadline, what=f"{self.op}: {what}")
            self._tell(expect.tell)
            nbytes = self.nbytes((expect.m1 - expect.m0) * self.plan.k)
            self.record("recv", what, "comm", start, nbytes=nbytes)
        return sent

    def _wait_for_sends(self, sent: list[tuple[SendRows, float, Transfer]]) -> None:
        for send, start, transfer in sent:
            what = f"rows {send.start} to {send.end} to rank {send.peer}"
            transfer.wait_until(self.call.deadline, what=f"{self.op}: {what}")
            nbytes = self.nbytes((send.end - send.start) * self.plan.k)
            self.record("send", what, "send", start, nbytes=nbytes)

    def _tell(self, arrivals: tuple[RowArrival, ...]) -> None:
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

    def _rows(self, source: RowSource, x: Tensor) -> Tensor:
        if source.store is Store.X:
            store = x
        elif source.store is Store.OUTBOX:
            rows = source.start + source.rows
            store = view(self.call.bank.shared(source.rank), self.dtype, 0, rows, self.plan.k)
        else:
            store = self.inbox if source.rank == self.context.rank else self._inbox(source.rank)
        return store[source.start : source.start + source.rows]
