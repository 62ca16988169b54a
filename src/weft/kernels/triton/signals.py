"""What a kernel does with a counter: add one when a tile is stored, and wait until one is high enough.

Counters are int32, anywhere that the device can reach: its own memory, a peer's, the host's. So both sides are of
system scope. An add releases what the whole block has stored, a wait acquires it.

The waiting is one thread's, in a loop of its own, and the others meet it at the barrier of a reduction. Were all of
them to read the counter, some might see it in time and some not, and a branch on the answer would part the block.
"""

import triton
import triton.language as tl

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
