"""Short calls: which plans are carried out by one message each way, and how long that takes. Pure.

A sequential plan of a small matmul has nothing to hide: what it costs are messages that wait for each other, and
threads. So its data goes with the agreement, in one message to each rank of another host, and through the window to
those of this host; then every rank adds up what it needs by itself, in the order of all plans: with the same bits.

    rank r    matmul | digest + part -> all others | parts of all ranks, added in order
              x_r, digest -> all others | rows of all ranks | matmul

More bytes leave a host than need to where it has several ranks, or there are more than two hosts. So a call is short
only where all that leaves its host's card is.
"""

from __future__ import annotations

from functools import lru_cache

from weft.overlap.plan import Op, OverlapPlan
from weft.overlap.speeds import Curves, item_bytes, row_seconds

RIDE_BYTES = 1 << 18
"""The most that leaves a card in a short call, and the room of each receive. Below it the curves choose; above it there
is enough to hide for a plan in groups, and what rides would fall out of the caches."""
_OPS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER)


@lru_cache(maxsize=4096)
def is_short(plan: OverlapPlan) -> bool:
    """Whether the plan's data goes with the agreement. The same on all ranks: by what they share of the plan only.

    >>> small = OverlapPlan(Op.ALL_REDUCE, m=16, n=512, k=256, dtype="float32", hosts=(0, 1))
    >>> is_short(small), card_bytes(small)
    (True, 32768)
    """
    if not plan.sequential or plan.op not in _OPS:
        return False
    return 0 < _message_bytes(plan) <= RIDE_BYTES and card_bytes(plan) <= RIDE_BYTES


def card_bytes(plan: OverlapPlan) -> int:
    """Bytes that leave the busiest host's card when every rank sends to all ranks of the other hosts."""
    topology = plan.topology
    devices = [len(topology.ranks_of(host)) for host in range(topology.count)]
    return max(local * (plan.size - local) for local in devices) * _message_bytes(plan)


def _message_bytes(plan: OverlapPlan) -> int:
    """Of the longest message."""
    rows = plan.m if plan.op is Op.ALL_REDUCE else plan.shard_bounds[1]
    return rows * (plan.k if plan.op is Op.ALL_GATHER else plan.n) * item_bytes(plan.dtype)


def short_seconds(plan: OverlapPlan, curves: Curves) -> float:
    """What a short call takes: its matmul, its messages, and the sum or the copy of what came."""
    across = card_bytes(plan)
    wire = curves.wire(across) + curves.cpu_per_message if across else 0.0
    return row_seconds(plan, curves) * plan.m + wire + plan.size * _message_bytes(plan) / curves.add_bytes
