"""One thread computes: as soon as it is free it takes what waits, up to a budget of tokens. There is no timer.

All models of a process share it, and the one whose oldest text has waited longest is next: a thread for each would have
the kernels of two models fight for the cores, and the order would be nobody's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.jobs.serve.errors import Problem, RequestError
from weft.jobs.serve.queue import QueuedText, TextQueue, Ticket


class Computes(Protocol):
    """What makes results of texts; `ServedModel` does."""

    def run(self, contents: Sequence[Any]) -> Sequence[Any]:
        """A result for each; an exception in its place where one text alone is at fault."""
        ...


@dataclass(frozen=True)
class BatchFigures:
    """What a batch was; `waiting` texts are left in the queues."""

    texts: int
    tokens: int
    seconds: float
    waiting: int


class ComputeEngine:
    """Queues, and the thread that empties them. `loop` is that of the event loop which everybody waits in."""

    def __init__(
        self,
        models: Mapping[str, Computes],
        *,
        budget: int,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[BatchFigures], None] = lambda figures: None,
    ) -> None:
        self._models, self._budget, self._loop, self._report = models, budget, loop, report
        self._queues = {name: TextQueue() for name in models}
        self._ready = threading.Condition()
        self._is_closing = False
        self.busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="weft-serve-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Texts in the queues."""
        return sum(map(len, self._queues.values()))

    def submit(self, model: str, contents: Sequence[tuple[Any, int]]) -> Ticket:
        """Queues (what the model takes, its tokens) of one request. From the event loop only."""
        now = time.perf_counter()
        ticket = Ticket(self._loop.create_future(), [None] * len(contents), len(contents))
        texts = [QueuedText(ticket, i, content, tokens, now) for i, (content, tokens) in enumerate(contents)]
        with self._ready:
            if self._is_closing or not self._thread.is_alive():
                raise RequestError(Problem.UNHEALTHY, "the server is stopping")
            self._queues[model].add(texts)
            self._ready.notify()
        return ticket

    def close(self, timeout: float) -> bool:
        """Takes no more, ends what waits; whether that was done in time."""
        with self._ready:
            self._is_closing = True
            self._ready.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            model, batch = taken
            if batch:  # all that waited may have gone
                self._compute(self._models[model], batch)

    def _take(self) -> tuple[str, list[QueuedText]] | None:
        """The next batch and its model; None at the end."""
        with self._ready:
            while True:
                since = {name: old for name, queue in self._queues.items() if (old := queue.oldest()) is not None}
                if since:
                    name = min(since, key=since.__getitem__)
                    self.busy_since = time.perf_counter()
                    return name, self._queues[name].take(self._budget)
                self.busy_since = None
                if self._is_closing:
                    return None
                self._ready.wait()

    def _compute(self, model: Computes, batch: list[QueuedText]) -> None:
        start = time.perf_counter()
        results = _results(model, batch)
        seconds = time.perf_counter() - start
        done = []
        for text, result in zip(batch, results, strict=True):
            ticket = text.ticket
            ticket.queue_seconds = max(ticket.queue_seconds, start - text.since)
            ticket.compute_seconds = max(ticket.compute_seconds, seconds)
            ticket.results[text.index] = result
            ticket.left -= 1
            failed = isinstance(result, Exception)
            if not ticket.is_gone and (failed or not ticket.left):
                ticket.is_gone = True  # its other texts need not be computed
                done.append((ticket, result if failed else None))
        self._report(BatchFigures(len(batch), sum(t.tokens for t in batch), seconds, self.waiting))
        try:
            self._loop.call_soon_threadsafe(_settle, done)  # once a batch: waking the loop costs more than a result
        except RuntimeError:  # the loop is closed: nobody waits
            return


def _results(model: Computes, batch: Sequence[QueuedText]) -> Sequence[Any]:
    """Where a batch fails, its texts are tried one by one, so that one does not fail its neighbours."""
    try:
        return model.run([text.content for text in batch])
    except Exception as error:
        if len(batch) == 1:
            return [error]
    return [_results(model, [text])[0] for text in batch]


def _settle(done: list[tuple[Ticket, Exception | None]]) -> None:
    for ticket, error in done:
        if ticket.future.done():  # cancelled
            continue
        if error is None:
            ticket.future.set_result(None)
        else:
            ticket.future.set_exception(error)
