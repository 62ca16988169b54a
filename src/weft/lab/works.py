"""What a call of the backend `dma` gives back, and who runs it: messages, collectives, and the order of the latter."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.comm.deadline import at_work
from weft.lab.card import CardChannel, CardTransfer

if TYPE_CHECKING:
    Work = object
else:
    from torch.distributed import Work  # whose methods are declared with other names of arguments

_NONE = timedelta(0)


class MessageWork(Work):
    """A message under way."""

    def __init__(self, transfer: CardTransfer, tensors: list[Tensor]) -> None:
        super().__init__()
        self._transfer, self._tensors = transfer, tensors

    def wait(self, timeout: timedelta = _NONE) -> bool:
        self._transfer.wait(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._transfer.is_over()

    def is_success(self) -> bool:
        return self.is_completed()

    def source_rank(self) -> int:
        assert self._transfer.source is not None
        return self._transfer.source

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()

        def finish() -> None:
            try:
                self.wait()
            except RuntimeError as error:
                future.set_exception(error)
            else:
                future.set_result(self._tensors)

        threading.Thread(target=finish, name="weft-card-future", daemon=True).start()
        return future


class CollectiveWork(Work):
    """A collective that runs, or waits for its turn."""

    def __init__(self, call: Callable[[], None], results: Any, channel: CardChannel) -> None:
        super().__init__()
        self._call: Callable[[], None] | None = call
        self._results, self._channel = results, channel
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: Any = None
        self._lock = threading.Lock()

    def run(self) -> None:
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # and with it the tensors that it works with
        with self._lock:
            self._over.set()
            if self._future is not None:
                self._tell()

    def wait(self, timeout: timedelta = _NONE) -> bool:
        # A message that never comes ends the collective after the group's own time; a shorter one is kept here.
        if not self._over.wait(timeout.total_seconds() or None):
            self._channel.give_up()
            self._over.wait()
            raise RuntimeError(f"Timed out waiting {timeout.total_seconds() * 1000:.0f}ms for a collective")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        return self._results

    def get_future(self) -> Any:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._over.is_set():
                    self._tell()
            return self._future

    def _tell(self) -> None:
        if self._error is None:
            self._future.set_result(self._results)
        else:
            self._future.set_exception(self._error)


class CollectiveWorker:
    """Runs collectives in order: on the caller's thread if it waits for them anyway, and none is before them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[CollectiveWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = 0
        self._lock = threading.Lock()

    def run(self, work: CollectiveWork, *, is_awaited: bool) -> None:
        with self._lock:
            is_here = is_awaited and self._left == 0
            if not is_here:
                self._left += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="weft-card-collectives", daemon=True)
                    self._thread.start()
                self._jobs.put(work)
        if is_here:
            work.run()

    def stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            with at_work():
                work.run()
                del work
            with self._lock:
                self._left -= 1
