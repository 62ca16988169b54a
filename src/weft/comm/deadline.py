"""Every wait for a peer has a deadline, and Ctrl-C ends it: the one table of how long we wait, and how.

Overlapped matmuls are not in the table: every call on a process group has the timeout that the group was made with
(`timeout_of`; gloo's default is 30 minutes).

gloo waits in C++ until a message is there or its deadline has passed. It cannot wait for a while and then again: a wait
that runs out of time closes the connections. Python runs signal handlers (Ctrl-C) on its main thread only, and only
between two of its own instructions. So what the main thread has to wait for in gloo, a helper thread waits for
(`listening`), and the main thread sleeps on a lock, which signals interrupt. That costs one hand-over, 15 us. Waits on
other threads stay where they are.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from weft.errors import LONGEST_SECONDS

if TYPE_CHECKING:  # the table must import without torch
    from torch.distributed import ProcessGroup


LOOK_AGAIN_SECONDS = 0.1
"""After this a wait for another thread looks whether somebody is still there who would end it."""


@dataclass(frozen=True)
class Limit:
    """How long a kind of wait lasts by default: `seconds`, or `first` for the first one on a process group.

    Ranks come to their first call minutes apart, because one of them still reads its weights, or imports.
    """

    name: str
    seconds: float
    first: float

    def __init__(self, name: str, seconds: float, *, first: float | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "first", seconds if first is None else first)

    def of(self, given: float | None, pg: ProcessGroup | None = None) -> float:
        """What the caller gave, in seconds, or the default.

        >>> RESHARD.of(7.0), RESHARD.of(None)
        (7.0, 60.0)
        """
        if given is not None:
            return given
        if pg is None:
            return self.seconds
        with _lock:
            begun = _begun.setdefault(pg, set())
            is_first = self.name not in begun
            begun.add(self.name)
        return self.first if is_first else self.seconds


# The table.
RESHARD = Limit("reshard", 60.0, first=300.0)
PIPELINE = Limit("pipeline", 300.0)  # for one tensor; a stage may compute for minutes
FILES = Limit("files", 60.0)  # for the other ranks, not for the disk
TRAIN = Limit("train", 60.0)
ROWS = Limit("rows of a matmul", 60.0)  # of a kernel that is called by itself
PROBE = Limit("a probe of the machine", 60.0)
STORE = Limit("an answer of the store", 1.0)  # beyond a deadline, where there is one: a server that hangs never answers
SURVIVORS = Limit("the survivors of a group", 60.0)  # the last of them may wait for the dead one that long
THREAD_END = Limit("the end of a thread", 5.0)  # on top of its deadline, which every wait of it has
VLLM = Limit("vllm", 300.0)
LAB_RUN = Limit("a run in the lab", 60.0)
LAB_START = Limit("the start of the lab", 120.0)  # one import of torch, on a machine whose disk is cold
LAB_ANSWER = Limit("the lab's answer", 30.0)  # on top of a run's timeout: the ranks are stopped first
LAB_CONNECT = Limit("a connection in the lab", 30.0)
LAB_GRACE = Limit("ranks of the lab", 2.0)  # to raise by themselves after another's failure, and to exit after the end
LAB_STACKS = Limit("stacks of hanging ranks", 2.0)  # one that is stopped (SIGSTOP) never writes them
LAB_END = Limit("the end of the lab", 5.0)  # it goes by itself when the control socket closes
COMMAND = Limit("a command in the lab", 600.0)
SERVE_HEAD = Limit("the head of a request", 30.0)  # from its first byte to its last, or from the connection
SERVE_BODY = Limit("the body of a request", 30.0)
SERVE_BATCH = Limit("a batch of requests", 300.0)  # longer: the engine will not come back
SERVE_IDLE = Limit("another request of a client", 75.0)  # clients keep their connections, and hate to lose them
SERVE_END = Limit("the end of a worker", 5.0)  # beyond the time that its requests have
READ_AHEAD = Limit("the end of a thread that reads ahead", 1.0)  # one that waits for a pipe cannot be called back

# The kinds of wait that there were on each process group, by name.
_begun: WeakKeyDictionary[ProcessGroup, set[str]] = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Deadline:
    """`seconds` from the moment it was made; several waits of one operation count down the same one.

    >>> deadline = Deadline.after(30.0)
    >>> 0.0 < deadline.left() <= 30.0
    True
    """

    seconds: float
    end: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline `seconds` from now; the clock is the one that `time.monotonic` reads."""
        if not 0 < seconds <= LONGEST_SECONDS:
            raise ValueError(
                f"timeout is {seconds!r}, expected a number of seconds above 0 and up to {LONGEST_SECONDS:g}; "
                "every wait in weft ends"
            )
        return cls(seconds=seconds, end=time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds until the deadline; 0.0 when it has passed."""
        return max(0.0, self.end - time.monotonic())


def timeout_of(pg: ProcessGroup, device: str = "cpu") -> float:
    """The group's own timeout, seconds: the one that it was made with is the deadline of every call on it."""
    from weft._torch import group_timeout

    return group_timeout(pg, device)


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


@contextmanager
def at_work() -> Iterator[None]:
    """Around the work of a daemon thread, and the dropping of what it worked with: the process does not end under it.

    Python ends a daemon thread where it next wants the interpreter, by unwinding its stack; if torch's C++ is on that
    stack, the whole process is aborted. So the end of a process waits for such threads, for a moment.
    """
    global _workers
    with _rest:
        _workers += 1
        if _workers == 1 and os.getpid() not in _awaited:
            _awaited.add(os.getpid())
            atexit.register(_wait_for_rest)
    try:
        yield
    finally:
        with _rest:
            _workers -= 1
            _rest.notify_all()


def _wait_for_rest() -> None:
    with _rest:
        _rest.wait_for(lambda: _workers == 0, timeout=_REST_SECONDS)
    time.sleep(_GLOO_SECONDS)


_REST_SECONDS = 2.0
_GLOO_SECONDS = 0.05  # gloo drops the tensors of a message a moment after it is there, and needs Python for that
_rest = threading.Condition()
_workers = 0
_awaited: set[int] = set()  # processes that wait at their end


def _forget_workers() -> None:
    global _rest, _workers
    _rest, _workers = threading.Condition(), 0


os.register_at_fork(after_in_child=_forget_workers)


class _Job:
    """A wait, and its end."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def run(self) -> None:
        try:
            from torch import inference_mode  # the table must import without torch

            with inference_mode():  # only so may it write to what a caller in this mode gave
                self.wait()
        except BaseException as error:  # raised by whoever waits for the end
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
            with at_work():
                job.run()
                del job
            _idle.append(self)  # not before: a wait that was interrupted may last longer than its caller


# Threads of the process, as those of gloo are; the main thread needs one at a time.
_idle: list[_Helper] = []
os.register_at_fork(after_in_child=_idle.clear)
