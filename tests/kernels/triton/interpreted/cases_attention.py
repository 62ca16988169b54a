"""Packed attention, forward and backward, against its plain twin in double precision."""

import pytest
import torch

from weft import reference
from weft.kernels import triton as kernels
from weft.kernels.cpu_attention import Scoring
from weft.kernels.triton.launch import Config
from weft.packed import PackedBatch

SMALL = Config((("BLOCK_M", 16), ("BLOCK_N", 32)))
LENGTHS = [0, 1, 3, 35]  # nothing, less than a block, and several blocks of queries and of keys
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "causal window": {"causal": True, "window": (20, -1)},
    "scale": {"scale": 0.05},
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def batch_of(lengths):
    return PackedBatch.from_values(torch.zeros(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))


def tensors(queries, keys, heads=2, kv_heads=1, width=32, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, width)]
    return [torch.randn(*s, generator=generator).to(dtype) for s in shapes]


def scoring_of(width, *, causal=False, window=(-1, -1), scale=None, slopes=None):
    return Scoring(width**-0.5 if scale is None else scale, window[0], 0 if causal else window[1], slopes)


def run(q, k, v, cu_q, cu_k, scoring, dout=None, config=SMALL):
    """out, and with dout also dq, dk, dv; everything that a kernel must write starts as NaN."""
    out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], q.shape[0]), float("nan"))
    kernels.attention(q, k, v, cu_q, cu_k, scoring, out=out, lse=lse, config=config)
    if dout is None:
        return out
    grads = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    kernels.attention_grad(
        dout, q, k, v, out, lse, cu_q, cu_k, scoring, dq=grads[0], dk=grads[1], dv=grads[2], config=config
    )
    return out, *grads


def compare(inputs, batch, keys, options, dtype, slopes=None):
    width = inputs[0].shape[2]
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = run(*inputs, batch.cu_seqlens, keys.cu_seqlens, scoring_of(width, slopes=slopes, **options), dout)
    exact = [t.double().requires_grad_() for t in inputs]
    want = reference.packed_attention(*exact, batch, keys=keys, alibi_slopes=slopes, **options)
    wanted = want, *torch.autograd.grad((want * dout.double()).sum(), exact)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g.double(), w, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients(option, dtype):
    batch = batch_of(LENGTHS)
    compare(tensors(batch.tokens, batch.tokens, dtype=dtype), batch, batch, OPTIONS[option], dtype)


@pytest.mark.parametrize("width", [1, 7, 80, 256])
def test_any_head_width(width):
    batch = batch_of([5, 20])
    compare(tensors(25, 25, 2, 1, width), batch, batch, {"causal": True}, torch.float32)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cross_attention_with_slopes(kv_heads):
    """Different lengths of queries and keys, none at all included; grouped heads."""
    batch, keys = batch_of([4, 0, 9, 20]), batch_of([7, 5, 0, 36])
    inputs = tensors(batch.tokens, keys.tokens, 4, kv_heads, 24)
    compare(inputs, batch, keys, {"window": (9, 4)}, torch.float32, slopes=torch.linspace(0.1, 0.6, 4))


def test_same_bits_whatever_the_batch():
    lengths, scoring = [20, 7, 35], Scoring(0.2, 25, 3)
    batch = batch_of(lengths)
    inputs, dout = tensors(62, 62, width=16), torch.randn(62, 2, 16, generator=torch.Generator().manual_seed(8))
    whole = run(*inputs, batch.cu_seqlens, batch.cu_seqlens, scoring, dout)
    again = run(*inputs, batch.cu_seqlens, batch.cu_seqlens, scoring, dout)
    for sequence, length in enumerate(lengths):
        part = slice(int(batch.cu_seqlens[sequence]), int(batch.cu_seqlens[sequence + 1]))
        cu = torch.tensor([0, length], dtype=torch.int32)
        alone = run(*(t[part].clone() for t in inputs), cu, cu, scoring, dout[part].clone())
        for w, a, g in zip(whole, alone, again, strict=True):
            assert torch.equal(w[part], a)
            assert torch.equal(w, g)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_stays_in_its_sequence(which):
    batch, scoring = batch_of([10, 20, 10]), Scoring(0.2)
    inputs, dout = tensors(40, 40, 2, 1, 16), torch.ones(40, 2, 16)
    clean = run(*inputs, batch.cu_seqlens, batch.cu_seqlens, scoring, dout)
    inputs[which][15, 0, 0] = float("nan")
    dirty = run(*inputs, batch.cu_seqlens, batch.cu_seqlens, scoring, dout)
    others = torch.ones(40, dtype=torch.bool)
    others[10:30] = False
    assert not dirty[0][10:30].isfinite().all()
    for d, c in zip(dirty, clean, strict=True):
        assert torch.equal(d[others], c[others])


def test_strided_inputs_and_one_tensor_for_all():
    batch, scoring = batch_of([9, 12]), Scoring(0.25, right=0)
    qkv = torch.randn(21, 8, 16, generator=torch.Generator().manual_seed(3))
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    got = torch.empty(21, 4, 16)
    kernels.attention(q, k, v, batch.cu_seqlens, batch.cu_seqlens, scoring, out=got, config=SMALL)
    want = run(q.contiguous(), k.contiguous(), v.contiguous(), batch.cu_seqlens, batch.cu_seqlens, scoring)
    assert torch.equal(got, want)


def test_scores_of_any_size():
    batch = batch_of([40])
    q, k, v = tensors(40, 40, 2, 2, 16)
    got = run(q * 100, k * 100, v, batch.cu_seqlens, batch.cu_seqlens, scoring_of(16))
    want = reference.packed_attention(q.double() * 100, k.double() * 100, v.double(), batch)
    torch.testing.assert_close(got.double(), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_empty_batches(lengths):
    q, cu = torch.randn(0, 2, 16), batch_of(lengths).cu_seqlens
    assert all(t.shape == (0, 2, 16) for t in run(q, q, q, cu, cu, Scoring(0.2), q))


def test_the_default_blocks():
    batch = batch_of([70, 5])
    inputs = tensors(75, 75, 1, 1, 64)
    dout = torch.ones(75, 1, 64)
    got = run(*inputs, batch.cu_seqlens, batch.cu_seqlens, scoring_of(64), dout, config=None)
    exact = [t.double().requires_grad_() for t in inputs]
    want = reference.packed_attention(*exact, batch)
    for g, w in zip(got, (want, *torch.autograd.grad(want.sum(), exact)), strict=True):
        torch.testing.assert_close(g.double(), w, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(13, 4)}, r"q must have shape \[tokens, heads, head_dim\]"),
        ({"q": torch.zeros(13, 3, 32)}, r"number of heads that divides 3"),
        ({"k": torch.zeros(13, 2, 16)}, r"k must be torch.float32 of shape \[13, 2, 32\]"),
        ({"v": torch.zeros(12, 2, 32)}, r"v must be torch.float32 of shape \[13, 2, 32\]"),
        ({"q": torch.zeros(13, 4, 32, dtype=torch.float64)}, r"float16, bfloat16 or float32"),
        ({"q": torch.zeros(13, 4, 300), "k": torch.zeros(13, 2, 300), "v": torch.zeros(13, 2, 300)}, r"1 to 256"),
        ({"cu": torch.tensor([0, 13])}, r"int32 tensor"),
        ({"slopes": torch.zeros(3)}, r"slopes must be .* \[4\]"),
        ({"bias": torch.zeros(4, 7)}, r"no kernel for the GPU yet"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    q, k, v = tensors(13, 13, 4, 2)
    given = {"q": q, "k": k, "v": v, "cu": torch.tensor([0, 4, 13], dtype=torch.int32), "bias": None, "slopes": None}
    given.update(change)
    scoring = Scoring(0.2, slopes=given["slopes"], bias=given["bias"])
    with pytest.raises(ValueError, match=message):
        run(given["q"], given["k"], given["v"], given["cu"], given["cu"], scoring)
