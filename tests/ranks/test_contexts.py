"""What weft keeps for a process group goes with it; and what it leaves alone when told so."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from harness import run_ranks

import weft
from weft.errors import WeftError
from weft.overlap import OverlapPlan, Transport, keep_gloo_priority
from weft.overlap.executor import context


def windows() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weft-window")


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("weft-overlap")}


def destroy() -> None:
    group = dist.new_group([0, 1])
    plan = OverlapPlan.parse(
        "matmul_all_reduce m=32 n=32 k=8 dtype=float32 hosts=0,0 transport=messages axis=rows tile=8x32 groups=1,1"
    )
    assert plan.transport is Transport.MESSAGES
    x, w = torch.randn(32, 8), torch.randn(32, 8)
    weft.matmul_all_reduce(x, w, group=group, plan=plan)
    weft.plan_overlap("matmul_all_reduce", 16, 16, 8, group=group)
    assert len(context._contexts) == 2
    assert windows() > 0
    assert threads()
    ended = [thread for thread in threading.enumerate() if thread.name in threads()]
    dist.barrier()
    dist.destroy_process_group(group)
    gc.collect()
    assert context._contexts == {}, "at once, not with the next call"
    for thread in ended:
        thread.join(20.0)
        assert not thread.is_alive()
    assert windows() == 0


def test_what_belongs_to_a_group_goes_with_it() -> None:
    run_ranks(destroy, 2)


def policies() -> set[int]:
    return {
        os.sched_getscheduler(int(task.name))
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().strip() == "gloo_tcp_loop"
    }


def left_alone() -> None:
    x, w = torch.ones(4, 8), torch.ones(32, 8)
    with keep_gloo_priority():
        weft.matmul_all_reduce(x, w, group=dist.group.WORLD)
    weft.matmul_all_reduce(x, w, group=dist.group.WORLD)
    assert policies() == {os.SCHED_OTHER}


def test_gloo_threads_are_left_alone_where_told() -> None:
    run_ranks(left_alone, 2)


def forked() -> None:
    x, w = torch.ones(4, 8), torch.ones(32, 8)
    weft.matmul_all_reduce(x, w, group=dist.group.WORLD)
    child = os.fork()
    if child == 0:
        try:
            weft.matmul_all_reduce(x, w, group=dist.group.WORLD)
        except WeftError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    weft.matmul_all_reduce(x, w, group=dist.group.WORLD)


def test_a_child_is_told_that_the_group_is_not_its_own() -> None:
    run_ranks(forked, 2)
