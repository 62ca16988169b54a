"""Packed attention as torch ops: differentiable by recomputation, compilable, for q, k, v apart or in one tensor.

    forward   S = scale q k^T + bias       P = softmax(S)       out = P v
    backward  dv = P^T dout    dS = P (dout v^T - sum(dout out))    dq = scale dS k    dk = scale dS^T q
              dbias = dS summed over equal distances
    dropout   P is multiplied by M, which is 0 or 1 / (1 - dropout), a hash of (seed, head, query, key): nothing of size
              queries x keys is kept for the backward, which hashes again

All sequences lie end to end; `cu_q` and `cu_k` say where each starts. The bits of a sequence's output and gradients
depend on that sequence only: not on the batch that it is in or the number of threads. (The gradient of the bias is a
sum over the batch.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft._torch import tell_flop_counters
from weft.kernels.cpu_attention import Scoring
from weft.kernels.dispatch import kernels_for, refuse_tangents


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring, *, isa: str = "", threads: int = 0
) -> Tensor:
    """q [Tq, H, D], k and v [Tk, Hkv, D], offsets int32 [sequences + 1] -> [Tq, H, D].

    >>> q, cu = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> attention(q, q, q, cu, cu, Scoring(scale=0.25)).shape
    torch.Size([5, 2, 16])
    """
    s = scoring
    refuse_tangents("attention", q=q, k=k, v=v, bias=s.bias)
    tell_flop_counters(_FLOPS)
    out: Tensor
    out, _ = _op(
        q, k, v, cu_q, cu_k, s.slopes, s.bias, s.seed, s.scale, s.left, s.right, s.dropout, isa, threads,
        _keeps(q, k, v, s.bias),
    )  # fmt: skip
    return out


def self_attention(
    qkv: Tensor, cu: Tensor, scoring: Scoring, *, heads: int, kv_heads: int, isa: str = "", threads: int = 0
) -> Tensor:
    """qkv [T, H + 2 Hkv, D], as one matmul gives it, -> [T, H, D]; its gradient is one tensor too."""
    s = scoring
    refuse_tangents("attention", qkv=qkv, bias=s.bias)
    tell_flop_counters(_FLOPS)
    out: Tensor
    out, _ = _self_op(
        qkv, cu, s.slopes, s.bias, s.seed, s.scale, s.left, s.right, s.dropout, heads, kv_heads, isa, threads,
        _keeps(qkv, s.bias),
    )  # fmt: skip
    return out


def dropout_seed() -> Tensor:
    """A seed for the dropout of one call: int64 [1], from torch's generator, so that `torch.manual_seed` repeats it."""
    return torch.randint(torch.iinfo(torch.int64).max, (1,))


def _keeps(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def split_heads(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [T, H, D], k and v [T, Hkv, D] of qkv [T, H + 2 Hkv, D]."""
    q, k, v = qkv.split_with_sizes([heads, kv_heads, kv_heads], 1)
    return q, k, v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scoring: Scoring, isa: str, threads: int, keep: bool
) -> tuple[Tensor, Tensor]:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]) if keep else (0,), dtype=torch.float32)
    kernels_for(q).attention(
        q, k, v, cu_q, cu_k, scoring, out=out, lse=lse if keep else None, isa_name=isa, threads=threads
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("weft::attention", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, slopes: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, scale: float, left: int, right: int, dropout: float, isa: str, threads: int, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(q, k, v, cu_q, cu_k, Scoring(scale, left, right, slopes, bias, dropout, seed), isa, threads, keep)


@_op.register_fake
def _(q, k, v, cu_q, cu_k, slopes, bias, seed, scale, left, right, dropout, isa, threads, keep):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]) if keep else (0,), dtype=torch.float32)


@torch.library.custom_op("weft::attention_grad", mutates_args=())
def _grad_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    slopes: Tensor | None, bias: Tensor | None, seed: Tensor | None, scale: float, left: int, right: int,
    dropout: float, isa: str, threads: int, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    dbias = q.new_zeros(bias.shape if needs_bias and bias is not None else (0,), dtype=torch.float32)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    kernels_for(q).attention_grad(
        dout.contiguous(), q, k, v, out, lse, cu_q, cu_k, Scoring(scale, left, right, slopes, bias, dropout, seed),
        dq=dq, dk=dk, dv=dv, dbias=dbias if needs_bias else None, isa_name=isa, threads=threads,
    )  # fmt: skip
    return dq, dk, dv, dbias


@_grad_op.register_fake
def _(dout, q, k, v, out, lse, cu_q, cu_k, slopes, bias, seed, scale, left, right, dropout, isa, threads, needs_bias):  # type: ignore[no-untyped-def]
    dbias = q.new_empty(bias.shape if needs_bias else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, slopes, bias, seed, *ctx.options, keep = inputs
    out, lse = output
    ctx.kept = keep
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, slopes, bias, seed)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)


def _backward(ctx, dout: Tensor | None, _):  # type: ignore[no-untyped-def]
    if dout is None:
        return (None,) * 15
    assert ctx.kept, "attention ran without keeping what its gradient needs"
    needs_bias = ctx.needs_input_grad[6]
    tell_flop_counters(_FLOPS)
    dq, dk, dv, dbias = _grad_op(dout, *ctx.saved_tensors, *ctx.options, needs_bias)
    return dq, dk, dv, None, None, None, dbias if needs_bias else None, *(None,) * 8


_op.register_autograd(_backward, setup_context=_setup)


def _no_second(ctx, *_):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        "second derivatives of packed attention are not supported; for a gradient penalty use "
        "weft.reference.packed_attention, or the model that was packed"
    )


_grad_op.register_autograd(_no_second)


# ---- q, k and v in one tensor ----------------------------------------------------------------------------------------


@torch.library.custom_op("weft::self_attention", mutates_args=())
def _self_op(
    qkv: Tensor, cu: Tensor, slopes: Tensor | None, bias: Tensor | None, seed: Tensor | None, scale: float, left: int,
    right: int, dropout: float, heads: int, kv_heads: int, isa: str, threads: int, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = split_heads(qkv, heads, kv_heads)
    return _forward(q, k, v, cu, cu, Scoring(scale, left, right, slopes, bias, dropout, seed), isa, threads, keep)


@_self_op.register_fake
def _(qkv, cu, slopes, bias, seed, scale, left, right, dropout, heads, kv_heads, isa, threads, keep):  # type: ignore[no-untyped-def]
    tokens, _, width = qkv.shape
    return qkv.new_empty(tokens, heads, width), qkv.new_empty((heads, tokens) if keep else (0,), dtype=torch.float32)


@torch.library.custom_op("weft::self_attention_grad", mutates_args=())
def _self_grad_op(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu: Tensor, slopes: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, scale: float, left: int, right: int, dropout: float, heads: int, kv_heads: int, isa: str,
    threads: int, needs_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dqkv = qkv.new_empty(qkv.shape)
    dbias = qkv.new_zeros(bias.shape if needs_bias and bias is not None else (0,), dtype=torch.float32)
    q, k, v = split_heads(qkv.contiguous(), heads, kv_heads)
    dq, dk, dv = split_heads(dqkv, heads, kv_heads)
    kernels_for(q).attention_grad(
        dout.contiguous(), q, k, v, out, lse, cu, cu, Scoring(scale, left, right, slopes, bias, dropout, seed),
        dq=dq, dk=dk, dv=dv, dbias=dbias if needs_bias else None, isa_name=isa, threads=threads,
    )  # fmt: skip
    return dqkv, dbias


@_self_grad_op.register_fake
def _(  # type: ignore[no-untyped-def]
    dout, qkv, out, lse, cu, slopes, bias, seed, scale, left, right, dropout, heads, kv_heads, isa, threads, needs_bias
):
    return qkv.new_empty(qkv.shape), qkv.new_empty(bias.shape if needs_bias else (0,), dtype=torch.float32)


def _self_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, cu, slopes, bias, seed, *ctx.options, keep = inputs
    out, lse = output
    ctx.kept = keep
    ctx.save_for_backward(qkv, out, lse, cu, slopes, bias, seed)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)


def _self_backward(ctx, dout: Tensor | None, _):  # type: ignore[no-untyped-def]
    if dout is None:
        return (None,) * 14
    assert ctx.kept, "attention ran without keeping what its gradient needs"
    needs_bias = ctx.needs_input_grad[3]
    tell_flop_counters(_FLOPS)
    dqkv, dbias = _self_grad_op(dout, *ctx.saved_tensors, *ctx.options, needs_bias)
    return dqkv, None, None, dbias if needs_bias else None, *(None,) * 10


_self_op.register_autograd(_self_backward, setup_context=_self_setup)
_self_grad_op.register_autograd(_no_second)


# ---- for FlopCounterMode ---------------------------------------------------------------------------------------------


def _pairs(cu_q: Tensor, cu_k: Tensor) -> int:
    """Queries times keys, over all sequences; as torch counts its own attention, whatever of it is hidden."""
    return int((cu_q.diff().to(torch.int64) * cu_k.diff().to(torch.int64)).sum())


_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.weft.attention: lambda q, k, v, cu_q, cu_k, *_, **__: 4 * q.shape[1] * q.shape[2] * _pairs(cu_q, cu_k),
    torch.ops.weft.attention_grad: lambda dout, q, k, v, out, lse, cu_q, cu_k, *_, **__: (
        10 * q.shape[1] * q.shape[2] * _pairs(cu_q, cu_k)
    ),
    torch.ops.weft.self_attention: lambda qkv, cu, slopes, bias, seed, scale, left, right, dropout, heads, *_, **__: (
        4 * heads * qkv.shape[2] * _pairs(cu, cu)
    ),
    torch.ops.weft.self_attention_grad: lambda dout, qkv, out, lse, cu, *_, **__: (
        10 * dout.shape[1] * dout.shape[2] * _pairs(cu, cu)
    ),
}
