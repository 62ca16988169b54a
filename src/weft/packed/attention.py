"""Attention over texts that lie end to end: `packed_attention` on a `PackedBatch`, and the same with the signature of
flash-attn's varlen function, for code that was written for it."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.errors import Unsupported
from weft.kernels.attention import attention, dropout_seed
from weft.kernels.cpu_attention import Scoring
from weft.packed.batch import PackedBatch, check_offsets


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
    distance key - query, from -R to R, and beyond these the outermost. `scale` is 1 / sqrt(D) by default.
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


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """`packed_attention` as flash-attn's function of this name is called: change the import, and the code runs here.

    q [Tq, H, D], k and v [Tk, Hkv, D], offsets int32 [B + 1] -> [Tq, H, D]. `causal` is aligned at the bottom right:
    the last query is level with the last key. The longest lengths are only compared with the offsets, and results are
    always deterministic. `softcap`, attention weights, paged keys and slopes of each sequence are errors.

    >>> q, cu = torch.randn(5, 4, 16), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu, cu, 3, 3, causal=True).shape
    torch.Size([5, 4, 16])
    """
    unsupported = {
        "softcap": softcap != 0.0,
        "return_attn_probs": return_attn_probs,
        "block_table": block_table is not None,
        "alibi_slopes of each sequence": alibi_slopes is not None and alibi_slopes.dim() != 1,
    }
    for name, asked in unsupported.items():
        if asked:
            raise Unsupported(f"flash_attn_varlen_func: {name} is not supported; leave it out")
    for t, offsets, longest, name in (
        (q, cu_seqlens_q, max_seqlen_q, "q"), (k, cu_seqlens_k, max_seqlen_k, "k"),
    ):  # fmt: skip
        check_offsets(offsets, t.shape[0], f"cu_seqlens_{name}")
        found = int(offsets.diff().max()) if offsets.numel() > 1 else 0
        if found > longest:
            raise ValueError(f"max_seqlen_{name} is {longest}, but cu_seqlens_{name} has a sequence of {found}")
    left, right = _limits(causal, window_size)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes get no gradient; pass alibi_slopes.detach()")
    slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32).contiguous()
    scale = float(max(q.shape[-1], 1)) ** -0.5 if softmax_scale is None else softmax_scale
    scoring = Scoring(scale, left, right, slopes, None, dropout_p, dropout_seed() if dropout_p else None)
    return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, scoring)


def _limits(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    if left < -1 or right < -1:
        raise ValueError(f"window is (left, right), each a number of keys or -1 for all, got {window}")
    return left, 0 if causal else right
