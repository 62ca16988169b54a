"""Ranks of one machine that cannot share memory: they send messages instead, and the plan says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import weft
from weft.comm import Group, Window
from weft.errors import WindowUnavailable
from weft.overlap import Op, OverlapPlan

M, N, K = 48, 40, 24

PROGRAM = """
import sys, torch, torch.distributed as dist, weft
from weft.comm import Group
from weft.layout import Layout, Mesh
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
own = torch.Generator().manual_seed(rank)
x, w = torch.randn(48, 24, generator=own), torch.randn(40, 24, generator=own)
want = x @ w.t()
dist.all_reduce(want)
y = weft.matmul_all_reduce(x, w, group=dist.group.WORLD)
assert torch.allclose(y, want, atol=1e-4)
plan = weft.plan_overlap("matmul_all_reduce", 48, 40, 24, group=dist.group.WORLD)
mesh = DeviceMesh("cpu", [0, 1])
whole = torch.arange(24.0).reshape(6, 4)
moved = weft.reshard(distribute_tensor(whole, mesh, [Shard(0)]), mesh, [Replicate()])
assert torch.equal(moved.to_local(), whole)
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
prompts = [[1, 5, 9], [1, 7]]
alone = weft.generate(weft.pack(model), prompts, max_new_tokens=4)
assert weft.generate(weft.parallelize(model, mesh), prompts, max_new_tokens=4) == alone
print(Group(dist.group.WORLD, timeout=60).hosts, plan.reason)
dist.barrier()
"""


def test_containers_that_share_only_the_network(tmp_path: Path) -> None:
    """The second rank has a PID namespace and a /proc of its own, as a container with host networking has."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces cannot be made here; run as root")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*command, "0"], **pipe), subprocess.Popen([*apart, *command, "1"], **pipe)]
    try:
        outputs = [rank.communicate(timeout=150.0) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (said, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
        assert said.startswith("(0, 1)")
        assert "ranks 0, 1 share a network card but not memory" in said


def deny_memory() -> None:
    """Rank 1 may not look at other processes, though nothing tells beforehand."""
    real = os.readlink

    def readlink(path: str, *rest: object) -> str:
        if str(path).startswith("/proc/") and "/fd/" in str(path) and dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest)

    os.readlink = readlink


def by_messages() -> list[str]:
    deny_memory()
    group = dist.group.WORLD
    with pytest.raises(WindowUnavailable, match=r"on rank 1: .*Permission denied"):
        Window.create(group, 4096, timeout=30.0)
    own = torch.Generator().manual_seed(dist.get_rank())
    x, w = torch.randn(M, K, generator=own), torch.randn(N, K, generator=own)
    want = x @ w.t()
    dist.all_reduce(want)
    given = OverlapPlan(Op.ALL_REDUCE, M, N, K, "float32", (0, 0, 0), tile_m=16, groups=(1, 1))
    for plan in (None, given, str(given)):
        assert torch.allclose(weft.matmul_all_reduce(x, w, group=group, plan=plan), want, atol=1e-4)
    gathered = weft.all_gather_matmul(x[: M // 3], w, group=group)
    parts = [torch.empty(M // 3, K) for _ in range(3)]
    dist.all_gather(parts, x[: M // 3].clone())
    assert torch.allclose(gathered, torch.cat(parts) @ w.t(), atol=1e-4)
    assert Group(group, timeout=30.0).hosts == (0, 0, 0)
    with weft.trace() as trace:
        weft.matmul_all_reduce(x, w, group=group, plan=given)
    return [str(weft.plan_overlap("matmul_all_reduce", M, N, K, group=group)), trace.calls[0].plan]


def test_memory_that_cannot_be_mapped_after_all() -> None:
    for predicted, followed in run_ranks(by_messages, 3, timeout=60.0):
        assert "Permission denied" in predicted
        assert "transport=messages" in followed
        assert "Permission denied" in followed


def cut_a_window() -> None:
    window = Window.create(dist.group.WORLD, 1 << 16, timeout=30.0)
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weft-window" in line]
    where = Path("/proc/self/map_files", line.split()[0])
    try:
        memory = os.open(where, os.O_RDWR)
    except PermissionError:
        return  # who may not look, may not cut either
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    os.close(memory)
    window.local.fill_(1)


def test_nobody_can_cut_a_window() -> None:
    run_ranks(cut_a_window, 2)
