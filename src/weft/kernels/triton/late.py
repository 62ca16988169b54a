"""Waits with a deadline, as the host sees them: the flag that a kernel sets, and the error that it becomes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.deadline import ROWS
from weft.errors import LONGEST_SECONDS, PeerTimeout
from weft.kernels.triton import checks
from weft.kernels.triton.tell import tell_kernel
from weft.kernels.triton.wait import wait_kernel

WAITER_WARPS = 1


@dataclass(frozen=True, eq=False)
class Late:
    """A flag on the device, 0 until a kernel gave up waiting; then one more than the number of what did not come.

    `check` reads it, for which the host waits for the stream: call it when the step is over, not after each launch.

    >>> Late.on("cpu").check("rows from rank 1", seconds=1.0)
    """

    flag: Tensor

    @classmethod
    def on(cls, device: torch.device | str) -> Late:
        return cls(torch.zeros(1, dtype=torch.int32, device=device))

    def check(self, what: str, *, seconds: float, each: str = "") -> None:
        """Raises `PeerTimeout` if a kernel gave up; `each` says what one block or group is."""
        number = int(self.flag) - 1
        if number >= 0:
            raise PeerTimeout(f"{what}, block {number}{each}", seconds=seconds)


def nanoseconds(timeout: float) -> int:
    if not (math.isfinite(timeout) and 0 < timeout <= LONGEST_SECONDS):
        raise ValueError(f"timeout must be a number of seconds from above 0 to {LONGEST_SECONDS:g}, got {timeout}")
    return int(timeout * 1e9)


def wait(
    counters: Tensor, values: Tensor, *, first: int = 0, count: int | None = None, timeout: float = ROWS.seconds,
    what: str = "a group of tiles", late: Late | None = None,
) -> None:  # fmt: skip
    """Holds the stream until counters[first : first + count] are at least values[...]; int32, on one device.

    Without `late`, the host waits too and a time-out is raised here. With it, the launch returns at once, can be
    captured in a graph, and a time-out sets the flag: call `late.check` before the results are used.

    This has never run on a GPU: it was run in Triton's interpreter and compiled for sm80, sm90 and sm100.
    """
    checks.on_device(counters, "counters")
    count = counters.numel() - first if count is None else count
    if first < 0 or count < 0:
        raise ValueError(f"first and count must not be negative, got {first} and {count}")
    checks.counters(counters, "counters", first + count, counters.device)
    checks.counters(values, "values", first + count, counters.device)
    limit, mine = nanoseconds(timeout), late or Late.on(counters.device)
    checks.counters(mine.flag, "late", 1, counters.device)
    if count:
        wait_kernel[(count,)](
            counters, values, first, limit, mine.flag, THREADS=32 * WAITER_WARPS, INTERPRET=checks.INTERPRETED,
            num_warps=WAITER_WARPS,
        )  # fmt: skip
    if late is None:
        mine.check(what, seconds=timeout)


def tell(counters: Tensor, *, first: int = 0, count: int | None = None) -> None:
    """Adds one to counters[first : first + count], int32, when all that is before it in the stream is done.

    This has never run on a GPU: it was run in Triton's interpreter and compiled for sm80, sm90 and sm100.
    """
    checks.on_device(counters, "counters")
    count = counters.numel() - first if count is None else count
    if first < 0 or count < 0:
        raise ValueError(f"first and count must not be negative, got {first} and {count}")
    checks.counters(counters, "counters", first + count, counters.device)
    if count:
        tell_kernel[(count,)](counters, first, num_warps=WAITER_WARPS)
