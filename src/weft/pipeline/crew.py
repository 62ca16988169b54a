"""Threads that are there when needed: each job begins at once, on an idle thread or a new one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Crew:
    """Runs jobs beside the caller; a job never waits for another to end, since jobs wait for each other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self, job: Callable[[], None]) -> None:
        """Begins a job, which handles its own errors."""
        with self._lock:
            if self._closed:
                return
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put(job)

    def close(self) -> None:
        """Lets the threads go, each at the end of its job."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := inbox.get()) is not None:
            job()
            del job  # what it refers to may be freed
            with self._lock:
                if self._closed:
                    return
                self._idle.append(inbox)
