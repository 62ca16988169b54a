"""Calls that are refused, and the calls that follow them: results stay right, whoever is slow."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import weft
from weft import overlap
from weft.comm.tell import store_of
from weft.errors import PeerMismatch
from weft.overlap import Op, OverlapPlan
from weft.overlap.executor import context
from weft.overlap.executor import short as run_short

M, N, K = 96, 64, 32


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(M, K, generator=own), torch.randn(N, K, generator=own)


def expected(seed: int) -> torch.Tensor:
    x, w = inputs(seed)
    total = x @ w.t()
    dist.all_reduce(total)
    return total.chunk(2)[dist.get_rank()]


def right(seed: int, want: torch.Tensor) -> bool:
    x, w = inputs(seed)
    return bool(torch.allclose(overlap.matmul_reduce_scatter(x, w, group=dist.group.WORLD), want, atol=1e-4))


def refused(how: str) -> None:
    x, w = inputs(0)
    if how == "plan":
        with pytest.raises(ValueError, match="is not a plan"):
            overlap.matmul_reduce_scatter(x, w, group=dist.group.WORLD, plan="no plan")
    else:
        dtype, hosts = ("bfloat16", (0, 0)) if how == "dtype" else ("float32", (0, 1))
        other = OverlapPlan(Op.REDUCE_SCATTER, M, N, K, dtype, hosts)
        with pytest.raises(ValueError, match="the plan is for"):
            overlap.matmul_reduce_scatter(x, w, group=dist.group.WORLD, plan=other)


def hold(key: str) -> None:
    """Rank 1 sums up the parts of its next call only when rank 0 has computed those of a later one."""
    real, store, held = run_short.add_rows, store_of(dist.group.WORLD), [True]

    def slow(*args: object) -> None:
        if held.pop() if held else False:
            store.wait([key], timedelta(seconds=20))
        real(*args)

    run_short.add_rows = slow


def tell(key: str, context: object) -> None:
    """Rank 0 lets rank 1 go on when it has computed, and is about to hear from the others."""
    real, store = context.agreement.confirm, store_of(dist.group.WORLD)

    def confirm(*args: object, **options: object) -> None:
        store.set(key, "computed")
        real(*args, **options)

    context.agreement.confirm = confirm


def a_slower_rank(who: tuple[int, ...], how: str) -> list[bool]:
    from weft.overlap.executor.context import context_of

    rank, want = dist.get_rank(), [expected(seed) for seed in range(4)]
    good = [right(seed, want[seed]) for seed in (0, 1)]
    if rank == 1:
        hold("go on")
    good.append(right(2, want[2]))
    if rank in who:
        refused(how)
    if rank == 0:
        tell("go on", context_of(dist.group.WORLD))
    good.append(right(3, want[3]))
    return good


@pytest.mark.parametrize("who", [(0,), (0, 1), (1,)])
@pytest.mark.parametrize("how", ["plan", "hosts"])
def test_a_refused_call_leaves_the_next_ones_right(who: tuple[int, ...], how: str) -> None:
    assert run_ranks(a_slower_rank, 2, who, how, timeout=40.0) == [[True] * 4] * 2


def many_with_refusals(seed: int) -> int:
    """Refused calls on some ranks, mismatches on all, in between calls of all shapes."""
    rank = dist.get_rank()
    own, shared = random.Random(1000 * seed + rank), random.Random(seed)
    wrong = 0
    for number in range(150):
        for _ in range(own.choice([0, 0, 1, 2])):
            refused(own.choice(["plan", "dtype"]))
        if shared.random() < 0.1:
            x, w = inputs(0)
            plan = OverlapPlan(Op.REDUCE_SCATTER, M, N, K, "float32", (0, 0), groups=(1,) * (1 + rank))
            with pytest.raises(PeerMismatch):
                overlap.matmul_reduce_scatter(x, w, group=dist.group.WORLD, plan=plan)
        want = expected(number)
        wrong += not right(number, want)
    return wrong


def test_many_refused_calls_among_good_ones() -> None:
    assert run_ranks(many_with_refusals, 2, 3, timeout=60.0) == [0, 0]


def test_no_group_is_refused_by_name() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="group is a NoneType"):
        weft.matmul_all_reduce(x, torch.randn(3, 8), group=None)
    with pytest.raises(ValueError, match="mesh is a list, expected a DeviceMesh"):
        weft.parallelize(torch.nn.Linear(2, 2), [0, 1])


def count_anew() -> bool:
    """Counters that start again after every third call."""
    context._EPOCH = 3
    return all(right(seed, expected(seed)) for seed in range(20))


def test_calls_are_counted_for_ever() -> None:
    assert run_ranks(count_anew, 2, timeout=40.0) == [True, True]
