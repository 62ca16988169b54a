"""Ctrl-C while a rank waits for another one: it is heard at once, and the others are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import weft
from weft import overlap
from weft.comm import Group, PeerLost, Transfer
from weft.comm.tell import store_of
from weft.errors import WeftError
from weft.layout import Layout, Mesh, Replicate
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.executor.context import context_of
from weft.reshard import Source

LONG, PATIENCE = 90.0, 25.0
M, N, K = 96, 64, 32


def call_op(op: str, transport: str, groups: tuple[int, ...]) -> None:
    group = dist.group.WORLD
    x, w = torch.ones(M // 2 if op == "all_gather_matmul" else M, K), torch.ones(N, K)
    plan = OverlapPlan(Op(op), M, N, K, "float32", (0, 0), Transport(transport), tile_m=16, groups=groups)
    to = (torch.arange(M) % 2,) if op == "matmul_all_to_all" else ()
    getattr(overlap, op)(x, w, *to, group=group, plan=plan)


def agree(group: Group) -> None:
    group.agree("a test", "of interrupts")


def receive(group: Group) -> None:
    group.recv(torch.empty(4), 1 - group.rank).wait(what="a message")


def reshard(group: Group) -> None:
    """Whose sender, rank 1, has agreed, and sends only when it hears of the interrupt."""
    src = Source((1 << 20,), torch.float32, Layout(Mesh.of([1], hosts=[1]), [Replicate()]))
    mine = torch.ones(1 << 20) if group.rank == 1 else None
    weft.reshard(mine, Mesh.of([0], hosts=[0]), [Replicate()], src=src, group=group)


def interrupt_when(is_waiting: Callable[[], bool]) -> None:
    """Sends the signal of Ctrl-C to this process once it is in the middle of its call."""

    def watch() -> None:
        while not is_waiting():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def be_interrupted(call: Callable[[], None], is_waiting: Callable[[], bool]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt_when(is_waiting)
    with pytest.raises(KeyboardInterrupt):
        call()
    store_of(dist.group.WORLD).set("heard", "")


def hear_that() -> None:
    store_of(dist.group.WORLD).wait(["heard"], timedelta(seconds=PATIENCE))


def in_an_op(op: str, transport: str, groups: tuple[int, ...]) -> str:
    """Rank 1 comes only when rank 0 has been interrupted."""
    for _ in range(2):
        call_op(op, transport, groups)
    if dist.get_rank() == 1:
        hear_that()
        if transport == "messages":
            with pytest.raises(PeerLost):
                call_op(op, transport, groups)
        return "told"
    agreement = context_of(dist.group.WORLD).agreement
    before = agreement._calls
    be_interrupted(lambda: call_op(op, transport, groups), lambda: agreement._calls > before)
    with pytest.raises(WeftError, match="make a new group"):
        call_op(op, transport, groups)
    return "interrupted"


class Watched(Group):
    """Knows whether a message has been asked for."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD, timeout=LONG)
        self.asked, self.may_send = False, self.rank == 0

    def recv(self, tensor: torch.Tensor, src: int, **options: Any) -> Transfer:
        transfer = super().recv(tensor, src, **options)
        self.asked = self.asked or tensor.nbytes > 1000 or self.wanted != "reshard"
        return transfer

    def send(self, tensor: torch.Tensor, dst: int, **options: Any) -> Transfer:
        if tensor.nbytes > 1000 and not self.may_send:
            hear_that()
        return super().send(tensor, dst, **options)

    wanted = ""


def in_a_wait(what: str) -> str:
    call = {"agree": agree, "receive": receive, "reshard": reshard}[what]
    group = Watched()
    group.barrier("both are here")
    group.wanted = what
    if group.rank == 1:
        if what != "reshard":
            hear_that()
        with pytest.raises(PeerLost):
            call(group)
        return "told"
    group.asked = False
    be_interrupted(lambda: call(group), lambda: group.asked)
    return "interrupted"


OPS = [
    ("all_gather_matmul", "messages", (1, 1, 1)),
    ("all_gather_matmul", "messages", ()),
    ("all_gather_matmul", "windows", (1, 1)),
    ("matmul_reduce_scatter", "messages", (1, 1, 1)),
    ("matmul_reduce_scatter", "messages", ()),
    ("matmul_all_reduce", "messages", (1, 1)),
    ("matmul_all_reduce", "windows", (1, 1)),
    ("matmul_all_to_all", "messages", (1, 1)),
]


@pytest.mark.parametrize(("op", "transport", "groups"), OPS)
def test_a_rank_in_an_op_hears_ctrl_c(op: str, transport: str, groups: tuple[int, ...]) -> None:
    assert run_ranks(in_an_op, 2, op, transport, groups, timeout=60.0) == ["interrupted", "told"]


@pytest.mark.parametrize("what", ["agree", "receive", "reshard"])
def test_a_rank_that_waits_for_a_message_hears_ctrl_c(what: str) -> None:
    assert run_ranks(in_a_wait, 2, what, timeout=60.0) == ["interrupted", "told"]


PROGRAM = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import weft
from weft.overlap.executor.context import context_of
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
x, w = torch.ones(48, 32), torch.ones(64, 32)
plan = "all_gather_matmul m=96 n=64 k=32 dtype=float32 hosts=0,0 transport=messages axis=rows tile=16x64 groups=1,1"
weft.all_gather_matmul(x, w, group=dist.group.WORLD, plan=plan)
agreement = context_of(dist.group.WORLD).agreement
if dist.get_rank() == 1:
    time.sleep(60)

def watch():
    while agreement._calls < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=watch, daemon=True).start()
weft.all_gather_matmul(x, w, group=dist.group.WORLD, plan=plan)
"""


def test_a_program_that_was_interrupted_ends_as_python_programs_do(tmp_path: Path) -> None:
    """With a KeyboardInterrupt, and not with an abort by a thread that was left in gloo."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    other = subprocess.Popen([*command, "1"], env=environment)
    try:
        done = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=150.0)
    finally:
        other.kill()
        other.wait()
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (-signal.SIGINT, 130), done.stderr
