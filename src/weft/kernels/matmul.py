"""`linear` on a weight that is packed once: differentiable, compilable, with fused epilogues and tile signals.

    forward   z = x w^T + b         x [M, K], w [N, K], b [N]     -> z [M, N]
              y = act(z) + r        r [M, N]                      -> y [M, N]
    dgrad     dz = dy act'(z)       dx = dz w                     -> [M, K]
    wgrad     dw = dz^T x  [N, K],  db = sum_rows dz  [N],  dr = dy

A row of y depends on its own row of x (and r), on w and on b, and on nothing else: not on M, its place, the number of
threads, the tiles, their order or their signals. Tests hold this with `torch.equal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from weft._torch import tell_flop_counters
from weft.comm.host_collectives import HostGroup
from weft.kernels import cpu
from weft.kernels.dispatch import is_plain, kernels_for, layout_on, refuse_tangents
from weft.kernels.freshness import Stamp
from weft.kernels.tiles import Ready, Rows, TileOutput, TileSchedule


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] in the order in which the matmul reads it. Make it with `from_dense`, once.

    `source` is the dense weight when that requires grad: it is what the gradient flows to, and changing it without
    packing again is an error (inside a compiled function: when it is traced). A frozen weight is not watched.
    """

    data: Tensor
    n: int
    k: int
    isa: str
    source: Tensor | None = None
    stamp: Stamp | None = None

    @classmethod
    def from_dense(cls, w: Tensor, *, isa: str = "", threads: int = 0) -> PackedWeight:
        """Packs w [N, K], of any strides, so that `from_dense(w.t())` gives the transposed product.

        >>> packed = PackedWeight.from_dense(torch.eye(3))
        >>> torch.equal(packed.to_dense(), torch.eye(3))
        True
        """
        if w.dim() != 2:
            raise ValueError(f"a weight has shape [N, K], got {list(w.shape)}")
        refuse_tangents("PackedWeight.from_dense", w=w)
        isa = isa or layout_on(w.device.type, w.dtype)
        source = w if w.requires_grad else None
        stamp = _stamp(source)  # before it is packed: a write in between must show
        dense = w.detach()
        # The first call of any op imports half of torch; a plain tensor needs none of it.
        data = kernels_for(dense).pack(dense, isa, threads) if is_plain(dense) else _pack(dense, isa, threads)
        return cls(data, w.shape[0], w.shape[1], isa, source, stamp)

    @classmethod
    def _of(cls, data: Tensor, n: int, k: int, isa: str, source: Tensor | None) -> PackedWeight:
        return cls(data, n, k, isa, source, _stamp(source))

    def __reduce__(self) -> tuple[object, ...]:  # a copy of `source` lies elsewhere
        return (PackedWeight._of, (self.data, self.n, self.k, self.isa, self.source))

    def checked_source(self) -> Tensor | None:
        """`source`, which has not changed since: else ValueError. Inside a compiled function nobody looks."""
        if self.source is None or self.stamp is None or torch.compiler.is_compiling():
            return self.source
        if self.stamp.is_broken([self.source]):
            raise ValueError(f"the dense weight changed after {self!r} was packed; pack it again with from_dense")
        return self.source

    def to_dense(self) -> Tensor:
        """A new contiguous tensor [N, K] with the packed values."""
        return kernels_for(self.data).unpack(self.data, self.n, self.k, self.isa, 0)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def __repr__(self) -> str:
        grad = ", requires_grad" if self.source is not None else ""
        return f"PackedWeight([{self.n}, {self.k}], {self.dtype}{grad})"


def linear(
    x: Tensor,
    weight: PackedWeight,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    threads: int = 0,
    schedule: TileSchedule | None = None,
    done: Tensor | None = None,
    ready: Ready | None = None,
) -> Tensor:
    """activation(x w^T + bias) + residual: x [..., K], w [N, K], bias [N], residual [..., N] -> [..., N].

    float32, or bfloat16 with float32 sums. `activation` is None, "gelu", "gelu_tanh", "silu" or "relu". Rows of `x`,
    `residual` and `out` may be strided. `threads=0` takes as many as torch uses.

    `torch.autocast` changes nothing: the result has the type of `x`, which is that of the weight, because a packed
    weight cannot be cast without packing it again. For bfloat16 pack a bfloat16 weight, and cast `x`.

    `schedule` gives the tiles, their order and their groups; `done`, int32 counters, one a group, are bumped as tiles
    finish, and `ready` says what tiles must wait for. These, and `out`, make the call one of the executor's: it
    records no gradient.

    >>> w = torch.randn(8, 4)
    >>> y = linear(torch.randn(3, 4), PackedWeight.from_dense(w), bias=torch.zeros(8), activation="gelu")
    >>> y.shape
    torch.Size([3, 8])
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a torch tensor, got {type(x).__name__}")
    if not isinstance(weight, PackedWeight):
        raise ValueError(f"weight must be a PackedWeight, got {type(weight).__name__}; PackedWeight.from_dense(w)")
    if x.dim() < 1 or x.shape[-1] != weight.k:
        raise ValueError(f"x must have shape [..., {weight.k}] for a weight {weight!r}, got {list(x.shape)}")
    if not (x.is_cpu or torch.compiler.is_compiling()):
        kernels_for(x)  # raises where there are none: a meta tensor would pass for a fake one
    source = weight.checked_source()
    refuse_tangents("linear", x=x, weight=source, bias=bias, residual=residual)
    rows, added = _as_matrix(x), None if residual is None else _as_matrix(residual)
    if out is not None or schedule is not None or ready is not None or done is not None:
        return _executor_call(x, rows, weight, bias, activation, added, out, threads, schedule, done, ready)
    if is_plain(x, source, bias, residual):
        y = kernels_for(x).empty(rows.shape[0], weight.n, dtype=x.dtype, device=x.device)
        _run(rows, weight.data, weight.n, weight.isa, y, None, bias, activation, added, threads)
    else:
        keep = activation is not None and torch.is_grad_enabled()
        tell_flop_counters(_FLOPS)
        y, _ = _op(rows, weight.data, source, bias, added, activation, weight.n, weight.isa, threads, keep)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.n)


def _as_matrix(t: Tensor) -> Tensor:
    """[..., C] -> [rows, C]; not by reshape(-1, C), which cannot tell the rows where C is 0."""
    return t if t.dim() == 2 or t.dim() == 0 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def linear_tiles(
    x: Tensor | Rows,
    weight: PackedWeight,
    *,
    out: Tensor | TileOutput,
    schedule: TileSchedule,
    bias: Tensor | None = None,
    done: Tensor | None = None,
    ready: Ready | None = None,
) -> None:
    """`linear` for executors: rows of x [M, K] from anywhere, tiles of the product [M, N] to anywhere; no gradient.

    >>> from weft.kernels import Tiling
    >>> tiling = Tiling(m=4, n=64, tile_m=4, tile_n=32)
    >>> left, right = torch.empty(4, 32), torch.empty(4, 32)
    >>> x, w = Rows.stack([torch.ones(1, 3), torch.ones(3, 3)]), PackedWeight.from_dense(torch.ones(64, 3))
    >>> linear_tiles(x, w, out=TileOutput(tiling, (left, right)), schedule=TileSchedule(tiling))
    >>> right[3, 31].item()
    3.0
    """
    k = x.k if isinstance(x, Rows) else x.shape[-1]
    if k != weight.k:
        raise ValueError(f"x must have {weight.k} columns for a weight {weight!r}, got {k}")
    weight.checked_source()
    kernels_for(weight.data).linear(
        x, weight.data, weight.n, out=out, bias=bias, isa_name=weight.isa, schedule=schedule, done=done, ready=ready
    )


def _executor_call(
    x: Tensor, rows: Tensor, weight: PackedWeight, bias: Tensor | None, activation: str | None, residual: Tensor | None,
    out: Tensor | None, threads: int, schedule: TileSchedule | None, done: Tensor | None, ready: Ready | None,
) -> Tensor:  # fmt: skip
    inputs = (x, weight.source, bias, residual, out)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        raise ValueError("out=, schedule=, done= and ready= record no gradient; call under torch.no_grad()")
    if done is not None and schedule is None:
        raise ValueError("done= counts the tiles of groups, so it needs schedule= to say which those are")
    if out is None:
        out = kernels_for(x).empty(*x.shape[:-1], weight.n, dtype=x.dtype, device=x.device)
    if tuple(out.shape) != (*x.shape[:-1], weight.n):
        raise ValueError(f"out must have shape {[*x.shape[:-1], weight.n]}, got {list(out.shape)}")
    target = out if out.dim() == 2 else out.view(math.prod(out.shape[:-1]), weight.n)
    cpu.check_overlaps(target, x=rows, weight=weight.data, bias=bias, residual=residual)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    _run(rows, weight.data, weight.n, weight.isa, target, None, bias, activation, residual, threads,
         schedule=schedule, done=done, ready=ready)  # fmt: skip
    return out


def _run(
    x: Tensor, packed: Tensor, n: int, isa: str, out: Tensor, pre: Tensor | None, bias: Tensor | None,
    activation: str | None, residual: Tensor | None, threads: int, **signals: object,
) -> None:  # fmt: skip
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    kernels_for(x).linear(
        x, packed, n, out=out, pre=pre, bias=bias, activation=activation, residual=residual,
        isa_name=isa, threads=threads, **signals,
    )  # fmt: skip


def _stamp(source: Tensor | None) -> Stamp | None:
    """None inside a transform or a trace: what is packed there lives no longer than that."""
    return None if source is None or not is_plain(source.detach()) else Stamp.of([source])


# Ops of their own, so that a compiled backward can pack gradients and unpack weights.
@torch.library.custom_op("weft::pack", mutates_args=())
def _pack(w: Tensor, isa: str, threads: int) -> Tensor:
    packed = kernels_for(w).pack(w, isa, threads)
    return packed.clone() if packed.data_ptr() == w.data_ptr() else packed  # an op's result is its own memory


@_pack.register_fake
def _(w, isa, threads):  # type: ignore[no-untyped-def]
    return w.new_empty(kernels_for(w).packed_elements(w.shape[0], w.shape[1], isa))


@torch.library.custom_op("weft::unpack", mutates_args=())
def _unpack(packed: Tensor, n: int, k: int, isa: str, threads: int) -> Tensor:
    return kernels_for(packed).unpack(packed, n, k, isa, threads)


@_unpack.register_fake
def _(packed, n, k, isa, threads):  # type: ignore[no-untyped-def]
    return packed.new_empty(n, k)


@torch.library.custom_op("weft::linear", mutates_args=())
def _op(
    x: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    n: int,
    isa: str,
    threads: int,
    keep_pre: bool,
) -> tuple[Tensor, Tensor]:
    y = kernels_for(x).empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    pre = x.new_empty((x.shape[0], n) if keep_pre else (0,))
    _run(x, packed, n, isa, y, pre if keep_pre else None, bias, activation, residual, threads)
    return y, pre


@_op.register_fake
def _(x, packed, weight, bias, residual, activation, n, isa, threads, keep_pre):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], n), x.new_empty((x.shape[0], n) if keep_pre else (0,))


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, packed, weight, bias, _, ctx.activation, ctx.n, ctx.isa, ctx.threads, _ = inputs
    ctx.k = x.shape[1]
    ctx.save_for_backward(x, packed, weight, bias, output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy: Tensor | None, _):  # type: ignore[no-untyped-def]
    if dy is None:
        return (None,) * 10
    x, packed, weight, bias, pre = ctx.saved_tensors
    needs_x, _, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    if ctx.activation is not None and torch.is_grad_enabled():  # a second derivative looks through `pre`
        pre, _ = _op(x, packed, weight, bias, None, None, ctx.n, ctx.isa, ctx.threads, False)
        (dz,) = torch.autograd.grad(activated(pre, ctx.activation), pre, dy, create_graph=True)
    else:
        dz = activation_grad(dy, pre, ctx.activation)
    dx = dw = db = None
    if needs_x:
        dense = weight if weight is not None else _unpack(packed, ctx.n, ctx.k, ctx.isa, ctx.threads)
        dx = product(dz, dense.t())
    if needs_weight:
        dw = product(dz.t(), x.t())
    if needs_bias:
        db = dz.sum(0)
    return dx, None, dw, db, dy if needs_residual else None, *(None,) * 5


_op.register_autograd(_backward, setup_context=_setup)

# For torch's FlopCounterMode: those of the matmul, without the epilogue.
_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.weft.linear: lambda x, packed, weight, bias, residual, act, n, *_, **__: 2 * x.numel() * n
}


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] b[N, K]^T for matrices that are used once: by torch's own matmul where that is fast.

    >>> product(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    if a.dtype in kernels_for(a).torch_multiplies:
        return a @ b.t()
    return linear(a, PackedWeight.from_dense(b))


def activation_grad(dy: Tensor, pre: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return dy
    aten = torch.ops.aten
    if activation == "silu":
        dz: Tensor = aten.silu_backward(dy, pre)
    elif activation == "relu":
        dz = aten.threshold_backward(dy, pre, 0)
    else:
        dz = aten.gelu_backward(dy, pre, approximate="tanh" if activation == "gelu_tanh" else "none")
    return dz


def activated(z: Tensor, activation: str) -> Tensor:
    """The activation by torch's own ops, which can be differentiated any number of times."""
    if activation == "silu":
        return functional.silu(z)
    if activation == "relu":
        return functional.relu(z)
    return functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")


# ---- with the sum over the ranks of a host ---------------------------------------------------------------------------

_BLOCK_ROWS = 480  # a multiple of the strips of the matmul; fewer rows read the weight more often, 1 to 2 % slower
_WHAT = "matmul_all_reduce"


def fused_matmul_all_reduce(lean: HostGroup, x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None) -> Tensor:
    """y = all_reduce(x w^T + bias): x [M, K_r], weight [N, K_r] -> [M, N]. One rank only gives the bias [N]."""
    m, n = x.shape[0], weight.n
    room = lean.elements(x.dtype) // n
    if room == 0:
        return lean.all_reduce(linear(x, weight, bias=bias), what=_WHAT)
    out = kernels_for(x).empty(m, n, dtype=x.dtype)
    step = min(room, _BLOCK_ROWS)
    last: tuple[int, Tensor, list[Tensor]] | None = None
    for first in range(0, m, step):
        block = out[first : first + step]
        places = lean.bank(tuple(block.shape), x.dtype)
        linear(x[first : first + step], weight, bias=bias, out=places[lean.rank])
        turn = lean.publish(_WHAT)
        if last is not None:
            lean.add_up(*last, what=_WHAT)
        last = (turn, block, places)
    if last is not None:
        lean.add_up(*last, what=_WHAT)
    return out
