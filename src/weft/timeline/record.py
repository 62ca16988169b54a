"""`weft.trace`: recording what the executors do.

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
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.timeline.events import Event, Kind
from weft.timeline.summary import Baseline, Summary
from weft.timeline.timeline import Timeline, TracedCall, figures

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
        from weft.timeline import clocks  # which needs torch.distributed

        return clocks.gather(self.timeline, group=group, device=device)


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
