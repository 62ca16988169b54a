"""`packed_attention`: attention over the sequences of a `PackedBatch`."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.attention import attention, dropout_seed
from weft.kernels.cpu_attention import Scoring
from weft.packed.batch import PackedBatch


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: PackedBatch,
    *,
    keys: PackedBatch | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    threads: int = 0,
) -> Tensor:
    """softmax(scale q k^T + bias) v inside each sequence: q [Tq, H, D], k and v [Tk, Hkv, D] -> [Tq, H, D].

    `batch` says which rows of q form a sequence, and `keys` the same of k and v (default: as q). H must be a multiple
    of Hkv; each key head serves H / Hkv query heads. Where lengths differ, the last query is level with the last key.

    `causal` hides later keys; `window` (left, right) shows `left` keys before and `right` after a query, -1 for all.
    `alibi_slopes` [H] subtracts slope * distance from scores; `relative_bias` [H, 2 R + 1] adds the entry of the
    distance key - query, from -R to R, and beyond these the outermost. `scale` is 1 / sqrt(D) unless told.
    `dropout` drops weights with that probability; which ones is told by `seed`, an int64 tensor of one element, drawn
    from torch's generator unless given. A query that sees no key gives zeros. Differentiable in q, k, v and
    `relative_bias`.

    >>> batch = PackedBatch.from_list([torch.zeros(3), torch.zeros(2)])
    >>> q = torch.randn(5, 4, 16)
    >>> packed_attention(q, q[:, :2], q[:, :2], batch, causal=True).shape
    torch.Size([5, 4, 16])
    """
    left, right = _limits(causal, window)
    if scale is None:
        scale = float(max(q.shape[-1], 1)) ** -0.5
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes get no gradient; pass alibi_slopes.detach(), or learn a relative_bias instead")
    slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
    bias = None if relative_bias is None else relative_bias.to(torch.float32).contiguous()
    cu_k = (keys or batch).cu_seqlens
    seed = dropout_seed() if dropout and seed is None else seed
    scoring = Scoring(scale, left, right, slopes, bias, dropout, seed)
    return attention(q, k, v, batch.cu_seqlens, cu_k, scoring, threads=threads)


def _limits(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window is (left, right), each a number of keys or -1 for all, got {window}")
    return left, 0 if causal else right
