"""A thread that communicates while the caller's thread computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from weft.errors import PeerTimeout


class Job:
    """Work that a thread does; `join` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[Job], None], on_error: Callable[[], None]) -> None:
        self._work = work
        self._on_error = on_error
        self._finished = threading.Event()
        self._agreed = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Does the work; called once, by the worker."""
        try:
            # A thread starts with gradients on, whatever its caller has; and only in this mode may it write to the
            # output of a caller that is in this mode.
            with torch.inference_mode():
                self._work(self)
        except BaseException as error:  # told to the caller by join()
            self.error = error
            self._on_error()
        finally:
            self._agreed.set()
            self._finished.set()

    def agreed(self) -> None:
        """The job says that all ranks are here."""
        self._agreed.set()

    def wait_until_agreed(self, *, seconds: float) -> None:
        """Returns when all ranks are here; raises what stopped the job before. `seconds` as in `join`."""
        if not self._agreed.wait(seconds):
            raise PeerTimeout("the communication thread to hear from all ranks", seconds=seconds)
        self.check()

    def check(self) -> None:
        """Raises what the job has raised so far."""
        if self.error is not None:
            raise self.error

    def is_finished(self) -> bool:
        """Whether `join` would return at once."""
        return self._finished.is_set()

    def join(self, *, seconds: float) -> None:
        """Waits for the end. `seconds` are beyond every deadline inside the job: only a bug reaches them."""
        if not self._finished.wait(seconds):
            raise PeerTimeout("the communication thread", seconds=seconds)
        self.check()


class Worker:
    """One daemon thread that runs jobs one after the other; started with the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[Job], None], *, on_error: Callable[[], None] = lambda: None) -> Job:
        """Hands over a job and returns at once; `on_error` runs in the thread when the job raises."""
        job = Job(work, on_error)
        if self._thread is None or not self._thread.is_alive():  # after a fork it is not
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def __del__(self) -> None:
        self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    # Not a method: the thread must not keep its worker alive.
    while (job := jobs.get()) is not None:
        job.run()
        del job
