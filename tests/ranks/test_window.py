"""Windows with real processes: bits, signals, lifetimes, and what does not fit together."""

from __future__ import annotations

import gc
import json
import os
import threading

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from windows import LONG, all_meet, descriptors, holds_nothing, mappings, world

from weft.comm import Window
from weft.comm.tell import store_of
from weft.comm.window import Segments
from weft.errors import WeftError

# One process ------------------------------------------------------------------------------------------------


@given(st.integers(0, 20000), st.integers(0, 3000), st.integers(1, 5))
def test_segments_are_aligned_and_apart(nbytes: int, counters: int, ranks: int) -> None:
    segments = Segments(nbytes, counters, ranks)
    end = 16  # of the token
    for index in range(ranks):
        assert segments.counters(index) % 64 == 0 == segments.data(index) % 64
        assert segments.counters(index) >= end
        assert segments.data(index) >= segments.counters(index) + 4 * counters
        end = segments.data(index) + nbytes
    assert segments.total >= end


# Bits and signals -------------------------------------------------------------------------------------------


def write_to_every_peer(nbytes: int) -> None:
    window = Window.create(world(), nbytes, counters_per_rank=2, timeout=LONG)
    rank, ranks = window.rank, window.ranks
    assert ranks == tuple(range(dist.get_world_size()))
    assert window.local.sum() == 0, "the memory is 0 at first"
    assert all(window.peer(peer).data_ptr() % 64 == 0 for peer in ranks)
    all_meet(window, 1)
    part = nbytes // len(ranks)
    for peer in ranks:
        window.peer(peer)[rank * part : (rank + 1) * part] = bits(rank, peer, part)
    for peer in ranks:
        window.counters(peer).add(1, 1)
    window.counters(rank).wait(1, len(ranks), timeout=LONG, what="the parts of all ranks")
    expected = torch.cat([bits(source, rank, part) for source in ranks])
    assert torch.equal(window.local[: part * len(ranks)], expected)
    assert window.local[part * len(ranks) :].sum() == 0, "no one wrote past the end"


def bits(source: int, target: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * source + target)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 1 << 20), (3, 4097), (4, 100_003)])
def test_ranks_write_into_each_other(ranks: int, nbytes: int) -> None:
    run_ranks(write_to_every_peer, ranks, nbytes)


def ping_pong(turns: int) -> None:
    """The payload is written with plain stores; only the counter orders it before the peer's read."""
    window = Window.create(world(), 4096, counters_per_rank=1, timeout=LONG)
    rank, peer = window.rank, 1 - window.rank
    mine, theirs = window.view(rank, (512,), torch.int64), window.view(peer, (512,), torch.int64)
    for turn in range(1, turns + 1):
        if rank == 0:
            theirs.fill_(turn)
            window.counters(peer).add(0)
        window.counters(rank).wait(0, turn, timeout=LONG, what=f"turn {turn} from rank {peer}")
        assert bool((mine == turn).all())
        if rank == 1:
            theirs.fill_(turn)
            window.counters(peer).add(0)


def test_a_signal_orders_the_data_before_it() -> None:
    run_ranks(ping_pong, 2, 2000)


def views_and_errors() -> None:
    window = Window.create(world(), 100, counters_per_rank=3, timeout=LONG)
    view = window.view(window.rank, (3, 4), torch.bfloat16, offset=8)
    view.copy_(torch.arange(12).view(3, 4))
    assert torch.equal(window.local[8:32].view(torch.bfloat16), torch.arange(12, dtype=torch.bfloat16))
    assert window.view(0, (), torch.float64, offset=88).shape == ()
    assert window.view(0, (0, 7), torch.float32, offset=100).shape == (0, 7)
    assert len(window.counters(0)) == 3
    for shape, dtype, offset in [
        ((26,), torch.float32, 0),
        ((1,), torch.float32, 2),
        ((1,), torch.uint8, 100),
    ]:
        with pytest.raises(ValueError, match="create the window with more bytes_per_rank"):
            window.view(0, shape, dtype, offset=offset)
    for shape, offset in [((4,), -4), ((-4,), 50)]:
        with pytest.raises(ValueError, match="expected an offset"):
            window.view(0, shape, torch.uint8, offset=offset)
    for rank in (-1, 2):
        for access in (window.peer, window.counters):
            with pytest.raises(ValueError, match=rf"rank is {rank}, expected one of \(0, 1\), which share a host"):
                access(rank)
    assert "bytes_per_rank=100" in repr(window)


def test_views() -> None:
    run_ranks(views_and_errors, 2)


# Lifetime ---------------------------------------------------------------------------------------------------


def view_outlives_its_window() -> None:
    with Window.create(world(), 4096, counters_per_rank=1, timeout=LONG) as window:
        mine, theirs = window.local, window.peer(1 - window.rank)
        counters = {rank: window.counters(rank) for rank in window.ranks}
        line = next(line for line in mappings())
        assert "/memfd:weft-window (deleted)" in line, "the memory has no name in any file system"
    window.close()
    with pytest.raises(ValueError, match="the window is closed"):
        window.peer(0)
    assert "closed" in repr(window)
    theirs.fill_(7)
    counters[1 - window.rank].add(0)
    counters[window.rank].wait(0, 1, timeout=LONG, what="the peer's bytes")
    assert mine.sum() == 7 * 4096
    del mine, theirs, counters
    gc.collect()
    assert mappings() == []


def test_a_view_outlives_its_window() -> None:
    run_ranks(view_outlives_its_window, 2)


def two_at_once() -> None:
    first = Window.create(world(), 64, timeout=LONG, counters_per_rank=1)
    second = Window.create(world(), 4096, timeout=LONG, counters_per_rank=1)
    peer = 1 - first.rank
    first.peer(peer).fill_(1)
    second.peer(peer).fill_(2)
    first.counters(peer).add(0)
    second.counters(peer).add(0)
    for window, value in ((second, 2), (first, 1)):
        window.counters(window.rank).wait(0, 1, timeout=LONG, what=f"window {value}")
        assert bool((window.local == value).all())
    first.close()
    third = Window.create(world(), 64, timeout=LONG, counters_per_rank=1)
    assert third.local.sum() == 0, "a new window never shows the bytes of an old one"
    assert bool((second.local == 2).all())


def test_two_windows_at_once_and_one_after_a_close() -> None:
    run_ranks(two_at_once, 2)


def create_and_close(times: int) -> tuple[int, int, int, int]:
    store = store_of(world())
    for _ in range(3):
        Window.create(world(), 5000, counters_per_rank=4, timeout=LONG).close()
    dist.barrier()
    before, keys = descriptors(), store.num_keys()
    dist.barrier()  # no rank goes on before both have counted
    for turn in range(times):
        with Window.create(world(), 5000, counters_per_rank=4, timeout=LONG) as window:
            window.local.fill_(turn % 256)
    dist.barrier()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(LONG)
    return descriptors() - before, store.num_keys() - keys, len(mappings()), threading.active_count()


def test_two_hundred_windows_leave_nothing() -> None:
    assert run_ranks(create_and_close, 2, 200) == [(0, 0, 0, 1)] * 2


def open_windows_hold_no_descriptor() -> int:
    before = descriptors()
    windows = [Window.create(world(), 4096, timeout=LONG) for _ in range(5)]
    assert len(windows) == len(mappings())
    return descriptors() - before


def test_an_open_window_holds_no_descriptor() -> None:
    assert run_ranks(open_windows_hold_no_descriptor, 2) == [0, 0]


# Disagreement and impossible requests -----------------------------------------------------------------------


def create_with(sizes: list[tuple[int, int]]) -> str:
    nbytes, counters = sizes[dist.get_rank()]
    before = descriptors()
    try:
        Window.create(world(), nbytes, counters_per_rank=counters, timeout=LONG)
        text = "created"
    except (WeftError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    assert holds_nothing()
    assert descriptors() == before
    # The ranks are in step again, whatever went wrong before.
    with Window.create(world(), 64, timeout=LONG) as window:
        assert window.local.shape == (64,)
    return text


def test_sizes_must_agree() -> None:
    texts = run_ranks(create_with, 3, [(64, 2), (64, 2), (128, 2)])
    assert all("PeerMismatch" in text for text in texts)
    assert "rank 0 asks for (64, 2), rank 2 for (128, 2)" in texts[0]
    assert "rank 2 asks for (128, 2), rank 0 for (64, 2)" in texts[2]
    texts = run_ranks(create_with, 2, [(64, 2), (64, 3)])
    assert "rank 0 asks for (64, 2), rank 1 for (64, 3)" in texts[0]


def test_sizes_must_make_sense() -> None:
    for sizes in ((-1, 0), (64, -1), (0, 0)):
        for text in run_ranks(create_with, 2, [sizes, sizes]):
            assert text.startswith("ValueError: bytes_per_rank is"), text


def test_memory_that_cannot_be_had_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(create_with, 2, [(1 << 61, 0)] * 2):
        assert text.startswith("WindowUnavailable: no window of"), text
        assert "on rank 0: " in text


class ForgingStore:
    """A group's store in which rank 0 seems to be process `pid`, as it would from another PID namespace."""

    def __init__(self, store: dist.Store, pid: int) -> None:
        self._store, self._pid = store, pid

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if "/offer/" not in key:
            return value
        return json.dumps([self._pid, *json.loads(value)[1:]]).encode()


def create_across_pid_namespaces() -> str:
    before = descriptors()
    store = ForgingStore(store_of(world()), os.getpid())
    try:
        Window.create(world(), 64, timeout=LONG, store=store)
        text = "created"
    except WeftError as error:
        text = str(error)
    assert holds_nothing()
    assert descriptors() == before
    return text


def test_another_pid_namespace_is_an_error_with_a_remedy() -> None:
    for text in run_ranks(create_across_pid_namespaces, 3):
        assert "on rank 1: " in text
        assert "start the ranks of a host in one PID namespace" in text
