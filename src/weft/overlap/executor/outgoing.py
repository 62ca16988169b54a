"""Runs a matmul whose output travels: the matmul on the caller's thread, the sending on another.

Where nothing is sent during the matmul (one host, or a sequential plan) the caller's thread does all.

*Sums.* Ranks are added in order inside a host, then hosts in order. float32 is added as it is; bfloat16 in float32: a
host's sum is rounded once, because that is what crosses the network, and so is the total. The order is the same whoever
adds, in whatever pieces: all plans give the same bits. Sums are made on the caller's thread after its matmul: with one
core a rank they take the same time then as earlier, and when communication is the slower part they fill the wait for
it. Only where other ranks wait for a sum (`early`) a third thread makes it as soon as it can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from weft.comm import Counters, Transfer
from weft.comm.host_collectives import add_in_order
from weft.errors import PeerTimeout
from weft.kernels import PackedWeight, Rows, TileOutput, TileSchedule, linear_tiles
from weft.overlap.blocks import Axis, Counts
from weft.overlap.executor.call import MatmulCall, Request, exchange_counts, row_major, run_call
from weft.overlap.executor.context import Context
from weft.overlap.executor.resources import Need, WorkerJob, view
from weft.overlap.executor.short import is_carried, matmul_short
from weft.overlap.executor.sums import RowNorm, add_rows, add_terms
from weft.overlap.outgoing import Finish, Outgoing, SendBlock, Space, View, lower
from weft.overlap.plan import Op, OverlapPlan
from weft.timeline import record


def matmul_scatter(
    context: Context,
    op: Op,
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None,
    plan: str = "",
    meanwhile: Callable[[], None] | None = None,
    after: RowNorm | None = None,
) -> Tensor:
    """x [M, K_r] times weight [N, K_r], summed over ranks: this rank's rows of it, or all (all-reduce).

    `after` follows the sum of each row, in place.
    """
    x = row_major(x)

    def compute(run: OutgoingCall) -> Tensor:
        if is_carried(run):
            return matmul_short(run, x, weight, bias=bias, meanwhile=meanwhile, after=after)
        y = context.outputs.empty(run.prepare(), weight.n, dtype=x.dtype)
        if after is not None:
            after.prepare(y)
        run.after = after
        run.run(x, weight, out=y, bias=bias, meanwhile=meanwhile)
        return y

    request = Request(op, x.shape[0], weight.n, weight.k, x.dtype, plan, bias is not None)
    return run_call(context, request, OutgoingCall, compute)


def matmul_scatter_rows(
    context: Context, x: Tensor, weight: PackedWeight, destinations: Tensor, *, bias: Tensor | None, plan: str
) -> tuple[Tensor, Tensor]:
    """x [M, K] times weight [N, K], row i to rank destinations[i] -> [R, N]; and the counts int64 [P, P]."""
    x = row_major(x)

    def compute(run: OutgoingCall) -> tuple[Tensor, Tensor]:
        context.meet(run.call, run.text)  # sizes are exchanged first, so there is nothing to do meanwhile
        counts = exchange_counts(context, run.call, destinations)
        y = context.outputs.empty(run.prepare(counts), weight.n, dtype=x.dtype)
        rows: Tensor | Rows = x
        if x.shape[0]:
            rows = Rows.stack([x]).gather(torch.argsort(destinations, stable=True))
        run.run(rows, weight, out=y, bias=None, kernel_bias=bias)
        return y, torch.tensor(counts)

    request = Request(Op.ALL_TO_ALL, x.shape[0], weight.n, weight.k, x.dtype, plan, bias is not None)
    return run_call(context, request, OutgoingCall, compute)


@dataclass(frozen=True)
class Room:
    """A rank's program, and what it takes: elements of shared and of private memory, and counters. Found once a plan.

    Counters are one a block that is computed, and from `published_at` on one a result. Private memory holds the host's
    sums, and from `inbox_at` on what arrives. `is_alone` says that nothing travels during the matmul.
    """

    program: Outgoing
    shared: int
    counters: int
    published_at: int
    private: int
    inbox_at: int
    is_alone: bool
    is_early: bool


@lru_cache(maxsize=512)
def _room(plan: OverlapPlan, rank: int, counts: Counts | None) -> Room:
    program = lower(plan, rank, counts)
    most_rows = plan.m if counts is None else max(map(sum, counts))
    blocks = max(-(-most_rows // plan.tile_m), plan.tiling.cols)  # at most, on any rank
    sums = most_rows * plan.n if any(len(s.parts) > 1 for s in program.sends) else 0
    is_alone = plan.sequential or not (program.sends or program.expects)
    private = sums + program.inbox_elements
    return Room(program, most_rows * plan.n, 2 * blocks, blocks, private, sums, is_alone, program.early)


@dataclass(frozen=True)
class Places:
    """Tables over one bank: where tiles go, the order in which they are computed, and what counts them."""

    out: Tensor | TileOutput
    schedule: TileSchedule
    done: Tensor


@dataclass(frozen=True)
class Arrivals:
    """Which of the messages that this rank gets are there: counter i is 1 then, or when `job` has failed."""

    counters: Counters
    job: WorkerJob


class OutgoingCall(MatmulCall):
    """One call of an op whose output travels."""

    after: RowNorm | None = None

    def prepare(self, counts: Counts | None = None) -> int:
        """Lowers the plan and makes room; returns how many rows this rank will have."""
        self.room = _room(self.plan, self.context.rank, counts)
        self.program = self.room.program
        self.reserve(Need(self.nbytes(self.room.shared), self.room.counters))
        self.private = self.call.bank.private(self.nbytes(self.room.private))
        self.summed = Counters(len(self.program.cut.blocks))
        self.places = self._places(counts)
        self.transfers: list[Transfer] = []
        self.arrivals: Arrivals | None = None
        return self.program.out_rows

    def _places(self, counts: Counts | None) -> Places:
        """Built once for a plan and a bank: a table of places takes longer than a small matmul."""
        bank, cut = self.call.bank, self.program.cut
        key = (self.plan, counts)
        found = bank.bound.get(key)
        if isinstance(found, Places):
            return found
        mine = bank.shared(self.context.rank)
        out: Tensor | TileOutput = view(mine, self.dtype, 0, cut.tiling.m, cut.tiling.n)
        if self.plan.axis is Axis.COLS:
            tiles: dict[int, Tensor] = {}
            for block in cut.blocks:
                stored = view(mine, self.dtype, block.at, block.rows, block.cols)
                for tile in cut.tiles(block):
                    m0, m1, n0, n1 = cut.tiling.box(tile)
                    tiles[tile] = stored[m0 - block.m0 : m1 - block.m0, n0 - block.n0 : n1 - block.n0]
            out = TileOutput(cut.tiling, tuple(tiles[t] for t in range(cut.tiling.count)))
        done = bank.counters(self.context.rank).tensor[: max(1, len(cut.blocks))]
        made = Places(out, cut.schedule(self.program.order), done)
        if counts is None:  # the rows of an all-to-all are hardly ever the same again
            bank.bound[key] = made
        return made

    def run(
        self,
        x: Tensor | Rows,
        weight: PackedWeight,
        *,
        out: Tensor,
        bias: Tensor | None,
        kernel_bias: Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """out [out_rows, n] = what this rank gets; `meanwhile` is computed while the last blocks travel."""

        def matmul() -> None:
            start = record.now()
            places = self.places
            linear_tiles(x, weight, out=places.out, schedule=places.schedule, bias=kernel_bias, done=places.done)
            self.record("compute", "matmul", "compute", start, flops=2.0 * out.shape[1] * weight.k * _rows(x))

        if self.room.is_alone:
            self._run_alone(matmul, bias, out, meanwhile)
        else:
            self._run_beside(matmul, bias, out, meanwhile)

    def _run_alone(
        self, matmul: Callable[[], None], bias: Tensor | None, out: Tensor, meanwhile: Callable[[], None] | None
    ) -> None:
        """Nothing leaves before the matmul is over: a second thread would only cost its hand-over."""
        self.context.post(self.call, self.text)
        matmul()
        self._open()
        sent = self._start_sends()
        if meanwhile is not None:
            meanwhile()
        self._finish_all(bias, out)
        if sent:
            self.listening(lambda: self._wait_for_sends(sent))

    def _run_beside(
        self, matmul: Callable[[], None], bias: Tensor | None, out: Tensor, meanwhile: Callable[[], None] | None
    ) -> None:
        job = self.context.sender.start(self._send_all, on_error=self._poison)
        finish = None
        if self.room.is_early:
            finish = self.context.finisher.start(lambda _: self._finish_after(job, bias, out))
        matmul()
        if meanwhile is not None:
            meanwhile()
        try:
            if finish is None:
                self._finish_after(job, bias, out)
            else:
                finish.join(seconds=self.patience())
        except PeerTimeout:
            job.check()  # the reason, if the other thread knows it
            raise
        job.join(seconds=self.patience())

    # Sending ------------------------------------------------------------------------------------------------

    def _send_all(self, job: WorkerJob) -> None:
        """What the sending thread does."""
        self._open()
        job.agreed()
        self._wait_for_sends(self._start_sends())

    def _open(self) -> None:
        """All ranks are here: messages may come."""
        self.context.meet(self.call, self.text)
        self.transfers = [
            self.recv(self._private(self.room.inbox_at + e.at, 1, e.elements), e.peer, e.tag)
            for e in self.program.expects
        ]

    def _start_sends(self) -> list[tuple[SendBlock, int, float, Transfer]]:
        sent = []
        for send in self.program.sends:
            data = self._gathered(send)
            sent.append((send, data.nbytes, record.now(), self.send(data, send.peer, send.tag)))
        return sent

    def _wait_for_sends(self, sent: list[tuple[SendBlock, int, float, Transfer]]) -> None:
        for send, nbytes, start, transfer in sent:
            what = f"block {send.block} to rank {send.peer}"
            transfer.wait_until(self.call.deadline, what=f"{self.op}: {what}")
            self.record("send", what, "send", start, nbytes=nbytes)

    def _gathered(self, send: SendBlock) -> Tensor:
        """The rows to send, once they are computed: in place, or added up over this host."""
        parts = [self._view(part) for part in send.parts]
        if len(parts) == 1:
            return parts[0]
        total = self._private(send.parts[0].at, send.parts[0].rows, send.parts[0].cols)
        start = record.now()
        add_in_order(parts, total)
        self.summed.add(send.block)
        self.record("other", f"the host's sum of block {send.block}", "send", start)
        return total

    def _poison(self) -> None:
        """Lets the caller's thread run into the error instead of into its deadline."""
        for block in range(len(self.summed)):
            self.summed.add(block)

    # Finishing ----------------------------------------------------------------------------------------------

    def _finish_after(self, job: WorkerJob, bias: Tensor | None, out: Tensor) -> None:
        job.wait_until_agreed(seconds=self.patience())
        self._finish_all(bias, out)

    def _finish_all(self, bias: Tensor | None, out: Tensor) -> None:
        self.arrivals = self._watch_arrivals()
        forwards: list[Transfer] = []
        for finish in self.program.finishes:
            forwards += self._finish(finish, bias, out)
        if self.after is not None and self.plan.axis is Axis.COLS:  # whole rows are there only now
            self.after.follow(out, 0, out.shape[0])

        def wait() -> None:
            for transfer in forwards:
                transfer.wait_until(self.call.deadline, what=f"{self.op}: a result")

        if forwards:
            self.listening(wait)
        if self.arrivals is not None:
            self.arrivals.job.join(seconds=self.patience())

    def _watch_arrivals(self) -> Arrivals | None:
        """What comes is waited for by another thread if this is the main one: it hears signals only outside of gloo."""
        if not self.transfers or threading.current_thread() is not threading.main_thread():
            return None
        counters = Counters(len(self.transfers))

        def watch(_: WorkerJob) -> None:
            for number in range(len(self.transfers)):
                self._wait_for_part(number)
                counters.add(number)

        def poison() -> None:
            for number in range(len(counters)):
                counters.add(number)

        return Arrivals(counters, self.context.finisher.start(watch, on_error=poison))

    def _wait_for_part(self, number: int) -> None:
        what = f"{self.op}: part {number} of the output, from rank {self.program.expects[number].peer}"
        if self.arrivals is None or threading.current_thread() is not threading.main_thread():
            self.transfers[number].wait_until(self.call.deadline, what=what)
        else:
            self.arrivals.counters.wait(number, 1, timeout=self.left(), what=what)
            self.arrivals.job.check()

    def _finish(self, finish: Finish, bias: Tensor | None, out: Tensor) -> list[Transfer]:
        box, waited = finish.box, record.now()
        terms = [[self._view(v) for v in term] for term in finish.terms]
        self.record("recv", f"rows {box.m0} to {box.m1}", "comm", waited)
        start = record.now()
        target = out[box.m0 : box.m1, box.n0 : box.n1]
        added = None if bias is None or finish.whole else bias[box.n0 : box.n1]
        after = self.after if self.plan.axis is Axis.ROWS else None
        if finish.result is None and after is not None:
            add_rows(terms, out, added, box.m0, box.m1, after)
        else:
            add_terms(terms, target, added)
        self.record("other", f"sum of rows {box.m0} to {box.m1}", "comm", start)
        if finish.result is None:
            return []
        result = self._shared(finish.result)
        result.copy_(target)
        if after is not None:  # what others take is the sum alone
            after.follow(out, box.m0, box.m1)
        self.call.bank.counters(self.context.rank).add(self.room.published_at + finish.result.need)
        return [self.send(result, peer, tag) for peer, tag in finish.forward]

    # Memory -------------------------------------------------------------------------------------------------

    def _private(self, at: int, rows: int, cols: int) -> Tensor:
        return view(self.private, self.dtype, at, rows, cols)

    def _shared(self, v: View) -> Tensor:
        return view(self.call.bank.shared(v.rank), self.dtype, v.at, v.rows, v.cols)

    def _view(self, v: View) -> Tensor:
        """The tensor of a view, once what it needs is there."""
        if v.space is Space.INBOX:
            self._wait_for_part(v.need)
            return self._private(self.room.inbox_at + v.at, v.rows, v.cols)
        if v.space is Space.SUM:
            self.summed.wait(v.need, 1, timeout=self.left(), what=f"{self.op}: the host's sum of block {v.need}")
            return self._private(v.at, v.rows, v.cols)
        counter = v.need + (self.room.published_at if v.space is Space.RESULT else 0)
        what = f"{self.op}: block {v.need} of rank {v.rank}"
        self.call.bank.counters(v.rank).wait(counter, v.tiles, timeout=self.left(), what=what)
        return self._shared(v)


def _rows(x: Tensor | Rows) -> int:
    return x.m if isinstance(x, Rows) else x.shape[0]
