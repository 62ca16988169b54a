"""Work on a thread of its own, whose end and errors a test waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], seconds: float = 60.0) -> Callable[[], T]:
    """Runs `work` on a thread; the result waits for it, and gives its result or raises its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> T:
        thread.join(seconds)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
        return results[0]

    return join
