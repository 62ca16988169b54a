"""Several operations in flight on one process group: none of them gets the messages of another."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from threads import in_thread

import weft
from weft import overlap
from weft.comm import Group, Transfer
from weft.layout import Layout, Mesh, Replicate
from weft.overlap import Op, OverlapPlan, Transport
from weft.reshard import Source

LIMIT = 40.0
# Declared to be on two hosts, so that chunks travel as messages.
HERE, THERE = Mesh.of([0], hosts=[0]), Mesh.of([1], hosts=[1])
ELEMENTS, CHUNK = 1 << 16, 1 << 14
SOURCE = Source((ELEMENTS,), torch.float32, Layout(HERE, [Replicate()]))


class Held(Group):
    """A group whose messages with data leave only when they are let go: a slow link."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD, timeout=LIMIT)
        self.let_go = threading.Event()

    def send(self, tensor: torch.Tensor, dst: int, **options: Any) -> Transfer:
        if tensor.nbytes == CHUNK:
            assert self.let_go.wait(LIMIT)
        return super().send(tensor, dst, **options)


def values(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


def start(group: Group, seed: int) -> Any:
    """A reshard of `values(seed)` from rank 0 to rank 1, under way."""
    mine = values(seed) if dist.get_rank() == 0 else None
    return weft.reshard(mine, THERE, [Replicate()], src=SOURCE, group=group, chunk_bytes=CHUNK, async_op=True)


def arrived(handle: Any, seed: int) -> bool:
    found = handle.wait()
    return dist.get_rank() == 0 or torch.equal(found, values(seed))


def the_later_first() -> list[bool]:
    groups = [Held() for _ in range(3)]
    handles = [start(group, seed) for seed, group in enumerate(groups)]
    good = []
    for seed in (2, 0, 1):
        groups[seed].let_go.set()
        good.append(arrived(handles[seed], seed))
    return good


def test_reshards_in_flight_keep_their_own_data() -> None:
    assert run_ranks(the_later_first, 2, timeout=60.0) == [[True] * 3] * 2


class Sum:
    """A matmul_all_reduce whose blocks travel as messages, and what torch says that it is."""

    def __init__(self) -> None:
        own = torch.Generator().manual_seed(dist.get_rank())
        self.x, self.w = torch.randn(96, 32, generator=own), torch.randn(64, 32, generator=own)
        self.want = self.x @ self.w.t()
        dist.all_reduce(self.want)
        self.plan = OverlapPlan(
            Op.ALL_REDUCE, 96, 64, 32, "float32", (0, 0), Transport.MESSAGES, tile_m=16, groups=(1,) * 6
        )

    def is_right(self, plan: OverlapPlan | None) -> bool:
        y = overlap.matmul_all_reduce(self.x, self.w, group=dist.group.WORLD, plan=plan)
        return bool(torch.allclose(y, self.want, atol=1e-4))


def reshard_beside_matmuls() -> list[bool]:
    group, total = Held(), Sum()
    handle = start(group, 5)
    good = [total.is_right(plan) for plan in (total.plan, None, total.plan)]
    group.let_go.set()
    return [*good, arrived(handle, 5)]


def test_a_reshard_in_flight_beside_matmuls() -> None:
    assert run_ranks(reshard_beside_matmuls, 2, timeout=60.0) == [[True] * 4] * 2


def planning_beside_matmuls() -> int:
    """Both threads make plans, also for one shape; which of them is first differs from rank to rank."""
    total, calls = Sum(), 0
    over = threading.Event()

    def plan() -> None:
        try:
            for m in range(60, 66):
                weft.plan_overlap(Op.REDUCE_SCATTER, m, 64, 32, group=dist.group.WORLD)
            weft.plan_overlap(Op.ALL_REDUCE, 96, 64, 32, group=dist.group.WORLD)
        finally:
            over.set()

    join = in_thread(plan, LIMIT)
    # As many calls on both ranks, whichever is done with planning first.
    for calls in range(40):
        assert total.is_right(total.plan if calls % 2 else None), calls
    join()
    assert over.is_set()
    assert total.is_right(None)
    return calls


def test_planning_beside_matmuls() -> None:
    assert run_ranks(planning_beside_matmuls, 2, timeout=60.0) == [39, 39]


def tuning_beside_matmuls() -> bool:
    """The tuner's own calls have the shape and the plan of those beside it, and other data."""
    from weft.overlap.tuning import Shape, tune

    total = Sum()
    shape = Shape(Op.ALL_REDUCE, 96, 64, 32)

    def twice() -> None:
        for _ in range(2):
            tune(shape, group=dist.group.WORLD, candidates=2, rounds=2)

    join = in_thread(twice, LIMIT)
    for number in range(40):
        assert total.is_right(total.plan if number % 2 else None), number
    join()
    return total.is_right(None)


def test_tuning_beside_matmuls() -> None:
    assert run_ranks(tuning_beside_matmuls, 2, timeout=60.0) == [True, True]
