"""What `gpu_check.py` checks: every operation of weft, with its gradients, against plain torch in double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value


@dataclass(frozen=True)
class Place:
    """Where this rank computes, and with what sizes."""

    device: torch.device
    rank: int
    size: int
    interpreted: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16) if self.interpreted else (torch.float32, torch.bfloat16, torch.float16)

    def random(self, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device, dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Check:
    """One operation: what weft gave and what was expected, tensor by tensor."""

    name: str
    got: tuple[Tensor, ...]
    want: tuple[Tensor, ...]


def differentiated(function: Callable[..., Tensor], inputs: list[Tensor], *, double: bool) -> tuple[Tensor, ...]:
    """The output and the gradients of all inputs."""
    given = [(t.double() if double else t.clone()).requires_grad_() for t in inputs]
    y = function(*given)
    seed = ((torch.arange(y.numel(), device=y.device) % 17 - 8) / 8).view(y.shape).to(y.dtype)  # exact in any type
    return (y.detach(), *torch.autograd.grad(y, given, seed))


def kernels(place: Place, dtype: torch.dtype) -> Iterator[Check]:
    """Every operation of one rank, with its gradients."""
    import weft
    from weft import reference
    from weft.kernels import PackedWeight, linear
    from weft.kernels.dispatch import kernels_for
    from weft.kernels.norm import add_bias_residual_layernorm, gate, rmsnorm, rotary
    from weft.packed import PackedBatch

    m, k, n = (9, 20, 33) if place.interpreted else (515, 1024, 2080)
    heads, width, lengths = (2, 16, [3, 0, 14]) if place.interpreted else (8, 128, [100, 0, 700, 1, 333])

    def some(*shape: int, seed: int = 0) -> Tensor:
        return place.random(*shape, dtype=dtype, seed=seed)

    def both(name: str, ours: Callable[..., Tensor], twin: Callable[..., Tensor], *inputs: Tensor) -> Check:
        given = list(inputs)
        return Check(name, differentiated(ours, given, double=False), differentiated(twin, given, double=True))

    yield both(
        "linear, bias, gelu, residual",
        lambda x, w, b, r: linear(x, PackedWeight.from_dense(w), bias=b, activation="gelu", residual=r),
        lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
        some(m, k), some(n, k, seed=1) / k**0.5, some(n, seed=2), some(m, n, seed=3),
    )  # fmt: skip
    yield both(
        "bias, residual, layernorm",
        lambda x, r, b, w, beta: add_bias_residual_layernorm(x, w, beta, bias=b, residual=r).out,
        lambda x, r, b, w, beta: F.layer_norm(x + r + b, [n], w, beta, 1e-5),
        some(m, n), some(m, n, seed=1), some(n, seed=2), some(n, seed=3), some(n, seed=4),
    )  # fmt: skip
    yield both(
        "rmsnorm",
        lambda x, w: rmsnorm(x, w).out,
        lambda x, w: F.rms_norm(x, [n], w, 1e-6),
        some(m, n), some(n, seed=1),
    )  # fmt: skip
    yield both(
        "gate", lambda x: gate(x, activation="silu"), lambda x: F.silu(x[:, :n]) * x[:, n:], some(m, 2 * n)
    )  # fmt: skip
    batch = PackedBatch.from_list([torch.zeros(length, device=place.device) for length in lengths])
    tokens = sum(lengths)
    angles = place.random(tokens, width // 2, dtype=torch.float32, seed=7)
    positions = torch.arange(tokens, device=place.device).flip(0)

    def turned(x: Tensor) -> Tensor:
        c, s = (t[positions][:, None].to(x.dtype) for t in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, 2)
        return torch.cat([a * c - b * s, b * c + a * s], 2)

    yield both(
        "rotary", lambda x: rotary(x, angles.cos(), angles.sin(), positions, heads=heads), turned,
        some(tokens, heads, width),
    )  # fmt: skip
    for causal in (False, True):
        yield both(
            f"packed attention, causal={causal}",
            lambda q, k, v, causal=causal: weft.packed_attention(q, k, v, batch, causal=causal),
            lambda q, k, v, causal=causal: reference.packed_attention(q, k, v, batch, causal=causal),
            some(tokens, heads, width), *(some(tokens, heads // 2, width, seed=seed) for seed in (1, 2)),
        )  # fmt: skip
    padded, index = some(m, n), torch.randperm(m, generator=torch.Generator().manual_seed(1)).to(place.device)
    packed = torch.empty_like(padded)
    kernels_for(padded).gather([(padded, index)], out=packed)
    yield Check("pack", (packed,), (padded[index].double(),))


def overlaps(place: Place, group: dist.ProcessGroup, dtype: torch.dtype) -> Iterator[Check]:
    """The four ops, with their gradients, against their unoverlapped twins in double precision on the CPU."""
    from weft import overlap, reference

    m, n, k = (24, 40, 16) if place.interpreted else (1024, 2048, 512)
    rows, rank = m // place.size, place.rank
    shard, whole = (place.random(r, k, dtype=dtype, seed=rank) for r in (rows, m))
    w, bias = place.random(n, k, dtype=dtype, seed=100 + rank) / k**0.5, place.random(n, dtype=dtype, seed=7)
    towards = (torch.arange(m, device=place.device) * 7 + rank) % place.size
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "all_gather_matmul": (lambda f, x, w, b: f(x, w, group=group, bias=b), [shard, w, bias]),
        "matmul_reduce_scatter": (lambda f, x, w, b: f(x, w, group=group, bias=b), [whole, w, bias]),
        "matmul_all_reduce": (lambda f, x, w, b: f(x, w, group=group, bias=b), [whole, w, bias]),
        "matmul_all_to_all": (lambda f, x, w, b: f(x, w, towards.to(x.device), group=group, bias=b), [whole, w, bias]),
    }
    for name, (call, inputs) in calls.items():
        ours, twin = getattr(overlap, name), getattr(reference, name)
        got = differentiated(lambda *t, call=call, ours=ours: call(ours, *t), inputs, double=False)
        on_cpu = [t.cpu() for t in inputs]
        want = differentiated(lambda *t, call=call, twin=twin: call(twin, *t), on_cpu, double=True)
        yield Check(name, got, want)
    if not place.interpreted:
        yield captured(place, group, whole, w)


def captured(place: Place, group: dist.ProcessGroup, x: Tensor, w: Tensor) -> Check:
    """A call that was captured in a graph gives, when the graph runs again, what a plain call gives."""
    from weft import overlap

    with torch.no_grad():
        fixed = x.clone()
        overlap.matmul_reduce_scatter(fixed, w, group=group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that asks for events
            y = overlap.matmul_reduce_scatter(fixed, w, group=group)
        fixed.copy_(x * 2)
        graph.replay()
        place.synchronize()
        return Check("captured in a graph", (y.clone(),), (overlap.matmul_reduce_scatter(x * 2, w, group=group),))


def judged(check: Check, dtype: torch.dtype) -> dict[str, Any]:
    """The largest error of all ranks, as a part of the largest value."""
    worst = torch.zeros(1, dtype=torch.float64)
    for got, want in zip(check.got, check.want, strict=True):
        if want.numel():
            exact = want.cpu().double()
            error = (got.cpu().double() - exact).abs().max() / exact.abs().max().clamp(min=1e-6)
            worst = torch.maximum(worst, torch.nan_to_num(error, nan=torch.inf))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    limit = LIMITS[dtype] * (2 if len(check.got) > 1 else 1)  # gradients add up more
    name = str(dtype).removeprefix("torch.")
    return {"check": check.name, "dtype": name, "error": float(worst), "limit": limit, "right": float(worst) <= limit}
