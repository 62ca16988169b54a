"""Overlapped matmuls never use old weights: with every optimiser, under FSDP2, and after writes that nobody counts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import weft
from weft.overlap import ColwiseOverlap, RowwiseOverlap

WIDTH = 32


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def overlapped() -> dict:
    return {"up": ColwiseOverlap(input_layouts=Replicate()), "down": RowwiseOverlap(output_layouts=Replicate())}


def parallelize(module: nn.Module, mesh: DeviceMesh, styles: dict) -> None:
    weft.parallelize(module, mesh, plan=styles)


def of_torch() -> dict:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def optimiser_of(kind: str, parameters) -> torch.optim.Optimizer:
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}[kind]
    return torch.optim.AdamW(parameters, lr=0.1, **options)


def losses(module: nn.Module, kind: str, *, steps: int, seed: int) -> list[float]:
    """Each step: the loss that it trains with, and one without gradients after it."""
    torch.manual_seed(seed)
    optimiser, found = optimiser_of(kind, module.parameters()), []
    for _ in range(steps):
        x, target = torch.randn(2, 6, WIDTH), torch.randn(2, 6, WIDTH)
        optimiser.zero_grad()
        loss = F.mse_loss(module(x), target)
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            found += [loss.item(), F.mse_loss(module(x), target).item()]
    return found


def train_under_fsdp(kind: str, size: int, shards: int) -> None:
    mesh = init_device_mesh("cpu", (shards, size), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    start = nn.Sequential(Mlp(), Mlp())
    results = []
    for share, styles in ((parallelize_module, of_torch()), (parallelize, overlapped())):
        model = copy.deepcopy(start)
        for mlp in model:
            share(mlp, mesh["tensor"], styles)
            if shards > 1:
                fully_shard(mlp, mesh=mesh["data"])
        if shards > 1:
            fully_shard(model, mesh=mesh["data"])
        results.append(losses(model, kind, steps=3, seed=1 + mesh.get_local_rank("data")))
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["loop", "foreach", "fused"])
def test_styles_under_fsdp_train_as_those_of_torch_do(kind: str) -> None:
    run_ranks(train_under_fsdp, 4, kind, 2, 2)


def every_optimiser() -> None:
    for kind in ("loop", "foreach", "fused"):
        train_under_fsdp(kind, 2, 1)


def test_styles_see_what_every_optimiser_does() -> None:
    run_ranks(every_optimiser, 2)


def fill(w: nn.Parameter) -> None:
    with torch.autograd._unsafe_preserve_version_counter(w), torch.no_grad():
        w.copy_(torch.randn_like(w))


def step(w: nn.Parameter, **options) -> None:
    w.grad = torch.randn_like(w)
    torch.optim.AdamW([w], lr=0.1, **options).step()


CHANGES = {
    "in place": lambda w: w.detach().mul_(2),
    "fused": lambda w: step(w, fused=True),
    "foreach": lambda w: step(w, foreach=True),
    "data": lambda w: w.data.mul_(2),
    "fill": fill,
}
OPS = {
    "all_gather_matmul": lambda x, w, group: weft.all_gather_matmul(x, w, group=group),
    "matmul_reduce_scatter": lambda x, w, group: weft.matmul_reduce_scatter(x, w, group=group),
    "matmul_all_reduce": lambda x, w, group: weft.matmul_all_reduce(x, w, group=group),
    "matmul_all_to_all": lambda x, w, group: weft.matmul_all_to_all(x, w, torch.arange(len(x)) % 2, group=group),
}


def change_plain_weights() -> None:
    group = dist.group.WORLD
    for name, op in OPS.items():
        for how, change in CHANGES.items():
            torch.manual_seed(dist.get_rank())
            w, x = nn.Parameter(torch.randn(24, 16)), torch.randn(8, 16)
            for grad in (True, False, True, False):
                with torch.set_grad_enabled(grad):
                    got, want = op(x, w, group), op(x, w.detach().clone(), group)
                assert torch.equal(got, want), (name, how, grad)
                if grad:
                    x_grad = x.clone().requires_grad_()
                    op(x_grad, w, group).square().sum().backward()
                    x_want = x.clone().requires_grad_()
                    op(x_want, w.detach().clone(), group).square().sum().backward()
                    assert torch.equal(x_grad.grad, x_want.grad), (name, how)
                change(w)


def test_ops_see_every_change_of_a_plain_weight() -> None:
    run_ranks(change_plain_weights, 2)


def draw_beside_calls() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(8, 16), torch.randn(24, 16)
    before = torch.get_rng_state()
    weft.matmul_all_reduce(x, w, group=dist.group.WORLD)  # the first call measures the machine
    weft.overlap.tune(weft.overlap.Shape(weft.overlap.Op.ALL_REDUCE, 8, 24, 16), group=dist.group.WORLD, rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_leaves_the_callers_random_numbers_alone() -> None:
    run_ranks(draw_beside_calls, 2)
