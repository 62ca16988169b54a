"""What every wait for a peer needs: a deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from weft._torch import group_timeout
from weft.errors import LONGEST_SECONDS


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
    return group_timeout(pg, device)
