"""Tiles that wait for their input, groups that are signalled, and waits that time out."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from matmuls import HALF, TILING, K, M, N, run, tensors

sys.path.append(str(Path(__file__).parents[3] / "ranks"))
from threads import in_thread

from weft.errors import PeerTimeout
from weft.kernels import Ready, TileSchedule
from weft.kernels import triton as kernels


def watch(counter, value):
    """Spins until another thread's kernel has counted to `value`."""
    event = threading.Event()
    for _ in range(60_000):
        if counter.item() >= value:
            return
        event.wait(0.001)
    raise AssertionError(f"the counter stayed at {counter.item()}, expected {value}")


def test_a_group_is_whole_before_the_rest_has_even_arrived():
    """The lower half of x arrives only after the upper group was seen to be done, so the order is forced."""
    x, w, *_ = tensors(M, K, N)
    want = run(x, w)
    schedule = TileSchedule(TILING, group_of=[tile // 4 for tile in range(8)])
    done, ready = torch.zeros(2, dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    arriving, out = x.clone(), torch.full((M, N), float("nan"))
    arriving[HALF:] = float("nan")
    wait = Ready(ready, rows=HALF, timeout=600)
    join = in_thread(lambda: run(arriving, w, out=out, schedule=schedule, done=done, ready=wait))
    watch(done[0], 4)
    assert torch.equal(out[:HALF], want[:HALF])
    assert done[1].item() == 0
    arriving[HALF:] = x[HALF:]
    ready[1] = 1
    assert join() is out
    assert torch.equal(out, want)
    assert done[1].item() == 4


def test_tiles_wait_for_every_block_of_their_rows():
    """With one row a block, the last counter alone holds the last tiles back."""
    x, w, *_ = tensors(M, K, N)
    ready, done = torch.ones(M, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ready[M - 1] = 0
    schedule = TileSchedule(TILING)
    join = in_thread(lambda: run(x, w, schedule=schedule, done=done, ready=Ready(ready, rows=1, timeout=600)))
    watch(done[0], 6)
    assert done.item() == 6
    ready[M - 1] = 1
    assert torch.equal(join(), run(x, w))


def test_local_rows_are_ready_from_the_start():
    x, w, *_ = tensors(M, K, N)
    ready = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    wait = Ready(ready, rows=24, timeout=0.01, what="rows from rank 1")
    with pytest.raises(PeerTimeout, match=r"rows from rank 1, block 0 \(24 rows each\)"):
        run(x, w, schedule=TileSchedule(TILING), ready=wait, local_rows=(1, 24))
    with pytest.raises(PeerTimeout, match="block 3"):
        run(x, w, schedule=TileSchedule(TILING), ready=wait, local_rows=(0, 24))
    ready[3] = 1
    assert torch.equal(run(x, w, schedule=TileSchedule(TILING), ready=wait, local_rows=(0, 24)), run(x, w))


def test_input_that_never_arrives_stores_and_signals_nothing():
    x, w, *_ = tensors(M, K, N)
    ready, done = torch.tensor([1, 0], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    schedule = TileSchedule(TILING, group_of=[tile // 4 for tile in range(8)])
    out, late = torch.full((M, N), float("nan")), kernels.Late.on("cpu")
    wait = Ready(ready, rows=HALF, timeout=0.01, what="rows from rank 1")
    run(x, w, out=out, schedule=schedule, done=done, ready=wait, late=late)
    assert done.tolist() == [4, 0]
    assert out[HALF:].isnan().all()
    assert torch.equal(out[:HALF], run(x, w)[:HALF])
    with pytest.raises(PeerTimeout, match=r"waited 0\.01 s for rows from rank 1, block 1"):
        late.check(wait.what, seconds=wait.timeout)


def test_the_waiter():
    counters, values = torch.zeros(3, dtype=torch.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
    counters[:2] = torch.tensor([1, 5])
    kernels.wait(counters, values, count=2, timeout=0.01)
    with pytest.raises(PeerTimeout, match=r"waited 0\.01 s for group 2 of all_reduce, block 2"):
        kernels.wait(counters, values, timeout=0.01, what="group 2 of all_reduce")
    late = kernels.Late.on("cpu")
    kernels.wait(counters, values, first=2, timeout=0.01, late=late)
    assert late.flag.item() == 3


def test_the_waiter_is_satisfied_late():
    counters, values = torch.zeros(1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    returned = threading.Event()

    def waits():
        kernels.wait(counters, values, timeout=600)
        returned.set()

    join = in_thread(waits)
    for _ in range(2):
        assert not returned.wait(0.05)
        counters += 1
    join()
    assert returned.is_set()


def test_sums_wait_for_every_rank():
    parts, out = torch.randn(3, 4, 5), torch.full((4, 5), float("nan"))
    ready = torch.tensor([1, 1, 0], dtype=torch.int32)
    with pytest.raises(PeerTimeout, match="parts of ranks, block 2"):
        kernels.sum_in_order(parts, out=out, ready=Ready(ready, rows=1, timeout=0.01, what="parts of ranks"))
    assert out.isnan().all()
    join = in_thread(lambda: kernels.sum_in_order(parts, out=out, ready=Ready(ready, rows=1, timeout=600)))
    ready[2] = 1
    join()
    assert torch.equal(out, parts[0] + parts[1] + parts[2])
