"""The launchers of packed attention: the arguments of `weft.kernels.cpu_attention`, on the device.

Neither has ever run on a GPU: they were run in Triton's interpreter and compiled for sm80, sm90 and sm100.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from weft.kernels.cpu_attention import MAX_HEAD_DIM, Scoring
from weft.kernels.triton import checks, configs
from weft.kernels.triton.attention_forward import attention_kernel
from weft.kernels.triton.attention_grad_kv import attention_grad_kv_kernel
from weft.kernels.triton.attention_grad_q import attention_grad_q_kernel

_NO_LIMIT = 2**29  # distances and limits are added in 32 bits


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring, *,
    out: Tensor, lse: Tensor | None = None, isa_name: str = "", threads: int = 0, config: configs.Config | None = None,
) -> None:  # fmt: skip
    """q [Tq, H, D], k and v [Tk, Hkv, D], cu_q and cu_k [sequences + 1] -> out [Tq, H, D]; lse takes [H, Tq].

    The offsets are trusted to rise from 0 to the number of tokens: to look would make the host wait for the device.
    This has never run on a GPU.
    """
    _check(q, k, v, cu_q, cu_k, scoring)
    checks.like(out, "out", tuple(q.shape), q.dtype, q.device)
    if lse is not None:
        _check_statistics(lse, "lse", q)
    tokens, heads, width = q.shape
    if not tokens or not heads:
        return
    padded = max(next_power_of_2(width), 16)
    chosen = config or configs.attention_forward(q.dtype, padded)[0]
    blocks, count = _blocks(cu_q, tokens, dict(chosen.blocks)["BLOCK_M"])
    attention_kernel[(count, heads)](
        q, k, v, out, lse, scoring.slopes, cu_q, cu_k, blocks, cu_q.numel() - 1, tokens, *_options(scoring),
        heads // k.shape[1], width, *_strides(q, k, v, out), PRECISION="ieee", BLOCK_D=padded, **chosen.launch,
    )  # fmt: skip


def attention_grad(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    scoring: Scoring, *, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None = None,
    isa_name: str = "", threads: int = 0, config: configs.Config | None = None,
) -> None:  # fmt: skip
    """The gradients of `attention`, from its `out` and `lse`: the same bits at every run.

    This has never run on a GPU.
    """
    _check(q, k, v, cu_q, cu_k, scoring)
    if dbias is not None:
        raise ValueError("the relative bias has no kernel for the GPU yet; give alibi slopes, or compute on the CPU")
    for t, name, like in ((dout, "dout", q), (out, "out", q), (dq, "dq", q), (dk, "dk", k), (dv, "dv", v)):
        checks.like(t, name, tuple(like.shape), q.dtype, q.device)
    _check_statistics(lse, "lse", q)
    (tokens, heads, width), (key_tokens, kv_heads) = q.shape, k.shape[:2]
    padded = max(next_power_of_2(width), 16)
    for_q = config or configs.attention_grad_q(q.dtype, padded)[0]
    for_kv = config or configs.attention_grad_kv(q.dtype, padded)[0]
    delta = torch.empty_like(lse)
    scored = (*_options(scoring), heads // kv_heads, width)
    if tokens and heads:
        blocks, count = _blocks(cu_q, tokens, dict(for_q.blocks)["BLOCK_M"])
        attention_grad_q_kernel[(count, heads)](
            dout, q, k, v, out, dq, lse, delta, scoring.slopes, cu_q, cu_k, blocks, cu_q.numel() - 1, tokens, *scored,
            *_strides(dout, q, k, v, out, dq), PRECISION="ieee", BLOCK_D=padded, **for_q.launch,
        )  # fmt: skip
    if key_tokens and heads:
        blocks, count = _blocks(cu_k, key_tokens, dict(for_kv.blocks)["BLOCK_N"])
        attention_grad_kv_kernel[(count, kv_heads)](
            dout, q, k, v, dk, dv, lse, delta, scoring.slopes, cu_q, cu_k, blocks, cu_q.numel() - 1, tokens, *scored,
            *_strides(dout, q, k, v, dk, dv), PRECISION="ieee", BLOCK_D=padded, **for_kv.launch,
        )  # fmt: skip


def _blocks(cu: Tensor, tokens: int, size: int) -> tuple[Tensor, int]:
    """Where the blocks of each sequence start, int32 [sequences + 1], and a bound on how many there are.

    The bound is known without asking the device; programs past the last block return at once.
    """
    lengths = cu[1:] - cu[:-1]
    starts = torch.zeros_like(cu)
    torch.cumsum((lengths + size - 1) // size, 0, dtype=torch.int32, out=starts[1:])
    return starts, min(cdiv(tokens, size) + cu.numel() - 1, tokens)


def _options(scoring: Scoring) -> tuple[float, int, int]:
    left, right = (limit if 0 <= limit < _NO_LIMIT else _NO_LIMIT for limit in (scoring.left, scoring.right))
    return scoring.scale, left, right


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in (t.stride(0), t.stride(1))]


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q must have shape [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim], "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    checks.on_device(q, "q")
    dtype, (tokens, heads, width) = checks.dtype_of(q, "q"), q.shape
    if not 1 <= width <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be from 1 to {MAX_HEAD_DIM}, got {width}")
    if k.shape[1] < 1 or heads % k.shape[1]:
        raise ValueError(f"k must have a number of heads that divides {heads}, got {list(k.shape)}")
    for t, name, shape in ((q, "q", q.shape), (k, "k", (k.shape[0], k.shape[1], width)), (v, "v", k.shape)):
        checks.like(t, name, tuple(shape), dtype, q.device)
    if max(tokens, k.shape[0]) >= _NO_LIMIT:
        raise ValueError(f"at most {_NO_LIMIT - 1} tokens, got {tokens} and {k.shape[0]}")
    checks.counters(cu_q, "cu_q", 1, q.device)
    checks.counters(cu_k, "cu_k", 1, q.device)
    if cu_q.numel() != cu_k.numel():
        raise ValueError(f"cu_q has {cu_q.numel() - 1} sequences and cu_k {cu_k.numel() - 1}; they must be as many")
    if scoring.bias is not None or scoring.dropout:
        raise ValueError(
            "the relative bias and dropout have no kernel for the GPU yet; give alibi slopes, or compute on the CPU"
        )
    if scoring.slopes is not None:
        checks.like(scoring.slopes, "slopes", (heads,), torch.float32, q.device)


def _check_statistics(t: Tensor, name: str, q: Tensor) -> None:
    if t.shape != (q.shape[1], q.shape[0]) or t.dtype != torch.float32 or not t.is_contiguous() or t.device != q.device:
        raise ValueError(
            f"{name} must be contiguous float32 of shape {[q.shape[1], q.shape[0]]} on {q.device}, "
            f"got {t.dtype} {list(t.shape)} on {t.device}"
        )
