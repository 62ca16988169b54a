"""The native linear against double precision, for every instruction set that this CPU runs."""

import copy

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import weft
from weft import _core
from weft.kernels import PackedWeight, TileSchedule, Tiling, linear

ISAS = _core.available_isas()
ACTIVATIONS = {
    None: lambda z: z,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
# (M, K, N): empty ones, single ones, primes, and sizes around a strip, a panel, a block of k and a tile
SHAPES = [
    (0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (1, 1, 1), (1, 300, 70), (2, 17, 33), (3, 257, 16), (5, 31, 129),
    (6, 256, 32), (7, 255, 15), (13, 520, 47), (61, 100, 100), (150, 259, 530), (300, 64, 513),
]  # fmt: skip


def tensors(m, k, n, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator).to(dtype) for s in [(m, k), (n, k), (n,), (m, n)]]


def close(got, want, k):
    """Within the rounding of a sum of k products of unit size, and of one store in the output's type."""
    tolerance = 4e-6 * max(k, 1) ** 0.5 + 2e-6
    relative = 1e-6 if got.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=relative)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape, dtype, isa):
    x, w, b, r = tensors(*shape, dtype)
    packed = PackedWeight.from_dense(w, isa=isa)
    z = x.double() @ w.double().t()
    close(linear(x, packed), z, shape[1])
    close(linear(x, packed, bias=b), z + b.double(), shape[1])
    close(linear(x, packed, bias=b, residual=r), z + b.double() + r.double(), shape[1])
    assert torch.equal(packed.to_dense(), w)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_is_as_close_as_torch(activation, isa):
    x = torch.linspace(-13, 13, 200_003)[:, None]
    got = linear(x, PackedWeight.from_dense(torch.ones(1, 1), isa=isa), activation=activation)
    exact = ACTIVATIONS[activation](x.double())
    torch_error = (ACTIVATIONS[activation](x) - exact).abs().max()
    assert (got - exact).abs().max() <= 2 * torch_error + 1e-7


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_values_follow_torch(activation, dtype, isa):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1e30, -1e30])[:, None].to(dtype)
    got = linear(x, PackedWeight.from_dense(torch.ones(1, 1, dtype=dtype), isa=isa), activation=activation)
    torch.testing.assert_close(got.double(), ACTIVATIONS[activation](x.double()), equal_nan=True, rtol=1e-2, atol=1e-6)


def test_nan_stays_in_its_row():
    x, w, *_ = tensors(40, 64, 48)
    x[17, 3] = float("nan")
    y = linear(x, PackedWeight.from_dense(w))
    assert y[17].isnan().all()
    assert not y[torch.arange(40) != 17].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_same_bits_wherever_a_row_is(isa, dtype, data):
    """A row alone equals that row in any batch, at any place, for any threads, tiles, order and groups."""
    m = data.draw(st.integers(1, 200), label="m")
    k = data.draw(st.sampled_from([1, 7, 256, 300, 513]), label="k")
    n = data.draw(st.sampled_from([1, 16, 33, 100, 300]), label="n")
    x, w, b, r = tensors(m, k, n, dtype, seed=m)
    packed = PackedWeight.from_dense(w, isa=isa)
    kwargs = {"activation": data.draw(st.sampled_from([None, "gelu", "silu"]), label="activation")}
    whole = linear(x, packed, bias=b, residual=r, threads=1, **kwargs)
    assert torch.equal(linear(x, packed, bias=b, residual=r, threads=3, **kwargs), whole)

    start = data.draw(st.integers(0, m - 1), label="start")
    stop = data.draw(st.integers(start + 1, m), label="stop")
    part = linear(x[start:stop], packed, bias=b, residual=r[start:stop], **kwargs)
    assert torch.equal(part, whole[start:stop])

    tiling = Tiling(m, n, data.draw(st.integers(1, 160), label="tile_m"), data.draw(st.sampled_from([32, 96, 1024])))
    order = data.draw(st.permutations(range(tiling.count)), label="order")
    groups = data.draw(st.integers(1, tiling.count), label="groups")
    schedule = TileSchedule(tiling, order=order, group_of=[tile % groups for tile in range(tiling.count)])
    done = torch.zeros(groups, dtype=torch.int32)
    scheduled = linear(x, packed, bias=b, residual=r, threads=2, schedule=schedule, done=done, **kwargs)
    assert torch.equal(scheduled, whole)
    assert torch.equal(done, schedule.group_sizes)


def test_strided_rows_and_in_place_residual():
    x, w, b, r = tensors(37, 300, 50)
    packed = PackedWeight.from_dense(w)
    want = linear(x, packed, bias=b, residual=r)
    wide_x, wide_out = torch.zeros(37, 400), torch.full((37, 90), 7.0)
    wide_x[:, 50:350] = x
    wide_out[:, 20:70] = r
    view = wide_out[:, 20:70]
    assert linear(wide_x[:, 50:350], packed, bias=b, residual=view, out=view) is view
    assert torch.equal(view, want)
    assert (wide_out[:, :20] == 7).all()
    assert (wide_out[:, 70:] == 7).all()
    assert torch.equal(linear(x.t().contiguous().t(), packed, bias=b, residual=r), want)


def test_leading_dims_and_transposed_weight():
    x, w, b, _ = tensors(12, 20, 30)
    packed = PackedWeight.from_dense(w.t().contiguous().t())
    y = linear(x.reshape(3, 4, 20), packed, bias=b)
    assert y.shape == (3, 4, 30)
    assert torch.equal(y.reshape(12, 30), linear(x, packed, bias=b))
    assert linear(x[0], packed, bias=b).shape == (30,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation, dtype):
    x, w, b, r = (t.requires_grad_() for t in tensors(23, 40, 36, dtype, seed=3))
    y = linear(x, PackedWeight.from_dense(w), bias=b, activation=activation, residual=r)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad((y * weights).sum(), [x, w, b, r])
    doubles = [t.detach().double().requires_grad_() for t in (x, w, b, r)]
    plain = ACTIVATIONS[activation](F.linear(doubles[0], doubles[1], doubles[2])) + doubles[3]
    want = torch.autograd.grad((plain * weights.double()).sum(), doubles)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.3, "rtol": 3e-2}
    for g, e in zip(got, want, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), e, **tolerance)


def test_gradient_of_x_alone_needs_no_dense_weight():
    x, w, *_ = tensors(9, 20, 30)
    x.requires_grad_()
    packed = PackedWeight.from_dense(w)
    assert packed.source is None
    (dx,) = torch.autograd.grad(linear(x, packed).sum(), x)
    torch.testing.assert_close(dx, torch.ones(9, 30) @ w)


def test_training_bits_equal_inference_bits():
    x, w, b, _ = tensors(23, 40, 36)
    packed = PackedWeight.from_dense(w)
    plain = linear(x, packed, bias=b, activation="gelu")
    assert torch.equal(linear(x.clone().requires_grad_(), packed, bias=b, activation="gelu"), plain)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_opcheck(grad, activation):
    x, w, b, r = (t.requires_grad_(grad) for t in tensors(10, 20, 30))
    packed = PackedWeight.from_dense(w)
    args = (x, packed.data, w, b, r, activation, 30, "", 1, activation is not None)
    torch.library.opcheck(torch.ops.weft.linear.default, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_without_graph_breaks(dtype):
    x, w, b, _ = tensors(10, 20, 30, dtype)
    packed = PackedWeight.from_dense(w)

    def twice(x):
        return linear(x.sin(), packed, bias=b, activation="gelu") * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), twice(x))
    grads = [
        torch.autograd.grad(f(leaf).sum(), leaf)[0] for f in (twice, compiled) for leaf in [x.clone().requires_grad_()]
    ]
    assert torch.equal(*grads)


def test_opcheck_of_packing():
    w = torch.randn(30, 20)
    torch.library.opcheck(torch.ops.weft.pack.default, (w, "", 1))
    torch.library.opcheck(torch.ops.weft.unpack.default, (PackedWeight.from_dense(w).data, 30, 20, "", 1))


def test_empty_leading_dims():
    packed, narrow = PackedWeight.from_dense(torch.ones(4, 3)), PackedWeight.from_dense(torch.ones(4, 0))
    assert linear(torch.ones(2, 0, 3), packed).shape == (2, 0, 4)
    assert torch.equal(linear(torch.ones(2, 3, 0), narrow), torch.zeros(2, 3, 4))
    assert torch.equal(linear(torch.ones(0), narrow), torch.zeros(4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivative(activation):
    x, w, b, _ = (t.requires_grad_() for t in tensors(5, 6, 7))

    def penalty(y):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, w, b])

    got = penalty(linear(x, PackedWeight.from_dense(w), bias=b, activation=activation))
    for g, e in zip(got, penalty(ACTIVATIONS[activation](F.linear(x, w, b))), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-3)


def test_whatever_watches_the_dispatcher_sees_the_op():
    x, w, *_ = tensors(5, 6, 7)
    packed = PackedWeight.from_dense(w)
    want = linear(x, packed)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda t: linear(t, packed))(x)
    assert torch.ops.weft.linear.default in [node.target for node in graph.graph.nodes]
    assert torch.equal(torch.jit.trace(lambda t: linear(t, packed), x)(x), want)
    assert torch.equal(torch.func.functionalize(lambda t: linear(t, packed))(x), want)
    assert torch.equal(linear(x._neg_view(), packed), linear(-x, packed))
    with torch.device("meta"):
        assert torch.equal(linear(x, packed), want)
    with torch.inference_mode():
        assert torch.equal(linear(x.clone(), PackedWeight.from_dense(torch.nn.Parameter(w))), want)


def test_copies_of_a_packed_weight():
    x, w, *_ = tensors(5, 6, 7)
    w = torch.nn.Parameter(w)
    with torch.no_grad():
        w.mul_(2)
    packed = PackedWeight.from_dense(w)
    copied = copy.deepcopy(packed)
    assert copied.isa == _core.available_isas()[0]
    assert torch.equal(linear(x, copied), linear(x, packed))
    with torch.no_grad():
        copied.source.mul_(2)
    with pytest.raises(ValueError, match="pack it again"):
        linear(x, copied)


def test_writing_to_out_is_seen_by_autograd():
    x, w, *_ = tensors(4, 6, 6)
    leaf, saved = torch.ones(4, 6, requires_grad=True), torch.ones(4, 6)
    product = leaf * saved
    with torch.no_grad():
        linear(x, PackedWeight.from_dense(w), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_stale_weight_is_an_error():
    x, w, *_ = tensors(4, 20, 30)
    w.requires_grad_()
    packed = PackedWeight.from_dense(w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(ValueError, match=r"changed after .* pack it again"):
        linear(x, packed)
    with torch.no_grad(), pytest.raises(ValueError, match=r"changed after .* pack it again"):
        linear(x, packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flops_are_counted(dtype):
    x, w = (t.requires_grad_() for t in tensors(5, 6, 7, dtype)[:2])
    with FlopCounterMode(display=False) as counter:
        linear(x, PackedWeight.from_dense(w)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * x.numel() * w.shape[0]


def test_public_names():
    assert weft.linear is linear
    assert weft.PackedWeight is PackedWeight
    assert repr(PackedWeight.from_dense(torch.ones(3, 2))) == "PackedWeight([3, 2], torch.float32)"


@pytest.mark.parametrize("k", [768, 3072, 11008])
def test_rounding_errors_grow_slowly_with_k(k: int) -> None:
    """A single chain of sums would err by 1e-7 times k; blocks that start from zero keep it near its square root."""
    g = torch.Generator().manual_seed(k)
    x, w = torch.randn(32, k, generator=g), torch.randn(64, k, generator=g)
    errors = linear(x, PackedWeight.from_dense(w)).double() - x.double() @ w.double().t()
    assert errors.abs().max() < 5e-6 * k**0.5


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_changes_nothing(grad):
    x, w = torch.randn(3, 8), torch.randn(5, 8, requires_grad=grad)
    packed = PackedWeight.from_dense(w)
    wanted = linear(x, packed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.functional.linear(x, w).dtype == torch.bfloat16
        assert torch.equal(linear(x, packed), wanted)  # float32: the docstring says so
