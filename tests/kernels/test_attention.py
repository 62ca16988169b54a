"""Packed attention against its plain twin in double precision, for every instruction set that this CPU runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import _core, reference
from weft.kernels.attention import attention, self_attention
from weft.kernels.cpu_attention import Scoring
from weft.packed import PackedBatch, packed_attention

ISAS = _core.available_isas()
LENGTHS = [0, 1, 3, 17, 130, 300]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "causal window": {"causal": True, "window": (40, -1)},
    "scale": {"scale": 0.05},
}


def batch_of(lengths):
    return PackedBatch.from_values(torch.zeros(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))


def tensors(queries, keys, heads=4, kv_heads=2, width=32, *, dtype=torch.float32, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, width)]
    return [torch.randn(*s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def doubles(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [7, 16, 64, 80, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_values_and_gradients(option, width, isa):
    batch, options = batch_of(LENGTHS), OPTIONS[option]
    inputs = tensors(batch.tokens, batch.tokens, width=width, grad=True)
    left, right = options.get("window", (-1, -1))
    scoring = Scoring(options.get("scale", width**-0.5), left, 0 if options.get("causal") else right)
    got = attention(*inputs, batch.cu_seqlens, batch.cu_seqlens, scoring, isa=isa)
    exact = doubles(inputs)
    want = reference.packed_attention(*exact, batch, **options)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    got_grads = torch.autograd.grad((got * weights).sum(), inputs)
    want_grads = torch.autograd.grad((want * weights.double()).sum(), exact)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g.double(), w, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_cross_attention_with_biases(kv_heads):
    """Different lengths of queries and keys, none at all included; every bias; grouped heads."""
    batch, keys = batch_of([4, 0, 9, 50, 3, 140]), batch_of([7, 5, 0, 20, 200, 140])
    inputs = tensors(batch.tokens, keys.tokens, 6, kv_heads, 24, grad=True)
    bias = torch.randn(6, 2 * 11 + 1, generator=torch.Generator().manual_seed(2)).requires_grad_()
    slopes = torch.linspace(0.1, 0.6, 6)
    got = packed_attention(*inputs, batch, keys=keys, alibi_slopes=slopes, relative_bias=bias)
    *exact, exact_bias = doubles([*inputs, bias])
    want = reference.packed_attention(
        *exact, batch, keys=keys, alibi_slopes=slopes.double(), relative_bias=exact_bias
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)
    assert (got[4:13] == 0).all()  # the sequence without keys
    got_grads = torch.autograd.grad(got.square().sum(), [*inputs, bias])
    want_grads = torch.autograd.grad(want.square().sum(), [*exact, exact_bias])
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g.double(), w, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_rounds_only_at_the_ends(isa):
    batch = batch_of(LENGTHS)
    inputs = tensors(batch.tokens, batch.tokens, dtype=torch.bfloat16, grad=True)
    cu, scoring = batch.cu_seqlens, Scoring(32**-0.5)
    got = attention(*inputs, cu, cu, scoring, isa=isa)
    wide = [t.detach().float().requires_grad_() for t in inputs]
    want = attention(*wide, cu, cu, scoring, isa=isa)
    assert torch.equal(got, want.bfloat16())
    got_grads = torch.autograd.grad(got.float().square().sum(), inputs)
    want_grads = torch.autograd.grad(want.square().sum(), wide)
    for g, w in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(g.float(), w, atol=0.03, rtol=0.03)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_lengths_heads_and_windows(data):
    lengths = data.draw(st.lists(st.integers(0, 70), min_size=0, max_size=6), label="lengths")
    key_lengths = data.draw(
        st.one_of(st.just(lengths), st.lists(st.integers(0, 70), min_size=len(lengths), max_size=len(lengths))),
        label="key lengths",
    )
    kv_heads = data.draw(st.integers(1, 3), label="kv heads")
    heads = kv_heads * data.draw(st.integers(1, 3), label="group")
    width = data.draw(st.integers(1, 40), label="width")
    options = {
        "causal": data.draw(st.booleans(), label="causal"),
        "window": data.draw(st.none() | st.tuples(st.integers(-1, 30), st.integers(-1, 30)), label="window"),
    }
    batch, keys = batch_of(lengths), batch_of(key_lengths)
    inputs = tensors(batch.tokens, keys.tokens, heads, kv_heads, width, seed=len(lengths))
    got = packed_attention(*inputs, batch, keys=keys, **options)
    want = reference.packed_attention(*doubles(inputs), batch, keys=keys, **options)
    torch.testing.assert_close(got.double(), want.detach(), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("isa", ISAS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_same_bits_whatever_the_batch_and_threads(isa, data):
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=5), label="lengths")
    chosen = data.draw(st.integers(0, len(lengths) - 1), label="sequence")
    scoring = Scoring(0.2, data.draw(st.integers(-1, 50), label="left"), data.draw(st.integers(-1, 5), label="right"))
    batch = batch_of(lengths)
    qkv = torch.randn(batch.tokens, 8, 16, generator=torch.Generator().manual_seed(7)).requires_grad_()
    weights = torch.randn(batch.tokens, 4, 16, generator=torch.Generator().manual_seed(8))
    run = {"heads": 4, "kv_heads": 2, "isa": isa}

    whole = self_attention(qkv, batch.cu_seqlens, scoring, threads=1, **run)
    (grad,) = torch.autograd.grad((whole * weights).sum(), qkv)
    threaded = self_attention(qkv, batch.cu_seqlens, scoring, threads=3, **run)
    assert torch.equal(threaded, whole)
    assert torch.equal(torch.autograd.grad((threaded * weights).sum(), qkv)[0], grad)

    start, stop = batch.cu_seqlens[chosen], batch.cu_seqlens[chosen + 1]
    alone = qkv.detach()[start:stop].clone().requires_grad_()
    cu = torch.tensor([0, lengths[chosen]], dtype=torch.int32)
    out = self_attention(alone, cu, scoring, **run)
    assert torch.equal(out, whole[start:stop])
    assert torch.equal(torch.autograd.grad((out * weights[start:stop]).sum(), alone)[0], grad[start:stop])


def test_fused_tensor_equals_three():
    batch = batch_of([5, 40])
    qkv = torch.randn(45, 8, 16, requires_grad=True)
    scoring = Scoring(0.25, right=0)
    fused = self_attention(qkv, batch.cu_seqlens, scoring, heads=4, kv_heads=2)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    apart = attention(q, k, v, batch.cu_seqlens, batch.cu_seqlens, scoring)
    assert torch.equal(fused, apart)
    grads = [torch.autograd.grad(o.square().sum(), qkv, retain_graph=True)[0] for o in (fused, apart)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_and_inf_stay_in_their_sequence(which, bad):
    batch = batch_of([30, 20, 200])
    inputs = tensors(250, 250, grad=True)
    clean = packed_attention(*inputs, batch)
    clean_grads = torch.autograd.grad(clean.sum(), inputs)
    with torch.no_grad():
        inputs[which][35, 0, 0] = bad
    dirty = packed_attention(*inputs, batch)
    others = torch.ones(250, dtype=torch.bool)
    others[30:50] = False
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[30:50].isfinite().all()
    for g, want in zip(torch.autograd.grad(dirty.sum(), inputs), clean_grads, strict=True):
        assert torch.equal(g[others], want[others])


def test_scores_of_any_size():
    """Scores in the thousands neither overflow nor lose the largest."""
    batch = batch_of([50])
    q, k, v = tensors(50, 50, 2, 2, 16)
    got = packed_attention(q * 100, k * 100, v, batch)
    want = reference.packed_attention(q.double() * 100, k.double() * 100, v.double(), batch)
    torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-3)


def test_one_long_sequence_and_many_short_ones():
    long = batch_of([16_384])
    q = torch.randn(16_384, 1, 16)
    got = packed_attention(q, q, q, long, window=(64, 0))
    rows = [0, 1, 63, 64, 65, 9_999, 16_383]
    for i in rows:
        near = q[max(0, i - 64) : i + 1, 0].double()
        want = (near @ q[i, 0].double() / 4).softmax(0) @ near
        torch.testing.assert_close(got[i, 0].double(), want, atol=3e-6, rtol=3e-6)
    short = batch_of([3] * 10_000)
    q = torch.randn(30_000, 1, 16)
    got = packed_attention(q, q, q, short).view(10_000, 3, 16)
    want = torch.nn.functional.scaled_dot_product_attention(*(q.double().view(10_000, 3, 16),) * 3)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)


def test_empty_batches():
    q = torch.randn(0, 2, 16, requires_grad=True)
    for lengths in ([], [0], [0, 0]):
        out = packed_attention(q, q, q, batch_of(lengths))
        assert out.shape == (0, 2, 16)
        assert torch.autograd.grad(out.sum(), q)[0].shape == (0, 2, 16)


def test_strided_inputs():
    batch = batch_of([9, 30])
    q, k, v = tensors(39, 39)
    want = packed_attention(q, k, v, batch)
    turned = [t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in (q, k, v)]
    assert torch.equal(packed_attention(*turned, batch), want)
    assert torch.equal(packed_attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, batch), want)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    batch = batch_of([4, 0, 9])
    q, k, v = tensors(13, 13, grad=grad)
    bias, slopes = torch.randn(4, 7, requires_grad=grad), torch.rand(4)
    cu = batch.cu_seqlens
    seed = torch.tensor([7])
    for dropout in (0.0, 0.2):
        args = (q, k, v, cu, cu, slopes, bias, seed, 0.3, -1, 0, dropout, "", 1, grad)
        torch.library.opcheck(torch.ops.weft.attention.default, args)
    qkv = torch.randn(13, 8, 16, requires_grad=grad)
    torch.library.opcheck(
        torch.ops.weft.self_attention.default, (qkv, cu, slopes, bias, seed, 0.3, -1, 0, 0.2, 4, 2, "", 1, grad)
    )  # fmt: skip


def test_opcheck_of_gradients():
    cu, scoring = batch_of([4, 0, 9]).cu_seqlens, Scoring(0.3)
    q, k, v = tensors(13, 13)
    out, lse = torch.ops.weft.attention(q, k, v, cu, cu, None, None, None, scoring.scale, -1, -1, 0.0, "", 1, True)
    args = (out, q, k, v, out, lse, cu, cu, None, None, None, 0.3, -1, -1, 0.0, "", 1, False)
    torch.library.opcheck(torch.ops.weft.attention_grad.default, args)


def test_compiles_without_graph_breaks():
    batch = batch_of([4, 9])

    def twice(q):
        return packed_attention(q.sin(), q, q, batch, causal=True) * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    q = torch.randn(13, 2, 16)
    assert torch.equal(compiled(q), twice(q))
    grads = [torch.autograd.grad(f(leaf).sum(), leaf)[0] for f in (twice, compiled) for leaf in [q.requires_grad_()]]
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(13, 4)}, r"q must have shape \[tokens, heads, head_dim\]"),
        ({"q": torch.zeros(13, 3, 32)}, r"number of heads that divides 3"),
        ({"k": torch.zeros(13, 2, 16)}, r"head_dim 32 like q"),
        ({"v": torch.zeros(12, 2, 32)}, r"v must be torch.float32 of shape \[13, 2, 32\]"),
        ({"v": torch.zeros(13, 2, 32, dtype=torch.bfloat16)}, r"got torch.bfloat16"),
        ({"q": torch.zeros(12, 4, 32)}, r"cu_q must rise from 0 to the 12 tokens"),
        ({"cu": torch.tensor([0, 9, 4, 13], dtype=torch.int32)}, r"must rise from 0"),
        ({"cu": torch.tensor([0, 13])}, r"int32 tensor"),
        ({"cu": torch.tensor([0, -4, 13], dtype=torch.int32)}, r"must rise from 0"),
        ({"bias": torch.zeros(4, 6)}, r"bias must be .* \[4, 2 \* reach \+ 1\]"),
        ({"slopes": torch.zeros(3)}, r"slopes must be .* \[4\]"),
        ({"q": torch.zeros(13, 4, 300), "k": torch.zeros(13, 2, 300), "v": torch.zeros(13, 2, 300)}, r"1 to 256"),
        ({"q": torch.zeros(13, 4, 32, dtype=torch.float64)}, r"torch.float"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    q, k, v = tensors(13, 13)
    given_ = {"q": q, "k": k, "v": v, "cu": torch.tensor([0, 4, 13], dtype=torch.int32), "bias": None, "slopes": None}
    given_.update(change)
    scoring = Scoring(0.2, slopes=given_["slopes"], bias=given_["bias"])
    with pytest.raises(ValueError, match=message):
        attention(given_["q"], given_["k"], given_["v"], given_["cu"], given_["cu"], scoring)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", [7, 64, 80])
def test_scratch_that_is_kept_brings_nothing_into_the_next_call(width, isa):
    batch = batch_of([1, 3, 17, 130])
    inputs = tensors(batch.tokens, batch.tokens, width=width, grad=True)
    poison = [torch.full_like(t, float("nan")).requires_grad_() for t in inputs]
    results = []
    for given_ in (inputs, poison, inputs):
        out = attention(*given_, batch.cu_seqlens, batch.cu_seqlens, Scoring(0.2, 9, -1), isa=isa)
        results.append([out, *torch.autograd.grad(out.sum(), given_)])
    for first, again in zip(results[0], results[2], strict=True):
        assert torch.equal(first, again)
