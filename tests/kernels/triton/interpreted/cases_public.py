"""The public functions with the Triton implementation in the table: values and gradients against plain torch."""

import sys
from pathlib import Path

import pytest
import torch
from launched import all_compiled
from torch.nn import functional as F

import weft
from weft import reference
from weft.kernels import PackedWeight, linear
from weft.kernels.dispatch import TRITON, kernels_for, routed
from weft.kernels.norm import add_bias_residual_layernorm, gate, rmsnorm, rotary
from weft.packed import PackedBatch

sys.path.append(str(Path(__file__).parents[3] / "unit"))
import packed_models

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@pytest.fixture(autouse=True)
def _by_triton():
    with routed("cpu", TRITON), all_compiled():
        assert kernels_for(torch.zeros(1)).name == TRITON
        yield


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(ours, twin, *inputs):
    """The output and the gradients of all inputs; the twin computes in double precision."""
    mine = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    got, want = ours(*mine), twin(*exact)
    dy = random(*want.shape, seed=99, dtype=got.dtype)
    gradients = torch.autograd.grad(got, mine, dy), torch.autograd.grad(want, exact, dy.double())
    limit = TOLERANCE[got.dtype]
    for g, w in zip([got, *gradients[0]], [want, *gradients[1]], strict=True):
        torch.testing.assert_close(g.double(), w, atol=limit, rtol=limit)


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_linear(activation, dtype):
    act = {None: lambda z: z, "gelu": F.gelu, "silu": F.silu}[activation]
    inputs = random(9, 20, dtype=dtype), random(33, 20, seed=1, dtype=dtype) / 4, random(33, seed=2, dtype=dtype)
    both(
        lambda x, w, b, r: linear(x, PackedWeight.from_dense(w), bias=b, activation=activation, residual=r),
        lambda x, w, b, r: act(F.linear(x, w, b)) + r,
        *inputs, random(9, 33, seed=3, dtype=dtype),
    )  # fmt: skip


def test_a_packed_weight():
    w = random(33, 20)
    packed = PackedWeight.from_dense(w)
    assert packed.isa == "rows"
    assert torch.equal(packed.to_dense(), w)
    assert torch.equal(PackedWeight.from_dense(w.t()).to_dense(), w.t())
    x = random(2, 3, 20)
    torch.testing.assert_close(linear(x, packed), F.linear(x, w), atol=2e-5, rtol=2e-5)
    out = torch.empty(2, 3, 33)
    assert linear(x, packed, out=out) is out
    assert torch.equal(out, linear(x, packed))


def test_a_weight_packed_for_the_cpu_is_refused():
    with pytest.raises(ValueError, match="pack it again on the GPU"):
        PackedWeight.from_dense(random(4, 4), isa="avx2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms(dtype):
    x, residual = random(7, 40, dtype=dtype), random(7, 40, seed=1, dtype=dtype)
    bias, weight, beta = (random(40, seed=s, dtype=dtype) for s in (2, 3, 4))
    both(
        lambda x, r, b, w, beta: add_bias_residual_layernorm(x, w, beta, bias=b, residual=r).out,
        lambda x, r, b, w, beta: F.layer_norm(x + r + b, [40], w, beta, 1e-5),
        x, residual, bias, weight, beta,
    )  # fmt: skip
    both(
        lambda x, r, w: rmsnorm(x, w, residual=r).out,
        lambda x, r, w: F.rms_norm(x + r, [40], w, 1e-6),
        x, residual, weight,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rotary_and_gate(dtype):
    angles = random(12, 8, seed=1)
    cos, sin, positions = angles.cos(), angles.sin(), torch.tensor([3, 0, 11, 5])

    def turned(x):
        a, b = x[:, :2].chunk(2, 2)
        c, s = (t[positions].to(x.dtype)[:, None] for t in (cos, sin))
        return torch.cat([torch.cat([a * c - b * s, b * c + a * s], 2), x[:, 2:]], 1)

    both(lambda x: rotary(x, cos, sin, positions, heads=2), turned, random(4, 3, 16, dtype=dtype))
    both(
        lambda x: gate(x, activation="silu"),
        lambda x: F.silu(x[:, :10]) * x[:, 10:],
        random(5, 20, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_packed_attention(dtype):
    batch = PackedBatch.from_list([torch.zeros(n) for n in (5, 1, 19)])
    both(
        lambda q, k, v: weft.packed_attention(q, k, v, batch, causal=True),
        lambda q, k, v: reference.packed_attention(q, k, v, batch, causal=True),
        random(25, 4, 16, dtype=dtype), random(25, 2, 16, seed=1, dtype=dtype), random(25, 2, 16, seed=2, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_a_whole_model(family, monkeypatch):
    """Inference and training of a packed model, neither by the program of native calls."""
    monkeypatch.setattr("weft.packed.engine.RankProgram", None)
    model = packed_models.build(family, num_hidden_layers=1)
    ids, mask = packed_models.inputs([3, 9])
    real = mask.bool()
    dy = random(int(real.sum()), 64, seed=5)
    want = model(ids, attention_mask=mask).last_hidden_state[real]
    (want * dy).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    fast = weft.pack(model)
    with torch.no_grad():
        got = fast(ids, attention_mask=mask).last_hidden_state[real]
    torch.testing.assert_close(got, want, atol=3e-4, rtol=3e-4)
    (fast(ids, attention_mask=mask).last_hidden_state[real] * dy).sum().backward()
    for name, p in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name], atol=2e-3, rtol=2e-3)


def test_what_has_no_kernel_is_refused():
    batch = PackedBatch.from_list([torch.zeros(4)])
    q = random(4, 2, 16)
    with pytest.raises(ValueError, match="no kernel for the GPU yet"):
        weft.packed_attention(q, q, q, batch, relative_bias=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"float32 and bfloat16 and float16 on cpu, got torch.float64"):
        weft.packed_attention(q.double(), q.double(), q.double(), batch)
