"""`weft.trace`: recording what the executors do, and the timelines of all ranks on one clock.

A user writes

    with weft.trace() as t:
        y = weft.matmul_reduce_scatter(x, w, group=group)
    print(t.summary())                      # ECT, E_overlap and the fraction of the bound of every kind of call
    print(t.calls[0].timeline)              # what happened in one of them
    t.save("trace.json")

and an executor, where it is cheap enough to open a span,

    with record.span("compute", "matmul", lane="compute", flops=2 * M * N * K):
        ...

or on a hot path, or where a thread of its own does the work,

    recorder = record.current()            # once, when the op starts, on the caller's thread
    ...
    if recorder is not None:                # on any thread
        recorder.add("send", f"group {i}", lane="comm", start=start, end=record.now(), bytes=n)

An op that wants a row of its own in the summary records through `recorder.call(...)`: its events belong to that call
and to the trace.

The recorder is found through a context variable, which a new thread does not inherit: whoever starts a thread
hands the recorder over, as above (or starts it with `contextvars.copy_context().run`). Without a trace,
`span` and `current` cost one read of that variable.

Traces nest: what an inner trace records, the traces around it record too, so that measuring a part never
takes it away from the whole.

Every rank stamps events with its own monotonic clock. Ranks on one machine share that clock (also across network
namespaces), which their boot id shows: an offset of exactly zero is better than the best measurement. For the others
rank 0 answers pings, as in NTP: with `sent` and `received` on the rank's clock and `replied` on rank 0's, `replied -
(sent + received) / 2` is the offset, wrong by at most half the round trip. The ping with the shortest round trip
counts. What travels are numbers and JSON text; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.deadline import Deadline, timeout_of
from weft.comm.group import Group
from weft.comm.tags import Line, Mark, turn
from weft.comm.tell import tell_all
from weft.timeline.events import Event, Kind
from weft.timeline.summary import Baseline, Summary
from weft.timeline.timeline import Timeline, TracedCall, figures

PINGS = 32
_MOST_BYTES = 1 << 30  # of a rank's timeline


@dataclass(frozen=True)
class Ping:
    """One round trip: `sent` and `received` on the asking rank's clock, `replied` on rank 0's."""

    sent: float
    replied: float
    received: float


@dataclass(frozen=True)
class Offset:
    """Rank 0's clock less this rank's, and how far off that can be, both in seconds."""

    seconds: float
    error: float


def offset_of(pings: Sequence[Ping]) -> Offset:
    """The offset from the ping with the shortest round trip.

    >>> offset_of([Ping(1.0, 11.5, 2.0), Ping(3.0, 13.25, 3.5)])
    Offset(seconds=10.0, error=0.25)
    """
    best = min(pings, key=lambda p: p.received - p.sent)
    return Offset(best.replied - (best.sent + best.received) / 2, (best.received - best.sent) / 2)


def gather(timeline: Timeline, *, group: ProcessGroup, device: str = "cpu") -> Timeline:
    """All ranks' timelines on rank 0's clock, lanes named `rank r/...`; every rank calls it and gets it.

    `device` is where the group's backend takes tensors from: `"cpu"` for gloo and mpi, `"cuda"` for nccl.
    """
    with _Clocks(group, device) as clocks:
        offset = clocks.offset(PINGS)
        texts = clocks.tell("timelines", timeline.shifted(offset.seconds).to_json())
    ranks = {f"rank {rank}": Timeline.from_json(text) for rank, text in enumerate(texts)}
    return Timeline.merge(ranks, name=timeline.name)


class _Clocks:
    """The clocks of a group's ranks: messages of their own, beside everything else that is under way on the group."""

    def __init__(self, pg: ProcessGroup, device: str) -> None:
        self._pg, self._device = pg, device
        self._timeout = timeout_of(pg, device)
        self._tag = Line.CLOCKS.mark(Mark.PING)
        self._turn = turn(pg, "the clocks of a group", Deadline.after(self._timeout))
        self._group: Group | None = None

    def __enter__(self) -> _Clocks:
        self._turn.__enter__()
        if self._device == "cpu":
            self._group = Group(self._pg, timeout=self._timeout, line=Line.CLOCKS)
        return self

    def __exit__(self, *error: Any) -> None:
        self._turn.__exit__(*error)

    def tell(self, what: str, mine: str) -> list[str]:
        """What each rank gave; through the store where messages are a device's."""
        if self._group is None:
            return tell_all(f"{what} of a group", mine, group=self._pg, timeout=self._timeout)
        return self._group.tell(what, mine, most=_MOST_BYTES)

    def offset(self, pings: int) -> Offset:
        """What to add to this rank's clock to get rank 0's."""
        ids, rank = self.tell("clocks", _clock_id()), self._pg.rank()
        if rank == 0:
            for peer in (peer for peer, clock in enumerate(ids) if clock != ids[0]):
                self._answer(peer, pings)
        return Offset(0.0, 0.0) if ids[rank] == ids[0] else offset_of([self._ask() for _ in range(pings)])

    def _answer(self, peer: int, pings: int) -> None:
        """Rank 0's side of the pings of one peer."""
        stamp = torch.zeros(1, dtype=torch.float64, device=self._device)
        for _ in range(pings):
            self._receive(stamp, peer)
            stamp.fill_(time.perf_counter())
            self._send(stamp, peer)

    def _ask(self) -> Ping:
        stamp = torch.zeros(1, dtype=torch.float64, device=self._device)
        sent = time.perf_counter()
        self._send(stamp, 0)
        self._receive(stamp, 0)
        replied = float(stamp)
        return Ping(sent, replied, time.perf_counter())

    def _send(self, stamp: Tensor, peer: int) -> None:
        if self._group is None:
            dist.send(stamp, group=self._pg, group_dst=peer, tag=self._tag)
        else:
            self._group.send(stamp, peer, tag=self._tag).wait(what="a ping")

    def _receive(self, stamp: Tensor, peer: int) -> None:
        if self._group is None:
            dist.recv(stamp, group=self._pg, group_src=peer, tag=self._tag)
        else:
            self._group.recv(stamp, peer, tag=self._tag).wait(what="a ping")


def _clock_id() -> str:
    """A text that two processes have in common only if they read the same monotonic clock.

    A time namespace may shift the clock of a container, so it is part of the identity. Where the system does
    not tell (not Linux), the clock counts as this process's own.
    """
    boot_id, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    try:
        identity = f"{boot_id.read_text()} {namespace.readlink()}".encode()
    except OSError:
        identity = os.urandom(16)
    return hashlib.sha256(identity).hexdigest()


# Seconds of the monotonic clock, which all processes of one machine share, and which the native core reads
# too.
now = time.perf_counter

_Record = tuple[str, Kind, str, float, float, int | None, float | None]
_current: ContextVar[Trace | None] = ContextVar("weft_trace", default=None)
_OFF = nullcontext()


class Trace:
    """The recorder of one `weft.trace()` block. Threads may add to it at the same time.

    An event that a thread adds after the block has ended is kept; `timeline` is a snapshot.
    """

    def __init__(self, *, name: str = "", around: Trace | None = None) -> None:
        self.name = name
        self._around = around
        # Plain tuples: checking and freezing an event costs more than the append, and can wait until it is
        # looked at. `list.append` is atomic, with the GIL and without it.
        self._records: list[_Record] = []
        self._calls: list[CallTrace] = []

    def add(
        self,
        kind: Kind,
        name: str,
        *,
        lane: str,
        start: float,
        end: float,
        bytes: int | None = None,
        flops: float | None = None,
    ) -> None:
        """Records one event; `start` and `end` are from `record.now`."""
        self._append((lane, kind, name, start, end, bytes, flops))

    def _append(self, record: _Record) -> None:
        recorder: Trace | None = self
        while recorder is not None:
            recorder._records.append(record)
            recorder = recorder._around

    def call(
        self,
        what: str,
        *,
        plan: str = "",
        reason: str = "",
        baseline: Callable[[], Baseline | None] = lambda: None,
        predicted: Callable[[], Timeline] | None = None,
    ) -> CallTrace:
        """Starts a call of an op. `what` is its kind, `reason` why the plan is as it is.

        What it is judged by is asked for only when it is looked at.
        """
        made = CallTrace(self, what, plan, reason, baseline, predicted)
        recorder: Trace | None = self
        while recorder is not None:
            recorder._calls.append(made)
            recorder = recorder._around
        return made

    @contextmanager
    def span(
        self, kind: Kind, name: str, *, lane: str, bytes: int | None = None, flops: float | None = None
    ) -> Iterator[None]:
        """Records the block as one event, also when it raises: a trace shows where a run broke."""
        start = now()
        try:
            yield
        finally:
            self.add(kind, name, lane=lane, start=start, end=now(), bytes=bytes, flops=flops)

    @property
    def timeline(self) -> Timeline:
        """What was recorded so far."""
        return Timeline((Event(*record) for record in tuple(self._records)), name=self.name)

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        """The calls of ops that have ended so far, in order of start: each with its own timeline and figures."""
        return tuple(call.value() for call in tuple(self._calls) if call.ended is not None)

    def summary(self, baseline: Baseline | None = None) -> Summary:
        """Busy, waiting and overlapped time; for each kind of op call ECT, E_overlap and the fraction of the bound."""
        return replace(self.timeline.summary(baseline), calls=figures(self.calls))

    def save(self, path: str | Path) -> None:
        """`timeline.save(path)`: Chrome trace JSON, which Perfetto opens."""
        self.timeline.save(path)

    def gather(self, *, group: ProcessGroup, device: str = "cpu") -> Timeline:
        """All ranks' timelines on rank 0's clock; every rank of the group calls it and gets it."""

        return gather(self.timeline, group=group, device=device)


class CallTrace:
    """The recorder of one call of an op. Threads may add to it at the same time."""

    def __init__(
        self,
        trace: Trace,
        what: str,
        plan: str,
        reason: str,
        baseline: Callable[[], Baseline | None],
        predicted: Callable[[], Timeline] | None,
    ) -> None:
        self._trace, self._what, self._plan, self._reason = trace, what, plan, reason
        self._baseline, self._predicted = baseline, predicted
        self._records: list[_Record] = []
        self.started = now()
        self.ended: float | None = None
        self._is_setup = False

    def add(
        self,
        kind: Kind,
        name: str,
        *,
        lane: str,
        start: float,
        end: float,
        bytes: int | None = None,
        flops: float | None = None,
    ) -> None:
        """Records one event of the call."""
        record = (lane, kind, f"{self._what.split(' ', 1)[0]}: {name}", start, end, bytes, flops)
        self._records.append(record)
        self._trace._append(record)

    def end(self, *, is_setup: bool = False) -> None:
        """The call is over, well or not. `is_setup` says that it made what later calls find ready."""
        self.ended, self._is_setup = now(), is_setup

    def value(self) -> TracedCall:
        """The call as it was recorded."""
        assert self.ended is not None
        events = (Event(*record) for record in tuple(self._records))
        return TracedCall(
            self._what,
            self._plan,
            self.ended - self.started,
            Timeline(events, name=f"measured: {self._what}"),
            self._baseline(),
            self._predicted,
            self._reason,
            self._is_setup,
        )


@contextmanager
def trace(*, name: str = "") -> Iterator[Trace]:
    """Records what weft does in this block.

    >>> with trace() as t, span("other", "nap", lane="main"):
    ...     time.sleep(0.001)
    >>> t.timeline.lanes
    ('main',)
    """
    recorder = Trace(name=name, around=_current.get())
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)


def current() -> Trace | None:
    """The recorder of the innermost trace that is open here; None when nothing is recorded."""
    return _current.get()


def span(
    kind: Kind, name: str, *, lane: str, bytes: int | None = None, flops: float | None = None
) -> AbstractContextManager[None]:
    """A block that is recorded as one event if a trace is open, and costs nothing to speak of if none is."""
    recorder = _current.get()
    if recorder is None:
        return _OFF
    return recorder.span(kind, name, lane=lane, bytes=bytes, flops=flops)
