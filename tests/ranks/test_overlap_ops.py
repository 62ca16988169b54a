"""The four ops with real processes: same bits for every plan, gradients, compiling, disagreement, and failures."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from overlap_cases import Case, random_calls

from weft import overlap
from weft.comm import PeerLost
from weft.errors import PeerMismatch, PeerTimeout, WeftError
from weft.kernels import PackedWeight
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.executor.context import context_of

LONG = 60.0
"""A deadline that only a hang reaches."""


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def a_thousand_calls() -> int:
    """Cases of 4 calls each, on groups of 1 to 4 ranks in turn: all in one run of the same four processes."""
    groups = [dist.new_group(list(range(size))) for size in (1, 2, 3, 4)]
    calls = 0
    for round_number in range(7):
        for group in groups:
            if dist.get_rank() < (size := group.size() if group != dist.GroupMember.NON_GROUP_MEMBER else 0):
                seeds = [1000 * size + 10 * round_number + i for i in range(9)]
                calls += random_calls(seeds, group)
    return calls


def test_a_thousand_random_calls_give_the_same_bits_as_the_sequential_plan() -> None:
    calls = run_ranks(a_thousand_calls, 4, timeout=280.0)
    assert calls == [4 * 7 * 9 * groups for groups in (4, 3, 2, 1)]
    assert calls[0] >= 1000


# Torch ------------------------------------------------------------------------------------------------------


def check_with_torch() -> None:
    group = world()
    x, w, bias = torch.randn(24, 16), torch.randn(40, 16), torch.zeros(40)
    shard = torch.randn(12, 16)

    def gather(a, b):
        return overlap.all_gather_matmul(a, b, group=group, bias=bias)

    def scatter(a, b):
        return overlap.matmul_reduce_scatter(a, b, group=group, bias=bias)

    for fn, a in ((gather, shard), (scatter, x)):
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(a, w), fn(a, w))
        results = []
        for call in (fn, compiled):
            inputs = [t.clone().requires_grad_() for t in (a, w)]
            call(*inputs).square().sum().backward()
            results.append([t.grad for t in inputs])
        assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))
        with torch.inference_mode():
            inside = fn(a, w)
        with torch.no_grad():
            assert torch.equal(fn(a, w), inside)
            assert torch.equal(fn(a, PackedWeight.from_dense(w)), inside)
    name = group.group_name
    a, b = shard.clone().requires_grad_(), w.clone().requires_grad_()
    torch.library.opcheck(torch.ops.weft.all_gather_matmul, (a, b, None, bias, 24, 40, "", name, "", True))
    a = x.clone().requires_grad_()
    for op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
        torch.library.opcheck(torch.ops.weft.matmul_reduce, (a, b, None, bias, op.value, 40, "", name, ""))
    to = torch.arange(24) % 2
    torch.library.opcheck(torch.ops.weft.matmul_all_to_all, (a, b, None, bias, to, 24, 40, "", name, ""))
    torch.library.opcheck(torch.ops.weft.replicated_matmul, (a, b, None, bias, 40, "", name))


def test_compile_opcheck_and_modes() -> None:
    run_ranks(check_with_torch, 2, timeout=200.0)


def twice() -> None:
    """Second derivatives are an error on every rank, never a silent part of the truth."""
    group = world()
    to = torch.arange(8) % group.size()
    for op in OPS:
        x, w = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
        extra = (to,) if op == "matmul_all_to_all" else ()
        y = getattr(overlap, op)(x, w, *extra, group=group)
        dx, dw = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        with pytest.raises(NotImplementedError, match="gradients of gradients"):
            (dx.square().sum() + dw.square().sum()).backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_derivatives_are_refused(ranks: int) -> None:
    run_ranks(twice, ranks)


def pack_once() -> None:
    group, w = world(), torch.randn(8, 16)
    x = torch.randn(4, 16)
    context = context_of(group)
    overlap.matmul_all_reduce(x, w, group=group)
    first = context.weights.packed(w)
    assert context.weights.packed(w.view(8, 16)) is first, "another view of the same memory"
    assert context.weights.packed(w, transposed=True) is not first
    before = overlap.matmul_all_reduce(x, w, group=group)
    with torch.no_grad():
        w.mul_(2)
    assert context.weights.packed(w) is not first
    assert torch.equal(overlap.matmul_all_reduce(x, w, group=group), before * 2)


def test_a_weight_is_packed_again_when_it_changes() -> None:
    run_ranks(pack_once, 2)


# Groups and threads -----------------------------------------------------------------------------------------


def two_groups_at_once() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    wants = [Case(seed, group, torch.float32).run(overlap) for seed, group in enumerate(groups)]
    errors = []

    def repeat(seed: int) -> None:
        try:
            for _ in range(30):
                got = Case(seed, groups[seed], torch.float32).run(overlap)
                assert all(torch.equal(a, b) for a, b in zip(got, wants[seed], strict=True))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert errors == []


def test_two_groups_in_two_threads() -> None:
    run_ranks(two_groups_at_once, 2, timeout=120.0)


def from_a_hook() -> None:
    """A backward pass whose hook calls an op of the same group: autograd runs it inside of another op's backward."""
    group = world()
    x, w = torch.randn(16, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    seen = []
    hidden = overlap.matmul_reduce_scatter(x, w, group=group)
    hidden.register_hook(lambda g: seen.append(overlap.matmul_all_reduce(g.detach(), w.detach(), group=group)))
    overlap.all_gather_matmul(hidden, w, group=group).sum().backward()
    assert seen[0].shape == (8, 8)
    assert x.grad is not None


def test_an_op_inside_a_backward_pass() -> None:
    run_ranks(from_a_hook, 2)


# Disagreement -----------------------------------------------------------------------------------------------


def disagree(what: str) -> str:
    group = world()
    odd = group.rank() == 1
    m, n, dtype, plan = 32, 24, torch.float32, None
    if what == "m":
        m = 48 if odd else 32
    elif what == "n":
        n = 40 if odd else 24
    elif what == "dtype":
        dtype = torch.bfloat16 if odd else torch.float32
    elif what == "plan":
        groups = (2, 1) if odd else (1, 2)
        plan = OverlapPlan(Op.ALL_REDUCE, 32, 24, 8, "float32", (0, 0), tile_m=8, groups=groups)
    elif what == "no plan":
        plan = OverlapPlan(Op.ALL_REDUCE, 32, 24, 8, "float32", (0, 0), tile_m=8) if odd else None
    x, w = torch.ones(m, 8, dtype=dtype), torch.ones(n, 8, dtype=dtype)
    bias = torch.ones(n) if what == "bias" and odd else None
    op = overlap.matmul_reduce_scatter if what == "op" and odd else overlap.matmul_all_reduce
    with pytest.raises(PeerMismatch) as info:
        op(x, w, group=group, bias=bias, plan=plan)
    for seed in range(3):  # inputs that differ everywhere: a bank of another call would show
        generator = torch.Generator().manual_seed(seed)
        xs, ws = torch.randn(2, 32, 8, generator=generator), torch.randn(2, 24, 8, generator=generator)
        good = overlap.matmul_all_reduce(xs[group.rank()], ws[group.rank()], group=group)
        torch.testing.assert_close(good, xs[0] @ ws[0].t() + xs[1] @ ws[1].t())
    return str(info.value)


@pytest.mark.parametrize(
    ("what", "sides"),
    [
        ("m", ("m=32", "m=48")),
        ("n", ("n=24", "n=40")),
        ("dtype", ("float32", "bfloat16")),
        ("plan", ("groups=1,2", "groups=2,1")),
        ("no plan", ("plan=none yet", "groups=sequential")),
        ("op", ("matmul_all_reduce", "matmul_reduce_scatter")),
        ("bias", ("bias=False", "bias=True")),
    ],
)
def test_ranks_that_disagree_are_told_both_sides(what: str, sides: tuple[str, str]) -> None:
    for text in run_ranks(disagree, 2, what):
        assert "rank 0: overlap: matmul_all_reduce" in text
        assert sides[0] in text
        assert sides[1] in text


def refused() -> None:
    group = world()
    x, w = torch.ones(8, 4), torch.ones(6, 4)
    bad = [
        (lambda: overlap.all_gather_matmul(x, w, group=group, m=10), "x_shard has 8 rows, expected 5"),
        (lambda: overlap.matmul_all_reduce(torch.ones(8, 5), w, group=group), r"expected \[M, 4\]"),
        (lambda: overlap.matmul_all_reduce(x.double(), w.double(), group=group), "float32 or bfloat16"),
        (lambda: overlap.matmul_all_reduce(x, w, group=group, bias=torch.ones(5)), r"expected torch.float32 \[6\]"),
        (lambda: overlap.matmul_all_reduce(x, torch.ones(4), group=group), r"\[N, K\]"),
        (lambda: overlap.matmul_all_to_all(x, w, torch.zeros(7, dtype=torch.int64), group=group), r"int64 \[8\]"),
        (lambda: overlap.matmul_all_to_all(x, w, torch.full((8,), 2), group=group), "0 to 1"),
        (lambda: overlap.matmul_all_reduce(x, w, group=group, plan="no plan"), "is not a plan"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
    assert overlap.matmul_all_reduce(x, w, group=group)[0, 0] == 8.0


def test_bad_arguments() -> None:
    run_ranks(refused, 2)


# Failures ---------------------------------------------------------------------------------------------------

DEADLINE = 3.0
OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"]


def call_op(op: str, group: dist.ProcessGroup, plan: OverlapPlan | None) -> torch.Tensor:
    x, w = torch.ones(64, 8), torch.ones(40, 8)
    if op == "all_gather_matmul":
        return overlap.all_gather_matmul(x[: 64 // group.size()], w, group=group, plan=plan)
    if op == "matmul_all_to_all":
        return overlap.matmul_all_to_all(x, w, torch.arange(64) % group.size(), group=group, plan=plan)
    return getattr(overlap, op)(x, w, group=group, plan=plan)


def lose_a_rank(op: str, transport: str, how: str) -> str:
    """Rank 2 fails after a first good call, when the others are in the middle of the second."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=DEADLINE))
    survivors = dist.new_group([0, 1])
    rank = group.rank()
    plan = OverlapPlan(
        Op(op), 64, 40, 8, "float32", (0, 0, 0), Transport(transport), tile_m=8, tile_n=32, groups=(1, 2, 1)
    )
    call_op(op, group, plan)
    if rank == 2:
        if how == "raises":
            return "gone"
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises((PeerTimeout, PeerLost)) as info:
        call_op(op, group, plan)
    assert time.monotonic() - start < 4 * DEADLINE
    with pytest.raises(WeftError, match="make a new group"):
        call_op(op, group, plan)
    call_op(op, survivors, None)
    return f"{type(info.value).__name__}: {info.value}"


@pytest.mark.parametrize(
    ("op", "transport"), list(zip(OPS, ["windows", "messages", "windows", "messages"], strict=True))
)
def test_a_killed_rank_ends_the_call_of_the_others(op: str, transport: str) -> None:
    first, second, died = run_ranks(lose_a_rank, 3, op, transport, "killed", killed=[2], timeout=60.0)
    assert died == signal.SIGKILL
    assert all("rank 2" in text or "PeerLost" in text for text in (first, second))


@pytest.mark.parametrize("op", ["matmul_reduce_scatter"])
def test_a_rank_that_raised_ends_the_call_of_the_others(op: str) -> None:
    *others, gone = run_ranks(lose_a_rank, 3, op, "messages", "raises", timeout=60.0)
    assert gone == "gone"
    assert all("PeerTimeout" in text or "PeerLost" in text for text in others)


def stop_myself(op: str) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=DEADLINE))
    call_op(op, group, None)
    if group.rank() == 1:
        # Stopped for longer than the others' deadline, then woken by a child, as an operator would.
        if os.fork() == 0:
            time.sleep(3 * DEADLINE)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises((PeerTimeout, PeerLost)):
            call_op(op, group, None)
        return "woke up"
    with pytest.raises((PeerTimeout, PeerLost)) as info:
        call_op(op, group, None)
    return str(info.value)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter"])
def test_a_stopped_rank_ends_the_call_of_the_others(op: str) -> None:
    waited, woken = run_ranks(stop_myself, 2, op, timeout=60.0)
    assert "rank 1" in waited
    assert woken == "woke up"
