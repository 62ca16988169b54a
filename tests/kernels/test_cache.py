"""Attention to a cache, and of few queries: the bits of the blocked kernel, which has its own plain twin."""

import pytest
import torch

from weft import _core
from weft.kernels import cpu_attention
from weft.kernels.cpu import dtype_code, thread_count
from weft.kernels.cpu import isa as kernels_of
from weft.kernels.cpu_attention import Scoring, strided

ISAS = _core.available_isas()
WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (40, 0), "around": (5, 3)}


def blocked(q, k, v, cu_q, cu_k, scoring, isa):
    """The kernel for many queries: it is the one that can give lse."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    cpu_attention.attention(q, k, v, cu_q, cu_k, scoring, out=out, lse=lse, isa_name=isa)
    return out


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def cache_attention(q, k, v, cu_q, slots, lengths, scoring, *, out, isa_name=""):
    """Queries against a cache, as a pass of inference asks for it: k and v [slots, Hkv, capacity, D]."""
    tokens, heads, width = q.shape
    kv_heads, capacity = k.shape[1:3]
    k_cache, v_cache = ((t.data_ptr(), width, capacity * width) for t in (k, v))
    starts = slots * (kv_heads * capacity)
    job = _core.Attention(
        strided(q), k_cache, v_cache, strided(out), dtype_code(q.dtype), heads, kv_heads, width, tokens,
        scoring.scale, scoring.left, scoring.right, 0, 0, 0, 0, 0, 0, 1.0,
    )  # fmt: skip
    sequences = cu_q.data_ptr(), starts.data_ptr(), lengths.data_ptr(), lengths.numel()
    _core.attention_at(kernels_of(isa_name), job, *sequences, thread_count(0))


def store_heads(rows, cache, slots, positions):
    """cache[slots[i], :, positions[i]] = rows[i]: rows [T, Hkv, D], cache [slots, Hkv, capacity, D]."""
    _, heads, capacity, width = cache.shape
    size = rows.element_size()
    place = slots * (heads * capacity) + positions
    _core.store_heads(
        rows.data_ptr(), rows.stride(0) * size, cache.data_ptr(), capacity * width * size, place.data_ptr(), heads,
        width * size, rows.shape[0], thread_count(0),
    )  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 1, 64), (6, 2, 40), (3, 3, 7), (5, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_have_the_bits_of_many(heads, kv_heads, width, window, isa, dtype):
    queries, keys = [1, 8, 0, 3, 1, 5, 2], [300, 129, 4, 126, 1, 5, 127]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(queries), heads, width, generator=generator).to(dtype)
    k, v = (torch.randn(sum(keys), kv_heads, width, generator=generator).to(dtype) for _ in range(2))
    left, right = WINDOWS[window]
    scoring, cu_q, cu_k = Scoring(width**-0.5, left, right), offsets(queries), offsets(keys)
    want = blocked(q, k, v, cu_q, cu_k, scoring, isa)
    got = torch.empty_like(q)
    cpu_attention.attention(q, k, v, cu_q, cu_k, scoring, out=got, isa_name=isa)
    assert torch.equal(got, want)
    # The same from a cache, slots in another order, each with room behind its keys.
    slots = torch.tensor([3, 0, 6, 1, 2, 5, 4])
    caches = [torch.full((7, kv_heads, 310, width), float("nan"), dtype=dtype) for _ in range(2)]
    for s, length in enumerate(keys):
        for cache, t in zip(caches, (k, v), strict=True):
            rows = t[int(cu_k[s]) : int(cu_k[s + 1])]
            store_heads(rows, cache, slots[s].expand(length), torch.arange(length))
    got = torch.empty_like(q)
    cache_attention(q, *caches, cu_q, slots, torch.tensor(keys), scoring, out=got, isa_name=isa)
    assert torch.equal(got, want)


def test_many_queries_read_a_cache_too():
    q, k = torch.randn(40, 4, 16), torch.randn(1, 2, 200, 16)
    got, cu_q = torch.empty_like(q), offsets([40])
    cache_attention(q, k, k, cu_q, torch.tensor([0]), torch.tensor([150]), Scoring(0.25, -1, 0), out=got)
    rows = k[0, :, :150].transpose(0, 1).contiguous()
    assert torch.equal(got, blocked(q, rows, rows, cu_q, offsets([150]), Scoring(0.25, -1, 0), ""))
