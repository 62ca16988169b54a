"""What the overlapped ops cannot take is refused by name, before any rank waits; and a good call works after it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.func import jacfwd, jvp, linearize, vmap

from weft import overlap
from weft.kernels import PackedWeight
from weft.overlap.api import replicated_matmul

M, N, K = 8, 12, 16
OPS = {
    "all_gather_matmul": ("x_shard", "w"),
    "matmul_reduce_scatter": ("x", "w_shard"),
    "matmul_all_reduce": ("x", "w_shard"),
    "matmul_all_to_all": ("x", "w"),
    "replicated_matmul": ("x", "w"),
}
TO = torch.arange(M) % 2


def call(op: str, x: Any, w: Any, bias: Any = None, to: Any = TO) -> torch.Tensor:
    run = replicated_matmul if op == "replicated_matmul" else getattr(overlap, op)
    return run(x, w, *((to,) if op == "matmul_all_to_all" else ()), group=dist.group.WORLD, bias=bias)


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on all ranks."""
    own = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=own) for shape in ((M, K), (N, K), (N,)))  # type: ignore[return-value]


def check_right(op: str, seed: int) -> None:
    """A good call, and a collective of torch, on the same group."""
    x, w, bias = inputs(seed)
    y = torch.nn.functional.linear(x, w)
    rows = slice(dist.get_rank() * M // 2, (dist.get_rank() + 1) * M // 2)
    want = {
        "all_gather_matmul": torch.cat([y, y]) + bias,
        "matmul_reduce_scatter": 2 * y[rows] + bias,
        "matmul_all_reduce": 2 * y + bias,
        "matmul_all_to_all": torch.cat([y[dist.get_rank() :: 2]] * 2) + bias,
        "replicated_matmul": y + bias,
    }
    torch.testing.assert_close(call(op, x, w, bias), want[op])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


# Tensors ----------------------------------------------------------------------------------------------------


def strange(t: torch.Tensor) -> dict[str, tuple[Any, str]]:
    """What may be handed over in place of a good tensor, and what the error says of it."""
    mesh = init_device_mesh("cpu", (2,))
    quantised = torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)
    return {
        "meta": (t.to("meta"), "is on the meta device, expected"),
        "sparse": (t.to_sparse(), r"is torch.sparse_coo, expected.*to_dense\(\)"),
        "nested": (torch.nested.nested_tensor([t, t]), "is a nested tensor"),
        "jagged": (torch.nested.nested_tensor([t, t], layout=torch.jagged), "is a nested tensor"),
        "quantised": (quantised, r"is quantised, expected.*dequantize\(\)"),
        "dtensor": (distribute_tensor(t, mesh, [Replicate()]), r"is a DTensor, expected.*to_local\(\)"),
        "numpy": (t.numpy(), "is a ndarray"),
        "list": (t.tolist(), "is a list"),
        "number": (3.0, "is a float"),
        "type": (t.long(), "torch.int64"),
        "shape": (t[:-1, :-1] if t.dim() == 2 else t[:-1], "expected"),
    }


def attempt(op: str, which: str, what: Any, text: str) -> None:
    given = dict(zip(("x", "w", "bias"), inputs(0), strict=True))
    given[which] = what
    name = dict(zip(("x", "w"), OPS[op], strict=True)).get(which, which)
    expected = text if text in ("expected", "torch.int64") else rf"{name} {text}"
    for grad in (False, True):
        for tensor in given.values():
            if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.is_floating_point():
                tensor.requires_grad_(grad)
        with pytest.raises(ValueError, match=expected):
            call(op, given["x"], given["w"], given["bias"])
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=expected):
            call(op, given["x"], given["w"], given["bias"])


def refused_tensors(op: str) -> None:
    x, w, bias = inputs(0)
    cases = [(which, *case) for which, t in (("x", x), ("w", w), ("bias", bias)) for case in strange(t).values()]
    cases += [("x", None, "is None"), ("w", None, "is None")]
    order = random.Random(dist.get_rank())  # a rank that is refused tells nobody: others may be refused otherwise
    for seed, case in enumerate(order.sample(cases, len(cases))):
        attempt(op, *case)
        check_right(op, seed)


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_dense_tensor_is_refused_and_the_next_call_is_right(op: str) -> None:
    run_ranks(refused_tensors, 2, op, timeout=120.0)


def refused_destinations() -> None:
    x, w, _ = inputs(0)
    for to, text in (
        (TO.tolist(), "destinations is a list"),
        (TO.numpy(), "destinations is a ndarray"),
        (None, "destinations is None"),
        (TO.to("meta"), "destinations is on the meta device"),
        (TO.int(), r"destinations is torch\.int32"),
        (TO + 1, "destinations are 1 to 2"),
    ):
        with pytest.raises(ValueError, match=text):
            call("matmul_all_to_all", x, w, to=to)
        check_right("matmul_all_to_all", 1)
    packed = PackedWeight.from_dense(w)
    elsewhere = PackedWeight(packed.data.to("meta"), packed.n, packed.k, packed.isa)
    for op in OPS:
        with pytest.raises(ValueError, match=rf"{OPS[op][1]}\.data is on the meta device"):
            call(op, x, elsewhere)
        check_right(op, 2)


def test_destinations_and_packed_weights_are_looked_at_too() -> None:
    run_ranks(refused_destinations, 2, timeout=60.0)


def zeros_without_memory(op: str) -> None:
    x, w, bias = inputs(0)
    for grad in (False, True):
        for which in range(3):
            given = [t.clone().requires_grad_(grad) for t in (x, w, bias)]
            given[which] = torch._efficientzerotensor(*given[which].shape)
            plain = [t.detach().clone().requires_grad_(grad) for t in given]
            y, want = call(op, *given), call(op, *plain)
            assert torch.equal(y, want)
            if grad:
                for result in (y, want):
                    result.square().sum().backward()
                for i, (ours, other) in enumerate(zip(given, plain, strict=True)):
                    assert i == which or torch.equal(ours.grad, other.grad)
    y = call(op, *plain)
    y.backward(torch._efficientzerotensor(*y.shape))


@pytest.mark.parametrize("op", OPS)
def test_zeros_without_memory_are_zeros(op: str) -> None:
    run_ranks(zeros_without_memory, 2, op, timeout=60.0)


def pending() -> None:
    """The result of a functional collective that is still on its way is a tensor like any other."""
    x, w, bias = inputs(0)
    rows = all_gather_tensor(x.chunk(2)[dist.get_rank()], 0, dist.group.WORLD)
    torch.testing.assert_close(call("matmul_all_reduce", rows, w, bias), 2 * x @ w.t() + bias)


def test_a_tensor_that_is_on_its_way_is_taken() -> None:
    run_ranks(pending, 2, timeout=60.0)


# Forward-mode differentiation -------------------------------------------------------------------------------


def dual(f: Callable[..., torch.Tensor], t: torch.Tensor, *, grad: bool) -> torch.Tensor:
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        return f(forward_ad.make_dual(t.clone().requires_grad_(grad), torch.ones_like(t)))


def dual_gradient(f: Callable[..., torch.Tensor], t: torch.Tensor) -> torch.Tensor:
    """The tangent comes in with the gradient: forward over reverse."""
    t = t.clone().requires_grad_()
    with forward_ad.dual_level():
        y = f(t)
        scale = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        return torch.autograd.grad((y * scale).sum(), t)[0]


def ways(f: Callable[..., torch.Tensor], t: torch.Tensor) -> dict[str, Callable[[], Any]]:
    one = torch.ones_like(t)
    compiled = torch.compile(f, backend="aot_eager")
    inner = lambda a: jvp(lambda b: b.sum() * f(a), (t,), (one,))[0]  # noqa: E731
    return {
        "jvp": lambda: jvp(f, (t,), (one,)),
        "jacfwd": lambda: jacfwd(f)(t),
        "linearize": lambda: linearize(f, t),
        "jvp of vmap": lambda: jvp(vmap(f), (t[None],), (one[None],)),
        "vmap of jvp": lambda: vmap(lambda a: jvp(f, (a,), (one,))[1])(t[None]),
        "jvp of jvp": lambda: jvp(inner, (t,), (one,)),
        "dual": lambda: dual(f, t, grad=False),
        "dual, grad": lambda: dual(f, t, grad=True),
        "dual gradient": lambda: dual_gradient(f, t),
        "jvp of compiled": lambda: jvp(compiled, (t,), (one,)),
        "compiled jvp": lambda: torch.compile(lambda a: jvp(f, (a,), (one,))[1], backend="aot_eager")(t),
        "compiled dual": lambda: dual(compiled, t, grad=False),
    }


def forward_mode(op: str) -> None:
    given = inputs(0)
    for which, name in enumerate(("x", "weight", "bias")):

        def run(t: torch.Tensor, at: int = which) -> torch.Tensor:
            return call(op, *given[:at], t, *given[at + 1 :])

        for way, attempted in ways(run, given[which]).items():
            torch._dynamo.reset()
            what = f"dy of {op}'s backward" if way == "dual gradient" else f"{name} of {op}"
            text = f"{re.escape(what)} has a tangent.*no forward-mode derivative"
            with pytest.raises(Exception, match=text) as error:  # the compiler wraps it in an error of its own
                attempted()
            assert isinstance(error.value, NotImplementedError) or "compiled" in way, way
            assert forward_ad._current_level == -1, way
        check_right(op, which)
    x, w, bias = given
    y, tangent = jvp(lambda t: t.sum() * call(op, t.detach(), w, bias), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, call(op, x, w, bias) * x.numel())  # a constant has no derivative
    torch.testing.assert_close(y, call(op, x, w, bias) * x.sum())


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused_wherever_the_tangent_is(op: str) -> None:
    run_ranks(forward_mode, 2, op, timeout=150.0)
