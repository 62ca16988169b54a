"""The gradient of a reshard: a reshard back.

forward    x: src layout -> y: dst layout
backward   dy: dst layout -> dx: src layout, with Replicate where x was Partial (each term's gradient is dy)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from weft.layout import Layout
from weft.reshard.job import Job
from weft.reshard.units import TensorSpec


def move(job: Job) -> Tensor:
    """Runs a job of one tensor; the result is part of the graph on every rank.

    A rank that has nothing of the source still takes part in the backward pass: an empty tensor that
    requires a gradient ties it to the graph.
    """
    anchor = torch.empty(0, requires_grad=True)
    result: Tensor = _Move.apply(job.src.get(0), anchor, job)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, source: Tensor | None, anchor: Tensor, job: Job) -> Tensor:
        ctx.job = job
        ctx.averaged = job.specs[0].src.reduce_op == "avg"
        return job.run()[job.specs[0].name]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        job: Job = ctx.job
        spec = gradient_spec(job.specs[0])
        shard = {spec.name: grad.contiguous()} if job.rank in spec.src.mesh.ranks else {}
        back = Job(job.comm, [spec], shard, {}, job.options, device=job.device).run()[spec.name]
        if ctx.averaged:
            back = back / spec_terms(job.specs[0])
        return back if job.src else None, None, None


def spec_terms(spec: TensorSpec) -> int:
    """How many terms a Partial source has."""
    return int(spec.src.holders(len(spec.shape)).shape[1])
