"""Threads for streams: how the executor runs on a CPU, with Triton's interpreter and gloo.

It is there to exercise the code that GPUs run, order for order; it is not a fast way to compute on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from weft.errors import LONGEST_SECONDS, PeerTimeout
from weft.kernels.triton import Late
from weft.overlap.streams.device import Event
from weft.overlap.worker import Job, Worker

_TILES_AT_ONCE = 2  # so that matmuls of a few tiles already have groups
_GAVE_UP = 2**20


class ThreadEvent:
    """A point in a thread's work."""

    def __init__(self) -> None:
        self._past = threading.Event()

    def query(self) -> bool:
        return self._past.is_set()

    def pass_(self) -> None:
        self._past.set()

    def wait(self) -> None:
        """Every wait before the event has its own deadline, so this one ends."""
        if not self._past.wait(LONGEST_SECONDS):
            raise PeerTimeout("a point in another stream", seconds=LONGEST_SECONDS)


class ThreadStream:
    """One thread. After an error the rest of a call's work is left out; its events pass all the same."""

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._worker = Worker(name)
        self._on_error = on_error
        self._failed = False
        self._jobs: list[Job] = []

    def run(self, work: Callable[[], None]) -> None:
        def unless_failed(job: Job) -> None:
            if not self._failed:
                work()

        self._jobs.append(self._worker.start(unless_failed, on_error=self._fail))

    def record(self) -> Event:
        event = ThreadEvent()
        self._jobs.append(self._worker.start(lambda job: event.pass_()))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, ThreadEvent)
        self._jobs.append(self._worker.start(lambda job: event.wait()))

    def _fail(self) -> None:
        self._failed = True
        self._on_error()

    def join(self, *, seconds: float) -> None:
        """Returns when all is done; raises the first error."""
        jobs, self._jobs = self._jobs, []
        try:
            for job in jobs:
                job.join(seconds=seconds)
        finally:
            self._failed = False


class ThreadDevice:
    """The CPU with two threads for streams."""

    def __init__(self, late: Late) -> None:
        def give_up() -> None:  # kernels that wait for what a thread no longer does
            late.flag.fill_(_GAVE_UP)

        self._current = ThreadStream("weft-stream-compute", give_up)
        self._side = ThreadStream("weft-stream-side", give_up)

    def current(self) -> ThreadStream:
        return self._current

    def side(self) -> ThreadStream:
        return self._side

    def tiles_at_once(self) -> int:
        return _TILES_AT_ONCE

    def is_capturing(self) -> bool:
        return False

    def fetch(self, flag: Tensor) -> tuple[Tensor, Event]:
        event = ThreadEvent()
        event.pass_()
        return flag.clone(), event

    def finish(self, *, seconds: float) -> None:
        try:
            self._side.join(seconds=seconds)  # first: its error is the reason of the other's
        finally:
            self._current.join(seconds=seconds)

    def synchronize(self) -> None:
        self.finish(seconds=LONGEST_SECONDS)
