"""Windows whose ranks, or whose store's host, are killed or stopped: the others end in time and hold nothing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import run_ranks
from windows import LONG, holds_nothing, world

from weft.comm import Window
from weft.comm.tell import store_of
from weft.errors import PeerTimeout, WeftError


class FatalStore:
    """A group's store whose user is SIGKILLed just before, or just after, it posts its word for a step."""

    def __init__(self, store: dist.Store, step: str, when: str) -> None:
        self._store, self._step, self._when = store, step, when

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        hit = f"/{self._step}/" in key
        if hit and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.set(key, value)
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)


def create_while_one_is_killed(victim: int, step: str, when: str) -> str:
    store = store_of(world())
    if dist.get_rank() == victim:
        store = FatalStore(store, step, when)
    try:
        Window.create(world(), 4096, timeout=2.0, store=store)
        text = "created"
    except WeftError as error:
        text = f"{type(error).__name__}: {error}"
    assert holds_nothing()
    return text


@pytest.mark.parametrize(
    ("victim", "step", "when"),
    [
        (0, "enter", "before"),
        (0, "offer", "before"),
        (0, "offer", "after"),
        (0, "mapped", "before"),
        (1, "enter", "before"),
        (1, "enter", "after"),
        (1, "mapped", "before"),
    ],
)
def test_a_kill_during_creation_ends_it_on_the_others(victim: int, step: str, when: str) -> None:
    results = run_ranks(create_while_one_is_killed, 3, victim, step, when, killed=[victim])
    assert results.pop(victim) == signal.SIGKILL
    for text in results:
        named = re.match(r"PeerTimeout: waited 2 s for ranks? ([\d, ]+) at step '", text)
        assert named, text
        assert str(victim) in named[1], text


def read_what_the_dead_wrote() -> int:
    window = Window.create(world(), 4096, counters_per_rank=1, timeout=LONG)
    if window.rank == 0:
        for peer in window.ranks:
            window.peer(peer).fill_(5)
            window.counters(peer).add(0)
        os.kill(os.getpid(), signal.SIGKILL)
    window.counters(window.rank).wait(0, 1, timeout=LONG, what="the last words of rank 0")
    return int(window.peer(0).sum()) + int(window.local.sum())


def test_memory_outlives_the_rank_that_made_it() -> None:
    assert run_ranks(read_what_the_dead_wrote, 3, killed=[0]) == [signal.SIGKILL, 2 * 5 * 4096, 2 * 5 * 4096]


def create_until_killed(seed: int) -> bool:
    """The victim dies at a random instant of a loop; whether a survivor then holds nothing of a window."""
    if dist.get_rank() == seed % dist.get_world_size():
        after = random.Random(seed).uniform(0.0, 0.05)
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with contextlib.suppress(WeftError):
        while True:
            Window.create(world(), 4096, timeout=2.0).close()
    return holds_nothing()


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_at_any_instant_ends_the_others(seed: int) -> None:
    results = run_ranks(create_until_killed, 3, seed, killed=[seed % 3])
    assert results.pop(seed % 3) == signal.SIGKILL
    assert results == [True, True]


def wait_for_a_rank_that_dies() -> str:
    window = Window.create(world(), 64, counters_per_rank=1, timeout=LONG)
    if window.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerTimeout) as caught:
        window.counters(window.rank).wait(0, 1, timeout=1.0, what="tile 3 from rank 1")
    return str(caught.value)


def test_a_kill_during_a_wait_ends_the_wait() -> None:
    results = run_ranks(wait_for_a_rank_that_dies, 3, killed=[1])
    for text in (results[0], results[2]):
        assert text == "waited 1 s for tile 3 from rank 1 (counter 0 is 0, awaited 1)"


def state_of(pid: int) -> str:
    """The kernel's letter for a process: T is stopped, Z is dead and not yet reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def host_of_the_store_gets(number: int) -> str:
    """Rank 0 hosts a store of its own and gets signal `number`; rank 1 must not wait for it for ever."""
    shared = store_of(world())
    if dist.get_rank() == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("host", f"{store.port} {os.getpid()}")
        shared.get("connected")
        os.kill(os.getpid(), number)
        return "goes on"
    port, pid = map(int, shared.get("host").decode().split())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    shared.set("connected", "")
    while state_of(pid) not in ("T", "Z", "gone"):
        time.sleep(0.01)
    with pytest.raises(WeftError) as caught:
        Window.create(world(), 64, timeout=1.0, store=store)
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_store_whose_host_was_killed() -> None:
    results = run_ranks(host_of_the_store_gets, 2, signal.SIGKILL, killed=[0])
    assert results[1].startswith("PeerLost: the process that hosts the group's store is gone"), results[1]


def test_a_store_whose_host_hangs() -> None:
    results = run_ranks(host_of_the_store_gets, 2, signal.SIGSTOP)
    assert results[0] == "goes on"
    assert results[1].startswith("PeerTimeout: waited 1 s for the group's store, which does not answer"), results[1]
