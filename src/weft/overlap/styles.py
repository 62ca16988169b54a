"""Styles for `torch.distributed.tensor.parallel.parallelize_module`: tensor parallelism whose layers overlap.

    plan = {"norm": SequenceParallel(), "up": ColwiseOverlap(), "down": RowwiseOverlap()}
    parallelize_module(block, mesh["tensor"], plan)

They stand in for `ColwiseParallel` and `RowwiseParallel` where activations between blocks are sharded along the
sequence. Parameters are DTensors as there, so checkpoints, optimisers and gradient clipping work as they do.

    x [B, S_r, K]  --ColwiseOverlap-->  [B, S, N_r]         gathers rows while it multiplies
    x [B, S, K]    --ColwiseOverlap(input_layouts=Replicate())-->   [B, S, N_r]     its gradient is an all-reduce
    x [B, S, K_r]  --RowwiseOverlap-->  [B, S_r, N]         scatters the sum of products while it multiplies
    x [B, S, K_r]  --RowwiseOverlap(output_layouts=Replicate())-->  [B, S, N]       all-reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from weft.kernels import PackedWeight
from weft.overlap.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, replicated_matmul


@dataclass(frozen=True)
class ActivationLayout:
    """How a layer's activations lie on the mesh, and whether its output is a plain tensor."""

    mesh: DeviceMesh
    sequence: int | None  # the sharded dim; None where all ranks hold everything
    local_output: bool

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.get_group()


class ColwiseLinear(nn.Linear):
    """A linear layer whose weight is sharded by rows of w, its input by sequence or not. `ColwiseOverlap` makes it."""

    overlap_layout: ActivationLayout

    def forward(self, input: Tensor) -> Tensor:
        layout = self.overlap_layout
        _check_input(input, layout.sequence)
        bias = None if self.bias is None else _local(self.bias)
        if layout.sequence is None:
            x = _to_local(input, layout.mesh, Replicate())
            y = replicated_matmul(x.reshape(-1, x.shape[-1]), _weight(self), group=layout.group, bias=bias)
            y = y.reshape(*x.shape[:-1], y.shape[1])
            return _back(y, 0, layout, Shard(x.dim() - 1), (*x.shape[:-1], self.weight.shape[0]))
        x, size = _to_local(input, layout.mesh, Shard(layout.sequence)), layout.mesh.size()
        total = _total_rows(input, x, layout.sequence, size)
        rows, others = _rows_first(x, layout.sequence)
        y = all_gather_matmul(rows, _weight(self), group=layout.group, bias=bias, m=total * others.numel())
        y = y.reshape(total, *others, y.shape[1])
        return _back(y, layout.sequence, layout, Shard(x.dim() - 1), (total, *others, self.weight.shape[0]))


class RowwiseLinear(nn.Linear):
    """A linear layer whose weight and input are sharded by columns. `RowwiseOverlap` makes it."""

    overlap_layout: ActivationLayout

    def forward(self, input: Tensor) -> Tensor:
        layout = self.overlap_layout
        _check_input(input, layout.sequence)
        x = _to_local(input, layout.mesh, Shard(input.dim() - 1))
        weight = _weight(self)
        if layout.sequence is None:
            bias = None if self.bias is None else _local(self.bias)
            y = matmul_all_reduce(x.reshape(-1, x.shape[-1]), weight, group=layout.group, bias=bias)
            y = y.reshape(*x.shape[:-1], y.shape[1])
            return _back(y, 0, layout, Replicate(), y.shape)
        rows, others = _rows_first(x, layout.sequence)
        _check_even(x.shape[layout.sequence], layout.mesh.size(), others)
        # Each rank has the gradient of its own rows: the replicated bias gets the sum of them.
        bias = None if self.bias is None else _local(self.bias, Partial())
        y = matmul_reduce_scatter(rows, weight, group=layout.group, bias=bias)
        y = y.reshape(-1 if others.numel() else 0, *others, y.shape[1])
        whole = (x.shape[layout.sequence], *others, y.shape[-1])
        return _back(y, layout.sequence, layout, Shard(layout.sequence), whole)


class ColwiseOverlap(ColwiseParallel):
    """A linear layer sharded by output features; its output is sharded on the last dim.

    `input_layouts` is `Shard(dim)` of the sequence, 1 by default: in place of `SequenceParallel`'s all-gather and
    `ColwiseParallel`. Or `Replicate()`, where all ranks hold the input, as `ColwiseParallel` has it: then nothing is
    gathered, and the input's gradient is an overlapped all-reduce.
    """

    def __init__(self, *, input_layouts: Shard | Replicate | None = None, use_local_output: bool = True) -> None:
        layout, self._sequence_dim = _layout("input_layouts", input_layouts)
        super().__init__(input_layouts=layout, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _apply(self, module, ColwiseLinear, device_mesh)


class RowwiseOverlap(RowwiseParallel):
    """A linear layer sharded by input features; its input is sharded on the last dim.

    `output_layouts` is `Shard(dim)` of the sequence, 1 by default (reduce-scatter), or `Replicate()` (all-reduce).
    """

    def __init__(self, *, output_layouts: Shard | Replicate | None = None, use_local_output: bool = True) -> None:
        layout, self._sequence_dim = _layout("output_layouts", output_layouts)
        super().__init__(output_layouts=layout, use_local_output=use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _apply(self, module, RowwiseLinear, device_mesh)


def _layout(name: str, given: Shard | Replicate | None) -> tuple[Shard | Replicate, int | None]:
    """The layout, and the dim of the sequence that it cuts."""
    layout = Shard(1) if given is None else given
    if not isinstance(layout, Shard | Replicate):
        raise ValueError(f"{name} is {layout}, expected Shard(dim) of the sequence, or Replicate()")
    return layout, layout.dim if isinstance(layout, Shard) else None


def _apply(
    style: ColwiseOverlap | RowwiseOverlap,
    module: nn.Module,
    kind: type[ColwiseLinear | RowwiseLinear],
    mesh: DeviceMesh,
) -> nn.Module:
    name = type(style).__name__
    _check_module(name, module)
    if mesh.ndim != 1:
        raise ValueError(f"{name} needs a mesh of one axis, got {mesh.ndim}; take one of them, as in mesh['tensor']")
    partition: Any = style._partition_linear_fn
    partition("", module, mesh)
    # The class changes, not an instance's `forward`: the layer prints as what it is, and pickles.
    layer = cast(Any, module)
    layer.__class__ = kind
    layer.overlap_layout = ActivationLayout(mesh, style._sequence_dim, style.use_local_output)
    return module


def _check_module(style: str, module: nn.Module) -> None:
    """Raises unless the module computes what nn.Linear does: the style's own forward takes the place of its."""
    torch_style, kind = style.replace("Overlap", "Parallel"), type(module).__name__
    remedy = f"use torch's {torch_style} for it"
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{style} is for nn.Linear, got {kind}; use ColwiseParallel for embeddings")
    if type(module) is not nn.Linear:
        raise ValueError(f"{style} is for nn.Linear itself, got {kind}, a subclass whose code would not run; {remedy}")
    if "forward" in vars(module):
        raise ValueError(f"{style} brings a forward of its own, but this {kind} was given one, too; {remedy}")
    names = [name for name, _ in module.named_parameters()]
    if names not in (["weight"], ["weight", "bias"]):
        raise ValueError(
            f"{style} is for parameters weight and bias, got {', '.join(names) or 'none'}; first remove what makes the "
            "weight of others, such as weight_norm or pruning"
        )


def _weight(layer: ColwiseLinear | RowwiseLinear) -> Tensor | PackedWeight:
    """This rank's part of the weight. A compiled graph cannot look for changes: there it is packed in every call."""
    local = _local(layer.weight)
    if not torch.compiler.is_compiling():
        return local
    return PackedWeight(torch.ops.weft.pack(local.detach(), "", 0), local.shape[0], local.shape[1], "", local)


def _local(parameter: Tensor, gradient: Partial | None = None) -> Tensor:
    assert isinstance(parameter, DTensor)
    placements = None if gradient is None else [gradient]
    return parameter.to_local(grad_placements=placements)


def _to_local(x: Tensor, mesh: DeviceMesh, placement: Shard | Replicate) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(mesh, [placement]).to_local()


def _check_input(x: Tensor, sequence: int | None) -> None:
    least = 1 if sequence is None else 2
    if not isinstance(x, Tensor) or x.dim() < least:
        what = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ValueError(f"the input {what}, expected a tensor {'[..., K]' if least == 1 else '[..., sequence, K]'}")
    if sequence is not None and sequence not in (*range(x.dim() - 1), *range(-x.dim(), -1)):
        raise ValueError(
            f"the input has shape {list(x.shape)}, and Shard({sequence}) is no dim of a sequence in it, expected one "
            f"before the last: 0 to {x.dim() - 2}; give the style another layout, or the input a batch"
        )


def _total_rows(x: Tensor, local: Tensor, dim: int, size: int) -> int:
    """The whole sequence: known to a DTensor; otherwise all ranks have as much of it."""
    total = x.shape[dim] if isinstance(x, DTensor) else local.shape[dim] * size
    _check_even(total, size, _others(local, dim))
    return total


def _others(x: Tensor, dim: int) -> torch.Size:
    return torch.Size(s for i, s in enumerate(x.shape[:-1]) if i != dim % x.dim())


def _check_even(total: int, size: int, others: torch.Size) -> None:
    if others.numel() > 1 and total % size:
        raise ValueError(
            f"a sequence of {total} in a batch of {others.numel()} does not divide by {size} ranks; pad it, "
            "or flatten the batch into it"
        )


def _rows_first(x: Tensor, dim: int) -> tuple[Tensor, torch.Size]:
    """x [..., S, ..., K] as rows with the sequence outermost, so that a shard of it is a run of rows."""
    others = _others(x, dim)
    return x.movedim(dim, 0).reshape(-1, x.shape[-1]), others


def _back(y: Tensor, dim: int, layout: ActivationLayout, placement: Shard | Replicate, whole: Sequence[int]) -> Tensor:
    """y with its first dim put back to `dim`; `whole` is the shape of all ranks' y, with that dim first."""
    y = y.movedim(0, dim)
    if layout.local_output:
        return y
    # Of its own shard alone a rank would guess that all others are as large.
    like = torch.empty(tuple(whole), device="meta").movedim(0, dim)
    shape, stride = like.shape, like.stride()
    dtensor = DTensor.from_local(y, layout.mesh, [placement], run_check=False, shape=shape, stride=stride)
    return cast(Tensor, dtensor)
