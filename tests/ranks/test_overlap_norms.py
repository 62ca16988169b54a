"""Sums over ranks with a residual and a norm: the bits of the separate ops, by every plan, and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import weft
from weft import overlap
from weft.kernels.norm import add_bias_residual_layernorm, rmsnorm
from weft.overlap import Op, OverlapPlan, Transport
from weft.overlap.blocks import Axis, chunk_bounds
from weft.overlap.executor.context import context_of

OPS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
SHAPES = ((1, 40, 24), (23, 96, 16), (300, 200, 32))


def inputs(op: Op, m: int, n: int, k: int, dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """x, w, and the residual and bias that go with this rank's rows; every rank has others."""
    own = torch.Generator().manual_seed(100 * m + group.rank())
    bounds = chunk_bounds(m, group.size())
    rows = m if op is Op.ALL_REDUCE else bounds[group.rank() + 1] - bounds[group.rank()]
    made = [torch.randn(shape, generator=own).to(dtype) for shape in ((m, k), (n, k), (rows, n))]
    return [*made, torch.linspace(-1, 1, n).to(dtype)]


def plans(op: Op, m: int, n: int, k: int, dtype: torch.dtype, hosts: tuple[int, ...]) -> list[OverlapPlan | None]:
    cuts = [(transport, axis, groups) for transport in Transport for axis in Axis for groups in ((), (1, 3, 2))]
    return [None, *(OverlapPlan(op, m, n, k, str(dtype)[6:], hosts, t, a, 8, 32, groups) for t, a, groups in cuts)]


def norms(n: int, dtype: torch.dtype) -> list[weft.RMSNorm | weft.LayerNorm]:
    weight, beta = torch.linspace(0.5, 2, n).to(dtype), torch.linspace(1, -1, n).to(dtype)
    return [weft.RMSNorm(weight, eps=1e-3), weft.RMSNorm(), weft.LayerNorm(weight, beta, eps=1e-3), weft.LayerNorm()]


def separate(
    y: torch.Tensor, norm: weft.RMSNorm | weft.LayerNorm, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(norm, weft.RMSNorm):
        return rmsnorm(y, norm.weight, residual=residual, eps=norm.eps)
    return add_bias_residual_layernorm(y, norm.weight, norm.bias, residual=residual, eps=norm.eps)


def same_bits() -> int:
    group, checked = dist.group.WORLD, 0
    hosts = context_of(group).hosts
    for dtype in (torch.float32, torch.bfloat16):
        for op in OPS:
            for m, n, k in SHAPES:
                x, w, residual, bias = inputs(op, m, n, k, dtype, group)
                call = getattr(overlap, op.value)
                y = call(x, w, group=group, bias=bias)
                for plan in plans(op, m, n, k, dtype, hosts):
                    for norm in norms(n, dtype):
                        for added in (residual, None):
                            got = call(x, w, group=group, bias=bias, plan=plan, residual=added, norm=norm)
                            out, total = separate(y, norm, added)
                            assert torch.equal(got.total, total), (str(plan), norm, "total")
                            assert torch.equal(got.out, out), (str(plan), norm, "out")
                            assert not got.out.is_inference()
                            checked += 1
    return checked


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_bits_of_the_separate_ops(ranks: int) -> None:
    assert run_ranks(same_bits, ranks, timeout=200.0) == [2 * 2 * 3 * 9 * 4 * 2] * ranks


def gradients() -> None:
    group = dist.group.WORLD
    for op in OPS:
        x, w, residual, bias = inputs(op, 24, 40, 16, torch.float32, group)
        if op is Op.ALL_REDUCE:  # the same on all ranks, as the gradient of the sum must be
            residual = torch.linspace(-2, 2, residual.numel()).view_as(residual)
        call = getattr(overlap, op.value)
        for norm in norms(40, torch.float32):
            results = []
            leaves = [t.requires_grad_() for t in (norm.weight, norm.beta) if t is not None]
            for fused in (True, False):
                given = [t.clone().requires_grad_() for t in (x, w, residual, bias)]
                for leaf in leaves:
                    leaf.grad = None
                if fused:
                    out, total = call(*given[:2], group=group, bias=given[3], residual=given[2], norm=norm)
                else:
                    out, total = separate(call(*given[:2], group=group, bias=given[3]), norm, given[2])
                (out.square().sum() + total.sin().sum()).backward()
                results.append([out, total, *(t.grad for t in (*given, *leaves))])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (op, norm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_the_separate_ops(ranks: int) -> None:
    run_ranks(gradients, ranks, timeout=100.0)


def refused() -> None:
    group = dist.group.WORLD
    x, w = torch.ones(8, 4), torch.ones(6, 4)
    for op, rows in ((overlap.matmul_all_reduce, 8), (overlap.matmul_reduce_scatter, 4)):
        long = torch.ones(3, 6)
        bad = [
            ({"residual": torch.ones(rows, 6)}, "residual= is added where norm= is taken"),
            ({"norm": torch.nn.RMSNorm(6)}, r"norm is a RMSNorm, expected norm=weft\.RMSNorm"),
            ({"norm": weft.RMSNorm(torch.ones(5))}, r"norm\.weight is torch\.float32 \[5\], expected .* \[6\]"),
            ({"norm": weft.LayerNorm(None, torch.ones(7))}, r"norm\.bias is .* \[7\]"),
            ({"norm": weft.RMSNorm(), "residual": long}, rf"residual is .* \[3, 6\], expected .* \[{rows}, 6\]"),
            ({"norm": weft.RMSNorm(), "residual": torch.ones(rows, 6).double()}, r"residual is torch\.float64"),
        ]
        for options, message in bad:
            with pytest.raises(ValueError, match=message):
                op(x, w, group=group, **options)
        assert op(x, w, group=group, norm=weft.RMSNorm()).total[0, 0] == 8.0


def test_what_is_no_norm_is_refused_before_anybody_waits() -> None:
    run_ranks(refused, 2)
