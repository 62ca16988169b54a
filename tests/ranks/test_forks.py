"""A child of a rank has its process group, and may not use it: it is told so at once, and its parent goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import weft
from weft.comm import Group, Window, hosts_of
from weft.comm.host_collectives import HostGroup
from weft.errors import WeftError

LONG = 30.0


def refused_in_a_child(kind: str) -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    mesh = init_device_mesh("cpu", (2,))
    x, w = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]), torch.ones(6, 4)
    untouched = dist.new_group([0, 1])
    made = weft.schedule("1f1b", stages=2, microbatches=2)

    def pipeline() -> weft.Pipeline:
        return weft.Pipeline({rank: nn.Linear(4, 4)}, [0, 1], made, loss_fn=nn.functional.mse_loss, timeout=LONG)

    batch = torch.ones(4, 4)
    group, lean, pipe = Group(world, timeout=LONG), HostGroup(world, bank_bytes=64, timeout=LONG), pipeline()
    weft.matmul_all_reduce(torch.ones(2, 4), w, group=world)
    calls: dict[str, Callable[[], object]] = {
        "reshard": lambda: weft.reshard(x, mesh, [Shard(1)], timeout=LONG),
        "reshard on a new group": lambda: weft.reshard(x, mesh, [Shard(1)], group=untouched, timeout=LONG),
        "reshard on a Group": lambda: weft.reshard(x, mesh, [Shard(1)], group=group),
        "plan": lambda: weft.plan_overlap("matmul_all_reduce", 9, 9, 9, group=world),
        "matmul": lambda: weft.matmul_all_reduce(torch.ones(2, 4), w, group=world),
        "matmul on a new group": lambda: weft.matmul_all_reduce(torch.ones(2, 4), w, group=untouched),
        "window": lambda: Window.create(world, 64, timeout=LONG),
        "hosts": lambda: hosts_of(world, timeout=LONG),
        "agree": lambda: group.agree("a", "test"),
        "send": lambda: group.send(torch.ones(1), 1 - rank),
        "sum": lambda: lean.all_reduce(torch.ones(1)),
        "pipeline": pipeline,
        "step": lambda: pipe.step(batch, batch),
    }
    if kind == "reshard":
        calls["reshard"]()
    child = os.fork()
    if child == 0:
        try:
            calls[kind]()
        except WeftError as error:
            os._exit(0 if "forked" in str(error) else 2)
        finally:
            os._exit(1)
    end = time.monotonic() + LONG / 2
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] != 0, "the child hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    for name, call in calls.items():
        if name not in ("pipeline", "send"):
            call()
    pipe.close()


@pytest.mark.parametrize(
    "kind",
    [
        "reshard", "reshard on a new group", "reshard on a Group", "plan", "matmul", "matmul on a new group", "window",
        "hosts", "agree", "send", "sum", "pipeline", "step",
    ],
)  # fmt: skip
def test_a_child_is_refused_and_its_parent_goes_on(kind: str) -> None:
    run_ranks(refused_in_a_child, 2, kind)
