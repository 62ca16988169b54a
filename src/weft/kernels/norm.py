"""Norms, rotary positions and gates as torch ops, each in one pass over its rows, with gradients.

    norm     z = x + bias + residual     y = (z - mean) rstd weight + beta        (RMSNorm: mean = 0, beta = 0)
             dz = rstd (g - mean(g) - xhat mean(g xhat)) + dz_of_total            g = dy weight, xhat = (z - mean) rstd
    rotary   (a, b) -> (a cos - b sin, b cos + a sin) for the two halves of a head; the gradient turns back
    gate     y = act(a) b,  x = [a, b]   da = dy b act'(a)     db = dy act(a)

A row's bits depend on that row only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.kernels.dispatch import kernels_for, refuse_tangents
from weft.kernels.matmul import activation_grad


class NormOutput(NamedTuple):
    """What a norm gives: its output, and the sum that it was taken of, which the next residual needs."""

    out: Tensor
    total: Tensor


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """x / rms(x) * weight over rows of N: weight [N], or None for ones."""

    weight: Tensor | None = None
    eps: float = 1e-6

    @property
    def beta(self) -> None:
        """What a norm adds at the end; this one nothing."""
        return


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias over rows of N: weight and bias [N], or None for ones and zeros."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5

    @property
    def beta(self) -> Tensor | None:
        """What a norm adds at the end."""
        return self.bias


def add_and_norm(x: Tensor, norm: RMSNorm | LayerNorm, residual: Tensor | None = None) -> NormOutput:
    """norm(x + residual), and x + residual: [M, N]. Differentiable.

    >>> normed = add_and_norm(torch.ones(2, 4), RMSNorm(), torch.ones(2, 4))
    >>> normed.total[0, 0].item(), round(normed.out[0, 0].item(), 3)
    (2.0, 1.0)
    """
    return _norm(x, None, residual, norm.weight, norm.beta, norm.eps, isinstance(norm, RMSNorm), "", 0)


def add_bias_residual_layernorm(
    x: Tensor, weight: Tensor | None, beta: Tensor | None, *, bias: Tensor | None = None,
    residual: Tensor | None = None, eps: float = 1e-5, isa: str = "", threads: int = 0,
) -> NormOutput:  # fmt: skip
    """layernorm(x + bias + residual) * weight + beta over the last dim: x and residual [M, N], the others [N].

    >>> x = torch.randn(3, 8)
    >>> torch.allclose(add_bias_residual_layernorm(x, None, None).out, F.layer_norm(x, [8]), atol=1e-6)
    True
    """
    return _norm(x, bias, residual, weight, beta, eps, False, isa, threads)


def rmsnorm(
    x: Tensor, weight: Tensor | None, *, residual: Tensor | None = None, eps: float = 1e-6, isa: str = "",
    threads: int = 0,
) -> NormOutput:  # fmt: skip
    """(x + residual) / rms(x + residual) * weight over the last dim: x and residual [M, N], weight [N]."""
    return _norm(x, None, residual, weight, None, eps, True, isa, threads)


def _norm(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, beta: Tensor | None, eps: float,
    rms: bool, isa: str, threads: int,
) -> NormOutput:  # fmt: skip
    refuse_tangents("a norm", x=x, bias=bias, residual=residual, weight=weight, beta=beta)
    out, total, _, _ = _norm_op(x, bias, residual, weight, beta, eps, rms, isa, threads)
    return NormOutput(out, x if bias is None and residual is None else total)


@torch.library.custom_op("weft::norm", mutates_args=())
def _norm_op(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, weight: Tensor | None, beta: Tensor | None, eps: float,
    rms: bool, isa: str, threads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    out, adds = x.new_empty(x.shape), bias is not None or residual is not None
    total = x.new_empty(x.shape if adds else (0,))
    mean, rstd = (x.new_empty(x.shape[0], 1, dtype=torch.float32) for _ in range(2))
    kernels_for(x).norm(
        _by_row(x), weight, beta, out=out, eps=eps, rms=rms, bias=bias,
        residual=None if residual is None else _by_row(residual), total=total if adds else None, mean=mean, rstd=rstd,
        isa_name=isa, threads=threads,
    )  # fmt: skip
    return out, total, mean, rstd


@_norm_op.register_fake
def _(x, bias, residual, weight, beta, eps, rms, isa, threads):  # type: ignore[no-untyped-def]
    adds = bias is not None or residual is not None
    stat = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape if adds else (0,)), stat, stat.clone()


def _by_row(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 else t.contiguous()


def _norm_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, bias, residual, weight, beta, _, ctx.rms, _, _ = inputs
    _, total, mean, rstd = output
    ctx.adds = bias is not None or residual is not None
    ctx.save_for_backward(total if ctx.adds else x, weight, beta, mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)


def _norm_backward(ctx, dout: Tensor | None, dtotal: Tensor | None, _mean, _rstd):  # type: ignore[no-untyped-def]
    z, weight, beta, mean, rstd = ctx.saved_tensors
    needs_x, needs_bias, needs_residual, needs_weight, needs_beta, *_ = ctx.needs_input_grad
    dz = dtotal if ctx.adds else None
    dweight = dbeta = None
    if dout is not None:
        gradient = _rms_grad if ctx.rms else _layer_grad
        d, dweight, dbeta = gradient(dout, z, mean, rstd, weight, beta)
        dz = d if dz is None else dz + d
    dbias = dz.sum(0) if needs_bias and dz is not None else None
    return (
        dz if needs_x else None, dbias, dz if needs_residual else None, dweight if needs_weight else None,
        dbeta if needs_beta else None, None, None, None, None,
    )  # fmt: skip


_norm_op.register_autograd(_norm_backward, setup_context=_norm_setup)


def _layer_grad(
    dout: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wanted = [True, weight is not None, beta is not None]
    if z.is_cpu:  # there ATen wants the statistics in the type of its input, on a GPU in float32
        mean, rstd = mean.to(z.dtype), rstd.to(z.dtype)
    d, dw, db = torch.ops.aten.native_layer_norm_backward(
        dout.contiguous(), z.contiguous(), [z.shape[1]], mean, rstd, weight, beta, wanted
    )
    return d, dw if wanted[1] else None, db if wanted[2] else None


def _rms_grad(
    dout: Tensor, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    hat = z.float() * rstd
    g = dout.float() if weight is None else dout.float() * weight.float()
    d = (rstd * (g - hat * (g * hat).mean(1, keepdim=True))).to(z.dtype)
    return d, None if weight is None else (dout.float() * hat).sum(0).to(weight.dtype), None


# ---- rotary ----------------------------------------------------------------------------------------------------------


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, heads: int, isa: str = "", threads: int = 0
) -> Tensor:
    """x [T, H, D] with its first `heads` heads turned; cos and sin float32 [positions, D / 2], positions [T]."""
    refuse_tangents("rotary", x=x)
    turned: Tensor = _rotary_op(x, cos, sin, positions, heads, 1.0, isa, threads)
    return turned


@torch.library.custom_op("weft::rotary", mutates_args=())
def _rotary_op(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, heads: int, sign: float, isa: str, threads: int
) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    kernels_for(x).rotary(out, cos, sin, positions, out=out, heads=heads, sign=sign, isa_name=isa, threads=threads)
    return out


@_rotary_op.register_fake
def _(x, cos, sin, positions, heads, sign, isa, threads):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _rotary_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, cos, sin, positions, *ctx.options = inputs
    ctx.save_for_backward(cos, sin, positions)


def _rotary_backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    heads, sign, isa, threads = ctx.options
    return _rotary_op(dy, *ctx.saved_tensors, heads, -sign, isa, threads), *(None,) * 7


_rotary_op.register_autograd(_rotary_backward, setup_context=_rotary_setup)


# ---- gate ------------------------------------------------------------------------------------------------------------


def gate(x: Tensor, *, activation: str, isa: str = "", threads: int = 0) -> Tensor:
    """activation(x[:, :N]) * x[:, N:]: x [M, 2 N] -> [M, N]. SwiGLU is "silu", GeGLU "gelu"."""
    refuse_tangents("gate", x=x)
    gated: Tensor = _gate_op(x, activation, isa, threads)
    return gated


@torch.library.custom_op("weft::gate", mutates_args=())
def _gate_op(x: Tensor, activation: str, isa: str, threads: int) -> Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    kernels_for(x).gate(_by_row(x), activation=activation, out=out, isa_name=isa, threads=threads)
    return out


@_gate_op.register_fake
def _(x, activation, isa, threads):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _gate_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.activation, _, _ = inputs
    ctx.save_for_backward(x)


def _gate_backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    (x,) = ctx.saved_tensors
    a, b = x.chunk(2, 1)
    return torch.cat([activation_grad(dy * b, a, ctx.activation), dy * _ACTIVATE[ctx.activation](a)], 1), *(None,) * 3


_gate_op.register_autograd(_gate_backward, setup_context=_gate_setup)

_ACTIVATE = {
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
