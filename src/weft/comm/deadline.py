"""What every wait for a peer needs: a deadline. And the one table of how long they are unless a caller says otherwise.

Overlapped matmuls are not in the table: every call on a process group has the timeout that the group was made with
(`timeout_of`; gloo's default is 30 minutes).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import LONGEST_SECONDS

if TYPE_CHECKING:  # this module is imported by those who do without torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Limit:
    """How long a kind of wait lasts unless told: `seconds`, or `first` for the first one on a process group.

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
        from weft.comm.tags import is_first

        return self.first if is_first(pg, self.name) else self.seconds


RESHARD = Limit("reshard", 60.0, first=300.0)
PIPELINE = Limit("pipeline", 300.0)  # for one tensor; a stage may compute for minutes
FILES = Limit("files", 60.0)  # for the other ranks, not for the disk
TRAIN = Limit("train", 60.0)
ROWS = Limit("rows of a matmul", 60.0)  # of a kernel that is called by itself
VLLM = Limit("vllm", 300.0)
LAB_RUN = Limit("a run in the lab", 60.0)
LAB_START = Limit("the start of the lab", 120.0)  # one import of torch, on a machine whose disk is cold
COMMAND = Limit("a command in the lab", 600.0)


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
