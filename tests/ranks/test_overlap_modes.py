"""The overlapped ops under what else torch can be in: autocast, dispatch modes, transforms, tracing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from overlap_cases import close
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft import overlap, reference
from weft.kernels import PackedWeight

M, N, K = 16, 12, 8
OPS = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"]


class Inputs:
    """Of one op, different on each rank."""

    def __init__(self, op: str, *, batch: int = 3) -> None:
        own = torch.Generator().manual_seed(7 + dist.get_rank())
        shared = torch.Generator().manual_seed(99)
        self.op = op
        rows = M // dist.get_world_size() if op == "all_gather_matmul" else M
        self.x = torch.randn(batch, rows, K, generator=own)
        self.w = torch.randn(N, K, generator=own)
        self.bias = torch.randn(N, generator=shared)
        self.to = (torch.randint(0, dist.get_world_size(), (M,), generator=own),) if op == "matmul_all_to_all" else ()

    def call(
        self, x: torch.Tensor, w: object = None, bias: torch.Tensor | None = None, *, module: object = overlap
    ) -> torch.Tensor:
        weight, bias = self.w if w is None else w, self.bias if bias is None else bias
        return getattr(module, self.op)(x, weight, *self.to, group=dist.group.WORLD, bias=bias)


class Log(TorchDispatchMode):
    """Which ops the dispatcher has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def modes(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        for op in OPS:
            given = Inputs(op)
            want = [given.call(x) for x in given.x]
            with Log() as log:
                assert torch.equal(given.call(given.x[0]), want[0])
            assert any(name.startswith("weft.") for name in log.seen), (op, log.seen)
            with FlopCounterMode(display=False) as counter:
                given.call(given.x[0])
            assert counter.get_total_flops() == 2 * M * N * K, op
            # To all: one rank gets more rows than another, and they would be stacked.
            if op != "matmul_all_to_all":
                assert torch.equal(torch.func.vmap(given.call)(given.x), torch.stack(want)), op
            traced = torch.jit.trace(given.call, (given.x[0],), check_trace=False)
            assert torch.equal(traced(given.x[1]), want[1]), op
            assert torch.equal(given.call(given.x[2]), want[2]), "and the group is as good as before"


@pytest.mark.parametrize("grad", [False, True])
def test_modes_see_the_ops_and_transforms_work(grad: bool) -> None:
    run_ranks(modes, 2, grad, timeout=100.0)


def gradients() -> None:
    """Backward passes are counted too."""
    for op in OPS:
        given = Inputs(op)
        x, w = given.x[0].clone().requires_grad_(), given.w.clone().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            given.call(x, w).sum().backward()
        assert counter.get_total_flops() == 3 * 2 * M * N * K, op
        # torch's custom ops know no torch.func.grad: it says so, before any rank waits for another.
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda t, g=given: g.call(t).sum())(given.x[0])
        assert torch.equal(given.call(x, w).detach(), given.call(given.x[0]))


def test_gradients_are_counted() -> None:
    run_ranks(gradients, 2, timeout=100.0)


def autocast(backward_inside: bool) -> None:
    for op in OPS:
        given = Inputs(op)
        found = []
        for module in (overlap, reference):
            x, w = given.x[0].clone().requires_grad_(), given.w.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if module is reference:
                    y = given.call(x.bfloat16(), w.bfloat16(), given.bias.bfloat16(), module=reference)
                else:
                    y = given.call(x, w)
                assert y.dtype == torch.bfloat16, op
                if backward_inside:
                    y.float().square().sum().backward()
            if not backward_inside:
                y.float().square().sum().backward()
            assert x.grad.dtype == w.grad.dtype == torch.float32
            found.append((y.detach(), x.grad.bfloat16(), w.grad.bfloat16()))
        for got, want in zip(*found, strict=True):
            assert close(got, want), op
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for weight in (
                given.w.bfloat16(),
                PackedWeight.from_dense(given.w),
                PackedWeight.from_dense(given.w.bfloat16()),
            ):
                assert torch.equal(given.call(given.x[0], weight), found[0][0]), op
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ValueError, match=r"float16.*expected float32"):
            given.call(given.x[0])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            assert given.call(given.x[0], given.w.bfloat16().float()).dtype == torch.float32


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_chooses_the_type_as_it_does_for_linear(backward_inside: bool) -> None:
    run_ranks(autocast, 2, backward_inside, timeout=100.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(K, 2 * N), nn.Linear(2 * N, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def styles_under_autocast(compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    ours, theirs = Block(), Block()
    plan = {
        "up": weft.ColwiseOverlap(input_layouts=Replicate()),
        "down": weft.RowwiseOverlap(output_layouts=Replicate()),
    }
    parallelize_module(ours, mesh, plan)
    parallelize_module(theirs, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = torch.compile(ours, backend="aot_eager") if compiled else ours
    x = torch.randn(2, M, K, generator=torch.Generator().manual_seed(3))
    results = []
    for module, call in ((ours, run), (theirs, theirs)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(x)
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        results.append([y.detach(), *(p.grad.full_tensor() for p in module.parameters())])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert close(got.bfloat16(), want.bfloat16())


@pytest.mark.parametrize("compiled", [False, True])
def test_styles_work_under_autocast(compiled: bool) -> None:
    run_ranks(styles_under_autocast, 2, compiled, timeout=150.0)
