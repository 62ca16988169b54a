"""ROCm calls its devices cuda: kernels come out, but a wait, which is PTX, is left out. So it is refused by name."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="the GPU kernels need Triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from weft.kernels import triton as kernels
from weft.kernels.triton.compile import variants
from weft.overlap.streams.device import device_of

WAIT = next(v for v in variants() if v.kernel == "wait")
MI300 = GPUTarget("hip", "gfx942", 64)


class OnePretended:
    """A driver of a GPU that is not here, as far as a compilation asks for one."""

    def __init__(self, target):
        self._target = target

    def get_current_target(self):
        return self._target


def compiled(target):
    source = ASTSource(WAIT.function, WAIT.signature, constexprs=WAIT.constants)
    return triton.compile(source, target=target, options={"num_warps": 1})


def test_a_wait_does_not_compile_for_amd(monkeypatch):
    monkeypatch.setattr(driver, "_active", OnePretended(MI300))
    with pytest.raises(CompilationError) as refused:
        compiled(MI300)
    assert "a wait is written in PTX" in str(refused.value.__cause__)  # Triton's chain: the call, then what it called


def test_it_does_where_the_gpu_is_nvidias(monkeypatch):
    here = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", OnePretended(here))
    assert "ld.acquire.sys.global.s32" in compiled(here).asm["ptx"]


@pytest.fixture
def on_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    with FakeTensorMode():
        yield lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, device="cuda", dtype=dtype)


REFUSED = r"got a torch built for ROCm 6\.4\.0, expected one built for CUDA.*\.cpu\(\)"


@pytest.mark.parametrize(
    "call",
    [
        lambda new: kernels.linear(new(4, 32), new(128), 4, out=new(4, 4)),
        lambda new: kernels.wait(new(1, dtype=torch.int32), new(1, dtype=torch.int32)),
        lambda new: kernels.sum_in_order(new(2, 2, 32), out=new(2, 32)),
        lambda new: kernels.gate(new(4, 32), activation="silu", out=new(4, 16)),
        lambda new: device_of(new(4), kernels.Late(new(1, dtype=torch.int32))),
    ],
    ids=["linear", "wait", "sum_in_order", "gate", "device_of"],
)
def test_tensors_of_rocm_are_refused_by_name(on_rocm, call):
    with pytest.raises(ValueError, match=REFUSED):
        call(on_rocm)
