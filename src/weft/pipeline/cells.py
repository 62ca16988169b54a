"""How the threads of a rank wait for each other, and stop when anything has failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft.reshard.staging import Stopped

_SLICE_SECONDS = 0.1


class Cell:
    """A value that one thread sets and others wait for."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._value: object = None

    def set(self, value: object = None) -> None:
        """Hands the value over."""
        self._value = value
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, stop: threading.Event) -> object:
        """The value, once it is there."""
        while not self._event.wait(_SLICE_SECONDS):
            if stop.is_set():
                raise Stopped
        return self._value

    def poll(self, seconds: float) -> bool:
        """Whether it is there, after waiting for so long at most."""
        return self._event.wait(seconds)

    def get(self) -> object:
        """The value, which is there."""
        return self._value


class Gate:
    """Lets the most urgent of those that are ready pass first; the others follow when it is done."""

    def __init__(self, stop: threading.Event) -> None:
        self._condition, self._stop = threading.Condition(), stop
        self._ready: set[int] = set()

    @contextmanager
    def passing(self, urgency: int) -> Iterator[None]:
        """The block runs when nothing more urgent is ready or passing."""
        with self._condition:
            self._ready.add(urgency)
            while min(self._ready) < urgency:
                self._condition.wait(_SLICE_SECONDS)
                if self._stop.is_set():
                    raise Stopped
        try:
            yield
        finally:
            with self._condition:
                self._ready.discard(urgency)
                self._condition.notify_all()
