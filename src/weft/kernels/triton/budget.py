"""How many programs of a matmul that waits for rows may run at once: so many that what brings the rows has room, too.

A tile that waits holds its place on a multiprocessor. Were every place held by one that waits, the kernels that bring
and announce rows could not start, and the call would end at its deadline. So such a matmul is persistent, with fewer
programs than there are places, and this says how many.

Nothing is known of where the hardware puts blocks, so the worst is assumed: that programs crowd on as few
multiprocessors as they can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.kernels.triton.compile import ARCHS, Limits, room


@dataclass(frozen=True)
class Footprint:
    """What a block takes of a multiprocessor: warps, registers a thread, bytes of shared memory."""

    warps: int
    registers: int
    shared: int


@dataclass(frozen=True)
class Budget:
    """How many programs may wait at once, and why."""

    programs: int
    reason: str


# Of the waiting matmul with its default block sizes, for aligned tensors and with a bias: a test compiles these, and no
# others. 255 registers are the most that a thread can have; float32 of other alignments might take more than 128.
WAITING = {torch.bfloat16: Footprint(8, 255, 98_320), torch.float32: Footprint(8, 128, 16_384)}

# One at a time: `tell` or the barrier of symmetric memory, a block of one warp each, or a copy inside the device that
# the driver does by a kernel, of which nothing is published: it is counted as 512 threads of 32 registers.
HELPER, HELPERS = Footprint(16, 32, 0), 1

# A block of NCCL has up to NCCL_MAX_NTHREADS = 640 threads (src/include/device.h of NVIDIA/nccl), compiled with
# -maxrregcount=96 (its makefiles/common.mk): next to no registers are left beside one, whatever shared memory it takes.
# How many blocks a send and a receive take together is the number of its channels for messages: by default as many as
# the topology suggests, and at most MAXCHANNELS = 64 (device.h). 32 are declared, which is no published figure: whoever
# sees deadlines pass sets NCCL_MAX_P2P_NCHANNELS=32, which bounds them (src/graph/paths.cc).
NCCL_BLOCK, NCCL_BLOCKS = Footprint(20, 96, 0), 32


def most_programs(limits: Limits, multiprocessors: int, program: Footprint, helper: Footprint, helpers: int) -> int:
    """The most programs beside which `helpers` blocks of a helper fit, wherever the programs are; 0 if none does.

    A multiprocessor has room for a helper beside up to `beside` programs, so it takes beside + 1 of them to take one
    multiprocessor away from the helpers.

    >>> most_programs(ARCHS["sm90"], 132, Footprint(8, 128, 98_304), Footprint(20, 96, 0), helpers=32)
    100
    """
    assert _fit(limits, (helper, 1)), f"a helper must fit on an empty multiprocessor, got {helper}"
    at_once = beside = 0
    while _fit(limits, (program, at_once + 1)):
        at_once += 1
    while beside < at_once and _fit(limits, (program, beside + 1), (helper, 1)):
        beside += 1
    free = max(0, multiprocessors - helpers)
    return min(multiprocessors * at_once, free * (beside + 1) + (beside if free else 0))


def _fit(limits: Limits, *blocks: tuple[Footprint, int]) -> bool:
    taken = [0, 0, 0, 0]
    for block, count in blocks:
        one = room(warps=block.warps, registers=block.registers, shared=block.shared)
        taken = [have + count * more for have, more in zip(taken, one, strict=True)]
    return all(have <= most for have, most in zip(taken, limits.room, strict=True))


def gather_budget(arch: str, multiprocessors: int, dtype: torch.dtype, *, messages: bool) -> Budget:
    """For a matmul whose rows come by messages of NCCL, or else by copies; `arch` such as "sm90".

    >>> gather_budget("sm90", 132, torch.bfloat16, messages=False)
    Budget(programs=131, reason='131 programs on 132 multiprocessors, which leaves room for a helper wherever they are')
    >>> gather_budget("sm90", 132, torch.bfloat16, messages=True).programs
    99
    """
    # What is not listed counts as the smallest that is.
    limits = ARCHS.get(arch) or min(ARCHS.values(), key=lambda each: each.room)
    helper, count = (NCCL_BLOCK, HELPERS + NCCL_BLOCKS) if messages else (HELPER, HELPERS)
    program = WAITING[torch.float32 if dtype == torch.float32 else torch.bfloat16]
    programs = max(1, most_programs(limits, multiprocessors, program, helper, count))
    what = f"{NCCL_BLOCKS} blocks of NCCL and a helper" if messages else "a helper"
    room = f"leaves room for {what} wherever they are"
    return Budget(programs, f"{programs} programs on {multiprocessors} multiprocessors, which {room}")
