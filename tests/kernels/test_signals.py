"""Tile schedules: signals as groups finish, tiles that wait for their input, and what is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from threads import in_thread

from weft import _core
from weft.comm.signal import Counters
from weft.errors import PeerTimeout
from weft.kernels import PackedWeight, Ready, Rows, TileOutput, TileSchedule, Tiling, linear, linear_tiles

M, K, N, HALF = 96, 70, 64, 48
TILING = Tiling(M, N, 24, 32)
W = torch.ones(N, K)
PACKED = PackedWeight.from_dense(W)
X = torch.ones(M, K)
WIDE = torch.ones(N, N + 1)


def counters(n):
    return torch.zeros(n, dtype=torch.int32)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)
    packed = PackedWeight.from_dense(w)
    return x, packed, linear(x, packed)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_group_is_whole_before_the_rest_has_even_arrived(case, threads):
    """The lower half of x arrives only after the upper group was seen to be done, so the order is forced."""
    x, packed, want = case
    schedule = TileSchedule(TILING, group_of=[tile // 4 for tile in range(8)])
    done, ready = Counters(2), Counters(2)
    arriving, out = x.clone(), torch.full((M, N), float("nan"))
    arriving[HALF:] = float("nan")
    ready.add(0)
    wait = Ready(ready.tensor, rows=HALF, timeout=60)
    join = in_thread(
        lambda: linear(arriving, packed, out=out, schedule=schedule, done=done.tensor, ready=wait, threads=threads)
    )
    done.wait(0, 4, timeout=60, what="the upper group")
    assert torch.equal(out[:HALF], want[:HALF])
    assert done.read(1) == 0
    arriving[HALF:] = x[HALF:]
    ready.add(1)
    assert join() is out
    assert torch.equal(out, want)
    assert done.read(1) == 4


def test_tiles_wait_for_every_block_of_their_rows(case):
    """With one row a block, the last counter alone holds the last tile back."""
    x, packed, want = case
    ready = Counters(M)
    for row in range(M - 1):
        ready.add(row)
    schedule = TileSchedule(TILING)
    done = Counters(1)
    join = in_thread(
        lambda: linear(x, packed, schedule=schedule, done=done.tensor, ready=Ready(ready.tensor, rows=1), threads=1)
    )
    done.wait(0, 6, timeout=60, what="the tiles above the last row")
    assert done.read(0) == 6
    ready.add(M - 1)
    assert torch.equal(join(), want)


@pytest.mark.parametrize("threads", [1, 2])
def test_input_that_never_arrives_ends_the_call(case, threads):
    x, packed, _ = case
    ready = Counters(2)
    ready.add(0)
    wait = Ready(ready.tensor, rows=HALF, timeout=0.05, what="rows from rank 1")
    with pytest.raises(PeerTimeout, match=r"waited 0\.05 s for rows from rank 1, block 1"):
        linear(x, packed, ready=wait, schedule=TileSchedule(TILING), threads=threads)


class Interrupted:
    """A matmul whose lower rows never come by themselves; a signal does, when all tiles of the upper ones are done."""

    def __init__(self, threads):
        self.ready, self.done, self.threads = Counters(2), Counters(2), threads
        self.ready.add(0)
        upper = TILING.count // 2
        self.schedule = TileSchedule(TILING, group_of=[0] * upper + [1] * upper)

    def run(self, x, packed, handler):
        def send():
            self.done.wait(0, TILING.count // 2, timeout=30.0, what="the upper tiles")
            os.kill(os.getpid(), signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, lambda *_: handler())
        sender = in_thread(send)
        try:
            wait = Ready(self.ready.tensor, rows=HALF, timeout=30)
            return linear(
                x, packed, ready=wait, schedule=self.schedule, done=self.done.tensor, threads=self.threads
            )  # fmt: skip
        finally:
            sender()
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_is_handled_while_rows_are_awaited(case, threads):
    """The handler is the one who lets the rows come: a deaf call would wait for them until its deadline."""
    x, packed, want = case
    interrupted = Interrupted(threads)
    assert torch.equal(interrupted.run(x, packed, lambda: interrupted.ready.add(1)), want)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_signal_handler_raises_ends_the_matmul(case, threads):
    x, packed, _ = case
    interrupted = Interrupted(threads)

    def handler():
        raise KeyboardInterrupt("heard")

    with pytest.raises(KeyboardInterrupt, match="heard"):
        interrupted.run(x, packed, handler)
    assert interrupted.done.read(1) == 0


def test_ready_without_a_schedule(case):
    x, packed, want = case
    ready = Counters(2)
    ready.add(0)
    ready.add(1)
    assert torch.equal(linear(x, packed, ready=Ready(ready.tensor, rows=HALF)), want)


def test_tiling_covers_the_output_once():
    for tiling in [Tiling(100, 70, 48, 32), Tiling(1, 1, 7, 64), Tiling(96, 64, 96, 64), Tiling(0, 5, 4, 32)]:
        hits = torch.zeros(tiling.m, tiling.n, dtype=torch.int32)
        for tile in range(tiling.count):
            m0, m1, n0, n1 = tiling.box(tile)
            hits[m0:m1, n0:n1] += 1
        assert (hits == 1).all()


def test_rows_from_anywhere_and_tiles_to_anywhere(case):
    """x in two windows with its rows shuffled; each group of tiles end to end in one flat buffer."""
    x, packed, want = case
    order = torch.randperm(M, generator=torch.Generator().manual_seed(1))
    rows = Rows.stack([x[:30].clone(), torch.cat([x[30:], x[30:]], dim=1)[:, :K]]).gather(order)
    flat, places, at = torch.full((M * N,), float("nan")), [], 0
    for tile in range(TILING.count):
        m0, m1, n0, n1 = TILING.box(tile)
        size = (m1 - m0) * (n1 - n0)
        places.append(flat[at : at + size].view(m1 - m0, n1 - n0))
        at += size
    done = counters(1)
    linear_tiles(rows, packed, out=TileOutput(TILING, tuple(places)), schedule=TileSchedule(TILING), done=done)
    for tile, place in enumerate(places):
        m0, m1, n0, n1 = TILING.box(tile)
        assert torch.equal(place, want[order][m0:m1, n0:n1])
    assert done.item() == TILING.count


PLACES = tuple(torch.empty(24, 32) for _ in range(TILING.count))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rows.stack([]), "CPU matrices"),
        (lambda: Rows.stack([torch.ones(2, 3), torch.ones(2, 4)]), "of one K"),
        (lambda: Rows.stack([torch.ones(3, 2).t()]), "contiguous rows"),
        (lambda: Rows.stack([torch.ones(2, 3)]).gather(torch.tensor([2])), "from 0 to 1, got 2 to 2"),
        (lambda: TileOutput(TILING, PLACES[1:]), "needs as many places, got 7"),
        (lambda: TileOutput(TILING, (*PLACES[1:], torch.empty(24, 31))), "tile 7 needs a CPU matrix"),
        (lambda: TileOutput(TILING, (*PLACES[1:], torch.empty(24, 32).bfloat16())), "use one dtype"),
        (
            lambda: linear_tiles(
                X, PACKED, out=TileOutput(TILING, PLACES), schedule=TileSchedule(Tiling(M, N, 48, 32))
            ),
            "need a schedule with that tiling",
        ),
        (
            lambda: linear_tiles(Rows.stack([W.t()[:3].contiguous()]), PACKED, out=X, schedule=TileSchedule(TILING)),
            "columns",
        ),
    ],
)
def test_bad_rows_and_places(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tiling(-1, 4, 8, 32), "m, n >= 0"),
        (lambda: Tiling(4, 4, 0, 32), "tile_m must be >= 1"),
        (lambda: Tiling(4, 4, 8, 20), "multiple of 32"),
        (lambda: TileSchedule(TILING, order=[0] * 8), "permutation of the 8 tiles"),
        (lambda: TileSchedule(TILING, order=[0, 1]), "got 2 entries"),
        (lambda: TileSchedule(TILING, order=[*range(1, 9)]), "from 1 to 8, expected 0 to 7"),
        (lambda: TileSchedule(TILING, order=[2**32, *range(1, 8)]), "expected 0 to 7"),
        (lambda: Tiling(4.5, 4, 8, 32), "integers"),
        (lambda: TileSchedule(TILING, order=[float(t) for t in range(8)]), "integers"),
        (lambda: TileSchedule(TILING, group_of=[0] * 7), "each of the 8 tiles, got 7"),
        (lambda: TileSchedule(TILING, group_of=[0, 2] * 4), "group 1 has none"),
        (lambda: TileSchedule(TILING, group_of=[-1] * 8), "from -1 to -1"),
    ],
)
def test_bad_schedules(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(X, W), "PackedWeight.from_dense"),
        (lambda: linear(torch.ones(M, K + 1), PACKED), rf"\[\.\.\., {K}\]"),
        (lambda: linear(X.double(), PackedWeight.from_dense(W)), "float32 and bfloat16"),
        (lambda: linear(X.bfloat16(), PACKED), "needs a weight packed from"),
        (lambda: linear([1.0], PACKED), "torch tensor"),
        (lambda: PackedWeight(PACKED.data, 100_000, K, "").to_dense(), "is a contiguous CPU tensor of"),
        (lambda: linear(X, PackedWeight(PACKED.data[:1].expand(PACKED.data.numel()), N, K, "")), "contiguous"),
        (lambda: linear(X, PACKED, threads=1.5), "threads must be"),
        (lambda: linear(X, PACKED, out=torch.ones(1, N).expand(M, N)), "rows of out overlap"),
        (lambda: linear(W, PACKED, out=WIDE[:, 1:], residual=WIDE[:, :N]), "memory with residual"),
        (lambda: linear(X, PACKED, out=torch.ones(M, N).requires_grad_()), "no gradient"),
        (lambda: linear(X.to("meta"), PACKED), "kernels for cpu"),
        (lambda: linear(X, PACKED, bias=torch.ones(N + 1)), f"bias must have shape \\[{N}\\]"),
        (lambda: linear(X, PACKED, bias=torch.ones(N).bfloat16()), "like x"),
        (lambda: linear(X, PACKED, residual=torch.ones(1, N)), "residual must have shape"),
        (lambda: linear(X, PACKED, out=torch.ones(M, N + 1)), "out must have shape"),
        (lambda: linear(X, PACKED, out=torch.ones(N, M).t()), "rows of out must be contiguous"),
        (lambda: linear(X, PACKED, activation="tanh"), "activation must be one of"),
        (lambda: linear(X, PACKED, threads=-1), "threads must be"),
        (lambda: linear(X, PACKED, schedule=TileSchedule(Tiling(M, N + 1, 24, 32))), "the schedule is for"),
        (lambda: linear(X, PACKED, done=counters(1)), "needs schedule="),
        (lambda: linear(X, PACKED, schedule=TileSchedule(TILING), done=torch.zeros(1)), "int32"),
        (lambda: linear(X, PACKED, schedule=TileSchedule(TILING), done=counters(0)), "at least 1"),
        (lambda: linear(X, PACKED, ready=Ready(counters(1), rows=HALF)), "at least 2"),
        (lambda: linear(X, PACKED, ready=Ready(counters(9), rows=0)), "at least 1"),
        (lambda: linear(X, PACKED, ready=Ready(counters(9), rows=M, timeout=float("inf"))), "finite"),
        (lambda: linear(X, PACKED, ready=Ready(counters(9), rows=M, timeout=0)), "above 0"),
        (lambda: linear(X.clone().requires_grad_(), PACKED, out=torch.ones(M, N)), "no gradient"),
        (lambda: PackedWeight.from_dense(torch.ones(3)), r"\[N, K\]"),
        (lambda: PackedWeight.from_dense(torch.ones(3, 3, dtype=torch.int32)), "float32 and bfloat16"),
        (lambda: PackedWeight.from_dense(W, isa="neon9"), "this CPU runs: "),
    ],
)  # fmt: skip
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_out_may_not_be_x():
    square = torch.randn(M, M)
    with pytest.raises(ValueError, match="out shares memory with x"):
        linear(square, PackedWeight.from_dense(torch.eye(M)), out=square)


def test_tiles_larger_than_the_output(case):
    x, packed, want = case
    huge = TileSchedule(Tiling(M, N, sys.maxsize, 2**40))
    assert torch.equal(linear(x, packed, schedule=huge), want)


def test_counters_are_used_again(case):
    """A second call adds to the first one's counts, and its waiters are woken as well."""
    x, packed, _ = case
    done, schedule = Counters(1), TileSchedule(TILING)
    for turn in (1, 2):
        join = in_thread(lambda t=turn: done.wait(0, 8 * t, timeout=60, what="all tiles"))
        linear(x, packed, schedule=schedule, done=done.tensor)
        join()
    assert done.read(0) == 16


FORK = """
import os, sys, torch
from weft.kernels import PackedWeight, linear
x, w = torch.randn(300, 300), torch.randn(300, 300)
torch.set_num_threads(2)
torch.mm(x, w)  # starts torch's workers, which the child will not have
packed = PackedWeight.from_dense(w)
want = linear(x, packed, threads=2)
child = os.fork()
if child == 0:
    same = linear(x, packed, threads=2).tolist() == want.tolist()
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_its_parents_threads():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


def test_the_portable_kernels_are_always_there():
    assert _core.available_isas()[-1] == "portable"
    assert _core.kernels().name == _core.available_isas()[0]
