"""Counters in one process: values, waiting threads, deadlines, and what they refuse."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from weft import _core
from weft.comm import Counters
from weft.errors import PeerTimeout


def test_values() -> None:
    counters = Counters(3)
    counters.add(0)
    counters.add(2, 5)
    counters.add(2, -1)
    assert [counters.read(i) for i in range(3)] == [1, 0, 4]
    assert counters.tensor.tolist() == [1, 0, 4]
    assert len(counters) == 3
    counters.reset()
    assert counters.tensor.tolist() == [0, 0, 0]


def test_over_a_part_of_a_tensor() -> None:
    words = torch.arange(8, dtype=torch.int32)
    counters = Counters.over(words[2:5])
    counters.add(1, 10)
    assert words.tolist() == [0, 1, 2, 13, 4, 5, 6, 7]
    assert counters.tensor.data_ptr() == words[2:].data_ptr()


def test_wait_for_what_is_there_already() -> None:
    counters = Counters(1)
    counters.add(0, 3)
    for value in (-1, 0, 2, 3):
        counters.wait(0, value, timeout=0.001, what="a value that was reached")


def test_timeout_names_what_it_waited_for() -> None:
    counters = Counters(2)
    counters.add(1, 2)
    with pytest.raises(PeerTimeout, match=r"waited 0\.05 s for tile 7 of rank 1 \(counter 1 is 2, awaited 3\)"):
        counters.wait(1, 3, timeout=0.05, what="tile 7 of rank 1")


def test_native_wait_releases_the_gil() -> None:
    """If the waiter held the GIL, the sleep would last as long as the wait, and the add come too late."""
    counters = Counters(1)
    outcomes: list[bool] = []
    address = counters.tensor.data_ptr()
    waiter = threading.Thread(target=lambda: outcomes.append(_core.counter_wait(address, 1, 20.0)))
    waiter.start()
    time.sleep(0.1)  # the waiter sleeps in the kernel by then
    counters.add(0)
    waiter.join()
    assert outcomes == [True]


def test_every_waiter_wakes() -> None:
    counters = Counters(2)
    woken = Counters(1)

    def wait_for(value: int) -> None:
        counters.wait(1, value, timeout=30.0, what=f"value {value}")
        woken.add(0)

    waiters = [threading.Thread(target=wait_for, args=(value,)) for value in (1, 2, 2, 3, 3, 3)]
    for waiter in waiters:
        waiter.start()
    for seen_by in (1, 3, 6):
        counters.add(1)
        woken.wait(0, seen_by, timeout=30.0, what=f"{seen_by} waiters")
    for waiter in waiters:
        waiter.join(30.0)
    assert woken.read(0) == 6


def test_adds_of_many_threads_are_not_lost() -> None:
    counters = Counters(1)

    def add_many() -> None:
        for _ in range(1000):
            counters.add(0)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    counters.wait(0, 4000, timeout=60.0, what="4 threads with 1000 adds each")
    for thread in threads:
        thread.join()
    assert counters.read(0) == 4000


def test_a_signal_interrupts_a_wait() -> None:
    class AlarmError(Exception):
        pass

    def interrupt(number, frame) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(AlarmError):
            Counters(1).wait(0, 1, timeout=60.0, what="nothing")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_refuses_an_index_out_of_range(index: int) -> None:
    counters = Counters(2)
    for call in (counters.add, counters.read, lambda i: counters.wait(i, 0, timeout=1.0, what="")):
        with pytest.raises(ValueError, match=rf"counter index is {index}, expected 0 <= index < 2"):
            call(index)


@pytest.mark.parametrize("timeout", [0, 0.0, -1.0, float("inf"), float("nan")])
def test_refuses_a_timeout_that_never_ends_or_has_ended(timeout: float) -> None:
    counters = Counters(1)
    with pytest.raises(ValueError, match=r"timeout is .*, expected a number of seconds above 0"):
        counters.wait(0, 0, timeout=timeout, what="")


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (
            torch.zeros(4, dtype=torch.int64),
            "dtype of the counters' tensor is torch.int64, expected torch.int32",
        ),
        (torch.zeros(4, dtype=torch.int32, device="meta"), "device .* is meta, expected cpu"),
        (torch.zeros(2, 2, dtype=torch.int32), "number of dims .* is 2, expected 1"),
        (torch.zeros(8, dtype=torch.int32)[::2], "contiguous .* is False, expected True"),
        (
            torch.frombuffer(bytearray(13), dtype=torch.int32, count=3, offset=1),
            "address modulo 4 .* is 1, expected 0",
        ),
    ],
    ids=["dtype", "device", "dims", "strides", "alignment"],
)
def test_refuses_a_tensor_that_cannot_hold_counters(tensor: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"{complaint}.*; give a torch.zeros"):
        Counters.over(tensor)


def test_refuses_a_negative_number() -> None:
    with pytest.raises(ValueError, match="number of counters is -1, expected 0 or more"):
        Counters(-1)
    assert len(Counters(0)) == 0


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2])
def test_counts_go_round(start: int) -> None:
    counters, taken, out = Counters(1), Counters(1), torch.zeros(3)
    counters.tensor[0] = (start + 2**31) % 2**32 - 2**31
    for count in range(start + 1, start + 4):
        assert not counters.has_reached(0, count)
        with pytest.raises(PeerTimeout):
            counters.wait(0, count, timeout=0.001, what="a value that is not there")
        counters.add(0)
        counters.wait(0, count, timeout=1.0, what="a value that is there")
        source = torch.tensor([1.0, 2.0, 3.0]) * (count - start)
        assert counters.take(0, count, source, out, done=(taken, 0), timeout=1.0)
        assert torch.equal(out, source)
    assert taken.read(0) == 3
