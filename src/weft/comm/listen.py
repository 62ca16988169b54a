"""Waits that a signal can interrupt.

gloo waits in C++ until a message is there or its deadline has passed. It cannot wait for a while and then again: a wait
that runs out of time closes the connections. Python runs signal handlers (Ctrl-C) on its main thread only, and only
between two of its own instructions. So what the main thread has to wait for in gloo, a helper thread waits for, and the
main thread sleeps on a lock, which signals interrupt. That costs one hand-over, 15 us. Waits on other threads stay
where they are.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import torch


class _Job:
    """A wait, and its end."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def run(self) -> None:
        try:
            with torch.inference_mode():  # only so may it write to what a caller in this mode gave
                self.wait()
        except BaseException as error:  # raised by who waits for the end
            self.error = error
        finally:
            self.ended.release()


class _Helper:
    """A thread that waits for one thing after the other."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="weft-wait", daemon=True).start()

    def start(self, job: _Job) -> None:
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            del job
            _idle.append(self)  # not before: a wait that was interrupted may last longer than its caller


# Threads of the process, as those of gloo are; the main thread needs one at a time.
_idle: list[_Helper] = []
os.register_at_fork(after_in_child=_idle.clear)


def listening(wait: Callable[[], None], *, on_interrupt: Callable[[], None] | None = None) -> None:
    """Calls `wait`, so that signals are handled meanwhile; raises what it raises.

    A handler that raises ends this call, but not the wait: `on_interrupt` should, so that no thread is left in it when
    the process ends.

    >>> listening(lambda: print("there"))
    there
    """
    if threading.current_thread() is not threading.main_thread():
        wait()
        return
    job = _Job(wait)
    try:
        helper = _idle.pop()
    except IndexError:
        try:
            helper = _Helper()
        except RuntimeError:  # no more threads, or the interpreter is about to end
            wait()
            return
    helper.start(job)
    try:
        job.ended.acquire()
    except BaseException:
        if on_interrupt is not None:
            on_interrupt()
        raise
    if job.error is not None:
        raise job.error
