"""A rank that is killed, stopped or raises in the middle of an op: while its tiles are computed, sent and told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from weft import overlap
from weft.comm import PeerLost
from weft.errors import PeerTimeout, WeftError
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.executor.context import context_of

OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"]
DEADLINE = 2.0
VICTIM = 2
# Large enough that a block is long computed and told before the last one is: the victim dies in between.
M, N, K = 3072, 1536, 768
GROUPS = (1,) * 6


def call_op(op: str, group: dist.ProcessGroup, plan: OverlapPlan | None) -> torch.Tensor:
    x, w = torch.ones(M, K), torch.ones(N, K)
    if op == "all_gather_matmul":
        return overlap.all_gather_matmul(x[: M // group.size()], w, group=group, plan=plan)
    if op == "matmul_all_to_all":
        return overlap.matmul_all_to_all(x, w, torch.arange(M) % group.size(), group=group, plan=plan)
    return getattr(overlap, op)(x, w, group=group, plan=plan)


class Broken(Exception):
    """What the victim raises."""


def fail(how: str) -> None:
    if how == "raises":
        raise Broken("in the middle")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    threading.Event().wait()  # another thread may take the signal, and this one would go on for a moment


def fail_at(number: int, how: str, real: Callable[..., object]) -> Callable[..., object]:
    """`real`, until its `number`-th call, in which the victim fails instead."""
    calls = iter(range(1, 10**6))

    def wrapped(*args: object, **options: object) -> object:
        if next(calls) == number:
            fail(how)
        return real(*args, **options)

    return wrapped


def fail_while_computing(group: dist.ProcessGroup, how: str) -> None:
    """A thread that fails when the first tile is computed: before the first block is whole, and sent or read."""
    context = context_of(group)
    counters = context._banks[(context._calls + 1) % 2].counters(context.rank)  # of the next call
    counters.reset()  # as that call does when it starts

    def watch() -> None:
        counters.wait(0, 1, timeout=60.0, what="a tile")
        fail(how)

    threading.Thread(target=watch, daemon=True).start()


def arm(op: str, transport: str, how: str, group: dist.ProcessGroup) -> None:
    if how == "stopped" and os.fork() == 0:  # which puts the victim out of its misery when all others have given up
        time.sleep(3 * DEADLINE)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    context = context_of(group)
    if op == "all_gather_matmul" and transport == "windows":  # its rows are in the window, and are never told
        context.agreement.post = fail_at(1, how, context.agreement.post)
    elif op == "all_gather_matmul" or (op == "matmul_all_to_all" and how == "raises"):
        # The first chunk, or the number of rows, goes to both others.
        context.group.send = fail_at(3, how, context.group.send)
    elif how == "raises":
        context.group.send = fail_at(1, how, context.group.send)
    else:
        fail_while_computing(group, how)


def fail_in_the_middle(op: str, transport: str, how: str) -> str:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=DEADLINE))
    rank = group.rank()
    plan = OverlapPlan(Op(op), M, N, K, "float32", (0, 0, 0), Transport(transport), tile_m=16, groups=GROUPS)
    for _ in range(2):
        call_op(op, group, plan)
    if rank == VICTIM:
        arm(op, transport, how, group)
        with pytest.raises(Broken):
            call_op(op, group, plan)
        return "raised"
    start = time.monotonic()
    with pytest.raises((PeerTimeout, PeerLost)) as info:
        call_op(op, group, plan)
    assert time.monotonic() - start < 4 * DEADLINE
    with pytest.raises(WeftError, match="make a new group"):
        call_op(op, group, plan)
    fresh = dist.new_group([0, 1], use_local_synchronization=True)
    good = call_op(op, fresh, None)
    assert torch.equal(good, call_op(op, fresh, None)), "a new group is as good as ever"
    assert float(good[0, 0]) in (K, 2 * K)
    return f"{type(info.value).__name__}: {info.value}"


def check(texts: list[str], op: str) -> None:
    for text in texts:
        assert op in text, "the error names the operation"
        assert "rank" in text, "and a peer"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", ["windows", "messages"])
def test_killed(op: str, transport: str) -> None:
    *others, died = run_ranks(fail_in_the_middle, 3, op, transport, "killed", killed=[VICTIM], timeout=60.0)
    assert died == signal.SIGKILL
    check(others, op)


@pytest.mark.parametrize(
    ("op", "transport"), list(zip(OPS, ["messages", "windows", "messages", "windows"], strict=True))
)
def test_stopped(op: str, transport: str) -> None:
    *others, died = run_ranks(fail_in_the_middle, 3, op, transport, "stopped", killed=[VICTIM], timeout=60.0)
    assert died == signal.SIGKILL
    check(others, op)


@pytest.mark.parametrize(("op", "transport"), [*((op, "messages") for op in OPS), ("all_gather_matmul", "windows")])
def test_raising(op: str, transport: str) -> None:
    *others, victim = run_ranks(fail_in_the_middle, 3, op, transport, "raises", timeout=60.0)
    assert victim == "raised"
    check(others, op)
