"""Norms, gathers, rotary positions and gates, against torch in double precision."""

import pytest
import torch
from torch.nn import functional as F

from weft.kernels import triton as kernels
from weft.kernels.triton import launch
from weft.kernels.triton.rows import sum_kernel

WIDTHS = [1, 3, 31, 32, 100, 768]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu}
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want):
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)


def normed(x, weight, beta, *, rms=False, **options):
    """out, total, mean, rstd; all start as NaN."""
    out, total = (torch.full(x.shape, float("nan"), dtype=x.dtype) for _ in range(2))
    mean, rstd = (torch.full((x.shape[0],), float("nan")) for _ in range(2))
    kernels.norm(x, weight, beta, out=out, eps=1e-5, rms=rms, total=total, mean=mean, rstd=rstd, **options)
    return out, total, mean, rstd


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 1])
def test_layernorm(width, dtype):
    x, residual = random(9, width, dtype=dtype), random(9, width, seed=1, dtype=dtype)
    bias, weight, beta = (random(width, seed=s, dtype=dtype) for s in (2, 3, 4))
    out, total, mean, rstd = normed(x, weight, beta, bias=bias, residual=residual)
    exact = x.double() + residual.double() + bias.double()
    close(out, F.layer_norm(exact, [width], weight.double(), beta.double(), 1e-5))
    close(total, exact)
    close(mean, exact.mean(1))
    close(rstd, (exact.var(1, correction=0) + 1e-5).rsqrt())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rmsnorm(width, dtype):
    x, residual, weight = (random(*s, seed=i, dtype=dtype) for i, s in enumerate([(9, width), (9, width), (width,)]))
    out, total, mean, _ = normed(x, weight, None, rms=True, residual=residual)
    exact = x.double() + residual.double()
    close(out, F.rms_norm(exact, [width], weight.double(), 1e-5))
    close(total, exact)
    assert (mean == 0).all()


def test_a_row_is_its_own():
    x, weight, beta = random(20, 100), random(100, seed=1), random(100, seed=2)
    whole = normed(x, weight, beta)[0]
    assert torch.equal(normed(x[17:18], weight, beta)[0], whole[17:18])
    x[3, 5] = float("nan")
    dirty = normed(x, weight, beta)[0]
    assert dirty[3].isnan().all()
    assert torch.equal(dirty[4:], whole[4:])


def test_large_offset_keeps_the_variance():
    x = random(4, 768) + 1000
    want = F.layer_norm(x.double(), [768])
    torch.testing.assert_close(normed(x, None, None)[0].double(), want, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(dtype):
    tables = [random(rows, 45, seed=rows, dtype=dtype) for rows in (9, 4, 30)]
    indices = [torch.randint(-1, len(t), (20,), generator=torch.Generator().manual_seed(len(t))) for t in tables]
    for count in (1, 2, 3):
        out = torch.full((20, 45), 7.0, dtype=dtype)
        chosen = list(zip(tables, indices, strict=True))[:count]
        kernels.gather(chosen, out=out)
        want = sum(t.double()[i.clamp(min=0)] * (i >= 0)[:, None] for t, i in chosen)
        close(out, want)


def test_pack_and_unpack():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    padded, places = random(9, 1500), mask.view(-1).nonzero().view(-1)
    packed, back = torch.empty(3, 1500), torch.empty(9, 1500)
    kernels.gather([(padded, places)], out=packed)
    assert torch.equal(packed, padded[places])
    index = torch.full((9,), -1)
    index[places] = torch.arange(3)
    kernels.gather([(packed, index)], out=back)
    assert torch.equal(back, padded * mask.view(-1, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 10, 64])
def test_rotary(width, dtype):
    x, positions = random(6, 5, width, dtype=dtype), torch.arange(6) * 7 % 50
    angles = torch.arange(50)[:, None] * 0.9 ** torch.arange(width // 2)[None]
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    c, s = (t.double()[positions][:, None] for t in (cos, sin))
    a, b = x.double()[:, :3].chunk(2, -1)
    want = torch.cat([torch.cat([a * c - b * s, b * c + a * s], -1), x.double()[:, 3:]], 1)
    turned = x.clone()
    kernels.rotary(turned, cos, sin, positions, out=turned, heads=3)
    close(turned, want)
    kernels.rotary(turned, cos, sin, positions, out=turned, heads=3, sign=-1.0)
    close(turned, x.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation, dtype):
    x, out = random(6, 2 * 37, dtype=dtype), torch.empty(6, 37, dtype=dtype)
    kernels.gate(x, activation=activation, out=out)
    a, b = x.double().chunk(2, 1)
    close(out, ACTIVATIONS[activation](a) * b)


def test_sums_run_in_rank_order():
    """In bfloat16, with sums in float32: another order would round differently."""
    parts, bias = random(5, 7, 300, dtype=torch.bfloat16) * 100, random(300, dtype=torch.bfloat16)
    out = torch.empty(7, 300, dtype=torch.bfloat16)
    kernels.sum_in_order(parts, out=out, bias=bias)
    total = torch.zeros(7, 300)
    for part in parts:
        total = total + part.float()
    assert torch.equal(out, (total + bias.float()).bfloat16())


def test_empty_ones():
    for shape in ((0, 8), (3, 0)):
        out = torch.empty(shape)
        kernels.norm(torch.empty(shape), None, None, out=out, eps=1e-5)
        kernels.gather([(torch.empty(2, shape[1]), torch.zeros(shape[0], dtype=torch.int64))], out=out)
        kernels.gate(torch.empty(shape[0], 2 * shape[1]), activation="silu", out=out)
        kernels.sum_in_order(torch.empty(2, *shape), out=out)


ZEROS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normed(ZEROS, torch.zeros(3), None), r"weight must be .* \[4\]"),
        (lambda: normed(ZEROS, None, None, residual=torch.zeros(3, 4)), r"residual must be .* \[2, 4\]"),
        (lambda: normed(torch.zeros(1, 40_000), None, None), "use torch's own norm"),
        (lambda: kernels.gate(ZEROS, activation="tanh", out=torch.zeros(2, 2)), "activation must be one of"),
        (lambda: kernels.gather([], out=ZEROS), "1 to 3 tables, got 0"),
        (lambda: kernels.gather([(ZEROS, torch.zeros(1))], out=ZEROS), "index must be a flat"),
        (lambda: kernels.sum_in_order(torch.zeros(2, 4, 2).transpose(1, 2), out=ZEROS), "contiguous"),
        (
            lambda: kernels.rotary(
                torch.zeros(1, 1, 3), ZEROS, ZEROS, torch.zeros(1, dtype=torch.int64), out=ZEROS, heads=1
            ),
            "even head_dim",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sums_of_parts_far_apart():
    """More than 2^31 elements from the first part to the last: offsets of 32 bits would point before the first."""
    distance, ranks = 2**30, 4
    parts = torch.empty(distance * (ranks - 1) + 1024, dtype=torch.float16)  # only what is touched takes memory
    out = torch.empty(1024, dtype=torch.float16)
    for rank in range(ranks):
        parts[rank * distance :][:1024] = 2.0**rank
    late = kernels.Late.on("cpu")
    config = launch.STRIP
    sum_kernel[(1,)](
        parts,
        out,
        None,
        None,
        late.flag,
        1024,
        ranks,
        distance,
        1024,
        0,
        1,
        THREADS=32 * config.warps,
        INTERPRET=True,
        **config.launch,
    )
    assert torch.equal(out, torch.full_like(out, 15.0))
