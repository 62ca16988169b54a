"""Attention to a cache, and of few queries: the bits of the blocked kernel, which has its own plain twin."""

import pytest
import torch

from weft import _core
from weft.kernels import cpu_attention
from weft.kernels.cpu_attention import Scoring, cache_attention, store_heads

ISAS = _core.available_isas()
WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (40, 0), "around": (5, 3)}


def blocked(q, k, v, cu_q, cu_k, scoring, isa):
    """The kernel for many queries: it is the one that can give lse."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    cpu_attention.attention(q, k, v, cu_q, cu_k, scoring, out=out, lse=lse, isa_name=isa)
    return out


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([11])}, "lengths are from 0 to the capacity, 10"),
        ({"slots": torch.tensor([2])}, "slots are from 0 to 1"),
        ({"cu_q": torch.tensor([0, 2], dtype=torch.int32)}, "cu_q must be int32, from 0 to 1"),
        ({"v": torch.zeros(2, 1, 9, 8)}, "expected q"),
        ({"k": torch.zeros(2, 1, 8, 10).mT}, "a cache is contiguous"),
    ],
)
def test_what_would_be_out_of_bounds_is_refused(change, message):
    given = {
        "q": torch.zeros(1, 2, 8), "k": torch.zeros(2, 1, 10, 8), "v": torch.zeros(2, 1, 10, 8),
        "cu_q": torch.tensor([0, 1], dtype=torch.int32), "slots": torch.tensor([0]), "lengths": torch.tensor([3]),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        cache_attention(*(given | change).values(), Scoring(1.0), out=torch.zeros(1, 2, 8))


def test_rows_beyond_the_cache_are_refused():
    with pytest.raises(ValueError, match="positions are from 0 to 2"):
        store_heads(torch.zeros(1, 1, 2), torch.zeros(1, 1, 3, 2), torch.tensor([0]), torch.tensor([3]))
