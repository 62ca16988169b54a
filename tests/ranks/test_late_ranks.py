"""Ranks that come late, or to other calls first: what was not to be is told to all, and the next call is right."""

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
from threads import in_thread
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weft
from weft.errors import PeerLost, PeerTimeout

LONG = 30.0
FULL = torch.arange(48.0).reshape(8, 6)


def make_reshard(group: dist.ProcessGroup | None = None) -> Callable[[float], None]:
    """A reshard within so many seconds, whose result is compared."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(FULL, mesh, [Shard(0)])

    def run(seconds: float) -> None:
        y = weft.reshard(x, mesh, [Shard(1)], group=group, timeout=seconds)
        assert torch.equal(y.to_local(), FULL.chunk(dist.get_world_size(), 1)[dist.get_rank()])

    return run


# Another order on every rank --------------------------------------------------------------------------------


def in_another_order(kind: str) -> None:
    """Rank 0 reshards and then multiplies; a thread of rank 1 multiplies while another one reshards."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=LONG / 3))
    reshard, w = make_reshard(group), torch.ones(5, 6)

    def multiply() -> None:
        if kind == "plan":
            weft.plan_overlap("matmul_all_reduce", 64, 32, 32, group=group)
        else:
            assert torch.equal(weft.matmul_all_reduce(FULL, w, group=group), 2 * FULL @ w.T)

    if kind == "warm":
        multiply()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(1.0)
        reshard(LONG / 3)
        multiply()
    else:
        join = in_thread(multiply, LONG)
        time.sleep(0.5)
        reshard(LONG / 3)
        join()


@pytest.mark.parametrize("kind", ["cold", "warm", "plan"])
def test_a_reshard_and_the_first_matmul_come_in_any_order(kind: str) -> None:
    run_ranks(in_another_order, 2, kind)


# Late -------------------------------------------------------------------------------------------------------


def late_once(seconds: float) -> str:
    reshard = make_reshard()
    reshard(LONG)
    text, late = "", dist.get_world_size() - 1
    if dist.get_rank() == late:
        time.sleep(seconds)
    start = time.monotonic()
    try:
        reshard(1.0 if dist.get_rank() == 0 else LONG)
    except (PeerTimeout, PeerLost) as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - start < seconds + LONG / 3
    dist.barrier()  # torch's own group is as it was
    for _ in range(3):
        reshard(LONG)
    dist.barrier()
    return text


@pytest.mark.parametrize("ranks", [2, 3])
def test_after_a_late_rank_the_next_reshard_is_right(ranks: int) -> None:
    *others, late = run_ranks(late_once, ranks, 1.5)
    for text in others:
        assert text.startswith(f"PeerTimeout: waited 1 s for rank {ranks - 1} at step 'has' of reshard"), text
    told = f"PeerLost: rank 0 gave up at step 'has' of reshard: it waited 1 s for rank {ranks - 1}."
    assert late.startswith(told), late


def late_to_the_first(call: str) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.0))
    reshard, w = make_reshard(group), torch.ones(5, 6)
    calls: dict[str, Callable[[], object]] = {
        "reshard": lambda: reshard(1.0),
        "reshard_state_dict": lambda: weft.reshard_state_dict({}, {}, group=group, timeout=1.0),
        "matmul": lambda: weft.matmul_all_reduce(FULL, w, group=group),
        "plan": lambda: weft.plan_overlap("matmul_all_reduce", 64, 32, 32, group=group),
    }
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    with pytest.raises(PeerTimeout) as caught:
        calls[call]()
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("reshard", "reshard"),
        ("reshard_state_dict", "reshard_state_dict"),
        ("matmul", "the first of overlapped matmuls on the process group"),
        ("plan", "the first of overlapped matmuls on the process group"),
    ],
)
def test_the_text_names_what_was_called(call: str, name: str) -> None:
    assert run_ranks(late_to_the_first, 2, call)[0] == f"waited 1 s for rank 1 at the start of {name}"


def interrupted_alone() -> str:
    """Rank 0 hears Ctrl-C while it waits for rank 1, which comes later: it is told, and both go on."""
    reshard = make_reshard()
    reshard(LONG)
    text = ""
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            reshard(LONG)
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(PeerLost) as caught:
            reshard(LONG)
        text = str(caught.value)
    reshard(LONG)
    return text


def test_who_comes_after_an_interrupt_is_told() -> None:
    text = run_ranks(interrupted_alone, 2)[1]
    assert text.startswith("rank 0 gave up at step 'has' of reshard: it was ended by KeyboardInterrupt.")
