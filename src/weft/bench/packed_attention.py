"""Attention alone: packed against padded, eager, nested and FlexAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.bench.harness import Case
from weft.bench.packed_inputs import Padded, batch, uniform
from weft.packed import PackedBatch, packed_attention

HEADS, WIDTH = 12, 64


def attention_cases() -> list[tuple[Case, float, dict[str, str]]]:
    """The case, its flops, and who could not take part."""
    return [_case(f"attention, uniform {s}, batch 16", batch(uniform(s), 16)) for s in (512,)]


def _case(name: str, padded: Padded) -> tuple[Case, float, dict[str, str]]:
    q, k, v = (torch.randn(*padded.ids.shape, HEADS, WIDTH).transpose(1, 2).contiguous() for _ in range(3))
    seen = padded.mask[:, None, None].bool()
    packed = PackedBatch.from_padded(padded.ids, padded.mask)
    rows = [packed.gather(t.transpose(1, 2)) for t in (q, k, v)]
    systems = {
        "weft": lambda: packed_attention(rows[0], rows[1], rows[2], packed),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen),
        "eager": lambda: _eager(q, k, v, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)),
    }
    want = packed.gather(systems["sdpa"]().transpose(1, 2))
    absent = {}
    for other, build in (("nested", _nested), ("flex", _flex)):
        try:
            call = build(rows, packed)
            torch.testing.assert_close(call(), want, atol=1e-4, rtol=1e-3)
            systems[other] = call
        except Exception as error:  # a peer's own failure is its row's text, not the end of the benchmark
            text = str(error).splitlines()[0] if str(error) else ""
            absent[other] = f"{type(error).__name__}: {text[:80]}"
    flops = 4.0 * HEADS * WIDTH * sum(n * n for n in padded.lengths)
    return Case(name, systems, {"tokens": padded.tokens, "padded": padded.ids.numel()}), flops, absent


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As transformers' eager attention does it."""
    weights = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(WIDTH)) + mask
    return torch.matmul(F.softmax(weights, dim=-1), v)


def _nested(rows: list[Tensor], packed: PackedBatch) -> Any:
    q, k, v = (packed.with_values(t).to_nested().transpose(1, 2) for t in rows)
    return lambda: F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


def _flex(rows: list[Tensor], packed: PackedBatch) -> Any:
    """FlexAttention on packed rows, with a mask that keeps sequences apart."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    owner = torch.arange(packed.sequences).repeat_interleave(packed.lengths)

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return owner[i] == owner[j]

    mask = create_block_mask(same, None, None, packed.tokens, packed.tokens, device="cpu")
    q, k, v = (t.transpose(0, 1)[None].contiguous() for t in rows)
    call = torch.compile(flex_attention)
    return lambda: call(q, k, v, block_mask=mask)[0].transpose(0, 1)
