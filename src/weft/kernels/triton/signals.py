"""What kernels do with counters: add one when a tile is stored, and wait, with a deadline, until one is high enough.

Counters are int32, anywhere that the device can reach: its own memory, a peer's, the host's. So both sides are of
system scope. An add releases what the whole block has stored, a wait acquires it.

The waiting is one thread's, in a loop of its own, and the others meet it at the barrier of a reduction. Were all of
them to read the counter, some might see it in time and some not, and a branch on the answer would part the block.

`wait` holds a stream back until counters are high enough, `tell` adds to them in stream order. A wait that ran out of
time sets a flag on the device, `Late`, which the host turns into an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from weft.comm.deadline import ROWS
from weft.errors import LONGEST_SECONDS, PeerTimeout
from weft.kernels.triton import launch

SPIN_NS = tl.constexpr(100_000)  # what a turn of the interpreted loop counts for; it has no clock

# Ends when the counter is there, when the time is up, or when anyone has given up, so that a launch of many tiles ends
# after one time-out and not after one for each.
_SPIN = tl.constexpr("""
{
.reg .pred out;
.reg .s32 gave_up;
.reg .u64 start, now;
mov.s32 $0, 0x80000000;
setp.ne.s32 out, $2, 0;
@out bra AWAY;
mov.u64 start, %globaltimer;
AGAIN:
ld.acquire.sys.global.s32 $0, [$1];
setp.ge.s32 out, $0, $3;
@out bra AWAY;
ld.relaxed.sys.global.s32 gave_up, [$4];
setp.ne.s32 out, gave_up, 0;
@out bra AWAY;
nanosleep.u32 40;
mov.u64 now, %globaltimer;
sub.u64 now, now, start;
setp.lt.u64 out, now, $5;
@out bra AGAIN;
AWAY:
}
""")


@triton.jit
def signal(counter):
    """Adds one to a counter, once all that this block has stored can be seen."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def wait_for(counter, value, limit_ns, late, name, THREADS: tl.constexpr, INTERPRET: tl.constexpr):
    """Whether a counter reached `value` within `limit_ns`; if not, `late` becomes `name` + 1 unless it is set."""
    if INTERPRET:
        spent = limit_ns * 0
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
        gave_up = tl.atomic_add(late, 0, sem="relaxed", scope="sys")
        while (seen < value) & (spent < limit_ns) & (gave_up == 0):
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
            gave_up = tl.atomic_add(late, 0, sem="relaxed", scope="sys")
            spent += SPIN_NS
    else:
        tl.static_assert(not is_hip(), "a wait is written in PTX, which a compiler for AMD drops without a word")
        thread = tl.arange(0, THREADS)
        of_thread = tl.inline_asm_elementwise(
            _SPIN, "=r,l,r,r,l,l,~{memory}", [counter, thread, value, late, limit_ns], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
        seen = tl.max(of_thread, 0)
    there = seen >= value
    if not there:
        tl.atomic_cas(late, 0, name + 1, sem="relaxed", scope="sys")
    return there


@triton.jit
def wait_kernel(counters, values, first, limit_ns, late, THREADS: tl.constexpr, INTERPRET: tl.constexpr):
    """One program for each counter first, first + 1, ...: done when all have reached their values, or at a deadline."""
    index = first + tl.program_id(0)
    wait_for(counters + index, tl.load(values + index), limit_ns, late, index, THREADS, INTERPRET)


@triton.jit
def tell_kernel(counters, first):
    """One program for each counter first, first + 1, ...: adds one, and releases what earlier kernels have stored."""
    signal(counters + first + tl.program_id(0))


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

    This has never run on a GPU: it was run in Triton's interpreter and compiled for the targets of `compile.ARCHS`.
    """
    count = _checked_count(counters, first, count)
    launch.counters(values, "values", first + count, counters.device)
    limit, mine = nanoseconds(timeout), late or Late.on(counters.device)
    launch.counters(mine.flag, "late", 1, counters.device)
    if count:
        wait_kernel[(count,)](
            counters, values, first, limit, mine.flag, THREADS=32 * WAITER_WARPS, INTERPRET=launch.INTERPRETED,
            num_warps=WAITER_WARPS,
        )  # fmt: skip
    if late is None:
        mine.check(what, seconds=timeout)


def tell(counters: Tensor, *, first: int = 0, count: int | None = None) -> None:
    """Adds one to counters[first : first + count], int32, when all that is before it in the stream is done.

    This has never run on a GPU: it was run in Triton's interpreter and compiled for the targets of `compile.ARCHS`.
    """
    count = _checked_count(counters, first, count)
    if count:
        tell_kernel[(count,)](counters, first, num_warps=WAITER_WARPS)


def _checked_count(counters: Tensor, first: int, count: int | None) -> int:
    """How many counters from `first` on are meant, once they are there."""
    launch.on_device(counters, "counters")
    count = counters.numel() - first if count is None else count
    if first < 0 or count < 0:
        raise ValueError(f"first and count must not be negative, got {first} and {count}")
    launch.counters(counters, "counters", first + count, counters.device)
    return count
