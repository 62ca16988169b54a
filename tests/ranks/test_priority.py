"""gloo's threads give way to compute once an overlapped op has run."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from harness import run_ranks

import weft


def policies() -> set[int]:
    """The scheduling policies of this process's gloo threads."""
    tasks = Path("/proc/self/task").iterdir()
    return {
        os.sched_getscheduler(int(task.name))
        for task in tasks
        if (task / "comm").read_text().strip() == "gloo_tcp_loop"
    }


def call_once() -> tuple[set[int], set[int], int]:
    before = policies()
    weft.matmul_all_reduce(torch.ones(4, 8), torch.ones(32, 8), group=dist.group.WORLD)
    return before, policies(), os.sched_getscheduler(0)


def test_an_overlapped_op_makes_gloo_give_way() -> None:
    for before, after, own in run_ranks(call_once, 2):
        assert before == {os.SCHED_OTHER}
        assert after == {os.SCHED_BATCH}
        assert own == os.SCHED_OTHER
