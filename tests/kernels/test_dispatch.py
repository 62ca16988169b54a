"""The table of implementations: what is in it, what is not, and what it says then."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import weft
from weft.kernels import PackedWeight, cpu, cpu_attention, dispatch, linear
from weft.kernels.dispatch import NATIVE, Kernels, dtypes_on, is_supported, kernels_for, routed
from weft.kernels.norm import gate, rmsnorm


def on_gpu(dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty(2, 4, device="cuda", dtype=dtype)


def test_the_cpu_is_the_native_core():
    kernels = kernels_for(torch.zeros(1))
    assert kernels.name == NATIVE
    assert (kernels.linear, kernels.norm, kernels.attention) == (cpu.linear, cpu.norm, cpu_attention.attention)
    assert kernels is kernels_for(torch.zeros(1, dtype=torch.bfloat16))
    assert kernels.packed_elements(5, 7, cpu.FASTEST) == PackedWeight.from_dense(torch.zeros(5, 7)).data.numel()


def test_a_gpu_is_triton():
    triton = pytest.importorskip("weft.kernels.triton")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kernels = kernels_for(on_gpu(dtype))
        assert kernels.name == "triton"
        assert all(getattr(triton, f.name) is getattr(kernels, f.name) for f in fields(Kernels)[5:])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1, dtype=torch.float16), "float32 and bfloat16 on cpu, got torch.float16; convert with .float"),
        (torch.zeros(1, device="meta"), "weft has kernels for cpu and cuda, got a tensor on meta; move it with"),
        (on_gpu(torch.float64), "float32 and bfloat16 and float16 on cuda, got torch.float64"),
    ],
)
def test_what_is_not_in_the_table(tensor, message):
    with pytest.raises(ValueError, match=message):
        kernels_for(tensor)
    assert not is_supported(tensor.device.type, tensor.dtype)


def test_a_route_ends_with_its_block():
    x, weight = torch.ones(2, 3), PackedWeight.from_dense(torch.ones(4, 3))
    with pytest.raises(ValueError, match="expected one of native, triton"), routed("cpu", "magic"):
        pass
    with routed("meta", NATIVE):
        assert is_supported("meta", torch.bfloat16)
        assert dtypes_on("meta") == "float32 or bfloat16"
    assert not is_supported("meta", torch.bfloat16)
    assert torch.equal(linear(x, weight), torch.full((2, 4), 3.0))
    assert dispatch.kernels_for(x).name == NATIVE


def test_without_triton_a_gpu_tensor_says_what_to_install():
    code = """
import sys
sys.modules["triton"] = None
import torch
from torch._subclasses import FakeTensorMode
from weft.kernels.dispatch import kernels_for
with FakeTensorMode():
    x = torch.empty(2, device="cuda")
try:
    kernels_for(x)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install triton" in done.stdout, done.stderr


def test_a_weight_packed_in_a_compiled_function():
    """In a process of its own, where no implementation was loaded before."""
    code = """
import torch
from weft.kernels import PackedWeight, linear
compiled = torch.compile(lambda x, w: linear(x, PackedWeight.from_dense(w)), fullgraph=True, backend="aot_eager")
x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
y = compiled(x, w)
y.sum().backward()
print(torch.allclose(y, x @ w.t(), atol=1e-5), torch.allclose(x.grad, w.sum(0).expand(3, 4), atol=1e-5))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout == "True True\n", done.stderr


def test_nothing_above_the_table_asks_for_a_device():
    """overlap and packed leave it to the table; streams/ is the executor of one implementation."""
    root = Path(weft.__file__).parent
    rooms = ("overlap/**/*.py", "models/**/*.py", "transformer/*.py", "packed/**/*.py")
    files = [f for room in rooms for f in root.glob(room) if f.parent.name != "streams"]
    assert len(files) > 30
    assert [f.name for f in files if "cuda" in f.read_text(encoding="utf-8")] == []


def _linear(x: torch.Tensor) -> torch.Tensor:
    return weft.linear(x, weft.PackedWeight.from_dense(torch.ones(5, 8)))


def _packed_here(x: torch.Tensor) -> torch.Tensor:
    return weft.linear(torch.ones(3, 8), weft.PackedWeight.from_dense(x))


def _attended(x: torch.Tensor) -> torch.Tensor:
    q = x.view(3, 2, 4)
    return weft.packed_attention(q, q, q, weft.PackedBatch.from_list([torch.zeros(3)]))


@pytest.mark.parametrize("op", [_linear, _packed_here, _attended, lambda x: rmsnorm(x, None).out,
                                lambda x: gate(x, activation="silu")])  # fmt: skip
def test_forward_mode_is_refused_by_name(op: Any) -> None:
    """torch gives ops that know no tangents zeros for them, without a word."""
    x = torch.randn(3, 8)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(op, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        op(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    constant = torch.func.jvp(lambda t: op(x) * 0 + t.sum(), (x,), (torch.ones_like(x),))
    assert torch.equal(constant[1], torch.full_like(constant[1], 24.0))
