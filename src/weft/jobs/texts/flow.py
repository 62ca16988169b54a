"""Threads that work ahead of a loop and behind it, a bounded number of things at a time, in order.

reads, tokenizes    | computes       | writes
Ahead, a thread     | the caller     | Behind, a thread
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from weft.comm.deadline import READ_AHEAD

_T = TypeVar("_T")
_R = TypeVar("_R")
_POLL = 0.05  # seconds, and only where there is nothing to do but to look whether all of it is over


class Ahead(Generic[_T]):
    """The items of an iterator, made by a thread of its own, `room` of them ahead. What it raises comes in its turn.

    >>> with Ahead(iter("abc"), room=2) as items:
    ...     "".join(items)
    'abc'
    """

    def __init__(self, items: Iterator[_T], *, room: int) -> None:
        self._items = items
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as error:
            self._put("error", error)

    def _put(self, kind: str, what: Any) -> bool:
        while not self._is_over.is_set():
            try:
                self._queue.put((kind, what), timeout=_POLL)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[_T]:
        while True:
            kind, what = self._queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise what
            yield what

    @property
    def has_ended(self) -> bool:
        """Whether its thread is gone. One that waits for a pipe cannot be called back."""
        return not self._thread.is_alive()

    def __enter__(self) -> Ahead[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(READ_AHEAD.seconds)


class Behind(Generic[_T, _R]):
    """Calls a function on each item that is put, in order, by a thread of its own; `room` items may wait. What it
    raises is raised by the next `put` or by `finish`, and nothing is called after that.

    Leaving the context waits for what was put.

    >>> with Behind(str.upper, room=2) as behind:
    ...     behind.put("a")
    ...     behind.finish()
    ['A']
    """

    def __init__(self, function: Callable[[_T], _R], *, room: int) -> None:
        self._function = function
        self._queue: queue.Queue[tuple[bool, Any]] = queue.Queue(room)
        self._done: queue.SimpleQueue[_R] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="weft-behind", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            is_last, item = self._queue.get()
            if is_last:
                return
            if self._error is None:
                try:
                    self._done.put(self._function(item))
                except BaseException as error:
                    self._error = error

    def put(self, item: _T) -> None:
        self._check()
        self._queue.put((False, item))

    def done(self) -> list[_R]:
        """What the function gave since this was last asked."""
        found: list[_R] = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def finish(self) -> list[_R]:
        """Waits until all is done; the rest of `done`."""
        self._end()
        self._check()
        return self.done()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._queue.put((True, None))
        self._thread.join()

    def __enter__(self) -> Behind[_T, _R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
