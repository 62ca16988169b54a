"""The gradient of a reshard: a reshard back.

forward    x: src layout -> y: dst layout
backward   dy: dst layout -> dx: src layout, with Replicate where x was Partial (each term's gradient is dy)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from weft.comm import Group
from weft.layout import Layout
from weft.reshard.job import Job, Options
from weft.reshard.memory import memory_of
from weft.reshard.units import TensorSpec


@dataclass(frozen=True)
class WayBack:
    """What the backward pass needs to know of a move. Not the move itself: that holds the result, which holds this.

    number: which call it was, so that ranks which go back in different orders notice
    """

    comm: Group
    spec: TensorSpec
    options: Options
    rank: int
    device: torch.device
    number: int


def differentiate(way: WayBack, source: Tensor | None, move: Callable[[], Tensor]) -> Tensor:
    """What `move` returns, as part of the graph on every rank.

    A rank that has nothing of the source still takes part in the backward pass: an empty tensor that
    requires a gradient ties it to the graph.
    """
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    result: Tensor = _Move.apply(source, anchor, way, move)  # type: ignore[no-untyped-call]
    return result


def gradient_spec(spec: TensorSpec) -> TensorSpec:
    """The way back of a tensor.

    >>> from weft.layout import Mesh
    >>> a = Layout(Mesh.grid(1, 2), [Replicate(), Partial()])
    >>> b = Layout(Mesh.grid(1, 2), [Replicate(), Replicate()])
    >>> gradient_spec(TensorSpec("x", (4,), torch.float32, a, b, torch.float32)).dst.notation(1)
    'R'
    """
    whole = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.src.placements)
    back = Layout(spec.src.mesh, whole, spec.src.order)
    return replace(spec, src=spec.dst, dst=back, dtype=spec.dst_dtype, dst_dtype=spec.dtype)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor | None, anchor: Tensor, way: WayBack, move: Callable[[], Tensor]) -> Tensor:
        ctx.way = way
        ctx.nothing = None if source is None else source.new_zeros(source.shape if source.numel() == 0 else 0)
        return move()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        way: WayBack = ctx.way
        spec = gradient_spec(way.spec)
        shard = {spec.name: memory_of(grad).contiguous()} if way.rank in spec.src.mesh.ranks else {}
        note = f"gradient of reshard {way.number}"
        job = Job(way.comm, [spec], shard, {}, way.options, device=way.device, note=note)
        back = job.run()[spec.name]
        if way.spec.src.reduce_op == "avg":
            back = back / spec_terms(way.spec)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # A rank that has nothing of the source may have got it from a reshard, whose backward pass it has to join.
        return back if way.rank in spec.dst.mesh.ranks else ctx.nothing, None, None, None


def spec_terms(spec: TensorSpec) -> int:
    """How many terms a Partial source has."""
    return int(spec.src.holders(len(spec.shape)).shape[1])
