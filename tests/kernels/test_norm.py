"""Norms, rotary positions, gates and gathers against torch in double precision."""

import pytest
import torch
from torch.nn import functional as F

from weft import _core
from weft.kernels import cpu
from weft.kernels.norm import add_bias_residual_layernorm, gate, rmsnorm, rotary

ISAS = _core.available_isas()
WIDTHS = [1, 3, 8, 31, 32, 100, 768]
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu}


def random(*shape, seed=0, dtype=torch.float32, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def compare(got, want, leaves, exact):
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)
    weights = random(*got.shape, seed=9, grad=False)
    got_grads = torch.autograd.grad((got * weights).sum(), leaves)
    want_grads = torch.autograd.grad((want * weights.double()).sum(), exact)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g.double(), w, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 1])
def test_layernorm(width, isa):
    leaves = [random(21, width), random(21, width, seed=1), *(random(width, seed=s) for s in (2, 3, 4))]
    x, residual, bias, weight, beta = leaves
    exact = [t.detach().double().requires_grad_() for t in leaves]
    normed = add_bias_residual_layernorm(x, weight, beta, bias=bias, residual=residual, eps=1e-5, isa=isa)
    total = exact[0] + exact[1] + exact[2]
    want = F.layer_norm(total, [width], exact[3], exact[4], 1e-5)
    compare(normed.out, want, leaves, exact)
    torch.testing.assert_close(normed.total.double(), total, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rmsnorm(width, isa):
    leaves = [random(21, width), random(21, width, seed=1), random(width, seed=2)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    normed = rmsnorm(leaves[0], leaves[2], residual=leaves[1], eps=1e-6, isa=isa)
    total = exact[0] + exact[1]
    compare(normed.out + normed.total, F.rms_norm(total, [width], exact[2], 1e-6) + total, leaves, exact)


def test_norm_without_anything_added_keeps_the_residual_stream():
    x = random(5, 40)
    normed = add_bias_residual_layernorm(x, None, None)
    assert normed.total is x
    torch.testing.assert_close(normed.out, F.layer_norm(x, [40]))


@pytest.mark.parametrize("isa", ISAS)
def test_norm_in_bfloat16(isa):
    x, weight = random(9, 100, dtype=torch.bfloat16, grad=False), random(100, dtype=torch.bfloat16, grad=False)
    got = add_bias_residual_layernorm(x, weight, None, isa=isa).out
    want = add_bias_residual_layernorm(x.float(), weight.float(), None, isa=isa).out
    assert torch.equal(got, want.bfloat16())


def test_a_row_is_its_own():
    """Same bits whatever the other rows and the threads; NaN stays in its row."""
    x, weight, beta = random(70, 100, grad=False), random(100, seed=1), random(100, seed=2)
    whole = add_bias_residual_layernorm(x, weight, beta, threads=1).out
    assert torch.equal(add_bias_residual_layernorm(x, weight, beta, threads=3).out, whole)
    assert torch.equal(add_bias_residual_layernorm(x[17:18], weight, beta).out, whole[17:18])
    x[3, 5] = float("nan")
    dirty = add_bias_residual_layernorm(x, weight, beta).out
    assert dirty[3].isnan().all()
    assert torch.equal(dirty[4:], whole[4:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [6, 16, 72])
def test_heads_in_place(width, isa):
    """Some heads of each token, whose tokens lie further apart; the others stay as they are."""
    tokens, heads, all_heads = 37, 3, 5
    x = random(tokens, all_heads, width, grad=False)
    weight, before = random(width, seed=2, grad=False), x.clone()
    rows = (x.data_ptr() + width * 4, all_heads * width)  # from the second head on
    arguments = (True, rows, 0, (0, 0), weight.data_ptr(), 0, 1e-6, (0, 0), rows, 0, 0, tokens, width, heads, 2)
    _core.norm(_core.kernels(isa), cpu.dtype_code(x.dtype), *arguments)
    alone = rmsnorm(before[:, 1 : 1 + heads].reshape(-1, width), weight, eps=1e-6, isa=isa).out
    assert torch.equal(x[:, 1 : 1 + heads].reshape(-1, width), alone)
    assert torch.equal(x[:, :1], before[:, :1])
    assert torch.equal(x[:, 1 + heads :], before[:, 1 + heads :])


def test_large_offset_keeps_the_variance():
    x = random(4, 768, grad=False) + 1000
    torch.testing.assert_close(
        add_bias_residual_layernorm(x, None, None).out.double(), F.layer_norm(x.double(), [768]), atol=3e-4, rtol=3e-4
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [2, 10, 64])
def test_rotary(width, isa):
    x, positions = random(30, 5, width), torch.arange(30) * 7 % 50
    angles = torch.arange(50)[:, None] * 0.9 ** torch.arange(width // 2)[None]
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    exact = x.detach().double().requires_grad_()
    c, s = (t.double()[positions][:, None] for t in (cos, sin))
    a, b = exact[:, :3].chunk(2, -1)
    want = torch.cat([torch.cat([a * c - b * s, b * c + a * s], -1), exact[:, 3:]], 1)
    compare(rotary(x, cos, sin, positions, heads=3, isa=isa), want, [x], [exact])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation, isa):
    x = random(20, 2 * 37)
    exact = x.detach().double().requires_grad_()
    a, b = exact.chunk(2, 1)
    compare(gate(x, activation=activation, isa=isa), ACTIVATIONS[activation](a) * b, [x], [exact])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather(dtype, isa):
    tables = [random(rows, 45, seed=rows, dtype=dtype, grad=False) for rows in (9, 4, 30)]
    indices = [torch.randint(-1, len(t), (50,), generator=torch.Generator().manual_seed(len(t))) for t in tables]
    out = torch.full((50, 45), 7.0, dtype=dtype)
    cpu.gather(list(zip(tables, indices, strict=True)), out=out, isa_name=isa)
    want = sum(t.float()[i.clamp(min=0)] * (i >= 0)[:, None] for t, i in zip(tables, indices, strict=True))
    torch.testing.assert_close(out.float(), want, atol=1e-6 if dtype == torch.float32 else 0.03, rtol=1e-2)
    cpu.gather([(tables[0], indices[0])], out=out, isa_name=isa)
    assert torch.equal(out, tables[0][indices[0].clamp(min=0)] * (indices[0] >= 0)[:, None])


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    x, vector = random(6, 20, grad=grad), random(20, grad=grad)
    positions, table = torch.arange(6), torch.rand(6, 5)
    ops = torch.ops.weft
    torch.library.opcheck(ops.norm.default, (x, vector, x.detach().clone(), vector, vector, 1e-5, False, "", 1))
    torch.library.opcheck(ops.norm.default, (x, None, None, vector, None, 1e-5, True, "", 1))
    torch.library.opcheck(ops.gate.default, (x, "silu", "", 1))
    heads = random(6, 2, 10, grad=grad)
    torch.library.opcheck(ops.rotary.default, (heads, table, table, positions, 1, 1.0, "", 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: add_bias_residual_layernorm(torch.zeros(2, 4), torch.zeros(3), None), r"weight must be .* \[4\]"),
        (lambda: rmsnorm(torch.zeros(2, 4), None, residual=torch.zeros(3, 4)), r"residual must be .* \[2, 4\]"),
        (lambda: gate(torch.zeros(2, 4), activation="tanh"), r"activation must be one of"),
        (
            lambda: rotary(torch.zeros(1, 1, 4), torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([3]), heads=1),
            r"positions must be from 0 to 2, got 3",
        ),
        (
            lambda: cpu.gather([(torch.zeros(3, 4), torch.tensor([3]))], out=torch.zeros(1, 4)),
            r"3 rows was asked for row 3",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
