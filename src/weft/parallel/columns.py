"""Logits whose columns the ranks share: all of them on every rank, or as a DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.parallel.cut import Run
from weft.parallel.exchange import exchange
from weft.parallel.rank import Words


def gather_columns(part: Tensor, words: Words, group: ProcessGroup) -> Tensor:
    """[M, V_r] -> [M, V] on every rank. What follows must be the same on all ranks, and so its gradient."""
    if group.size() == 1:
        return part
    whole: Tensor = _GatherColumns.apply(part, words, group)  # type: ignore[no-untyped-call]
    return whole


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, words: Words, group: ProcessGroup) -> Tensor:
        ctx.words = words
        counts = [Run.of(words.total, r, group.size()).count for r in range(group.size())]
        parts = [part.new_empty(part.shape[0], count) for count in counts]
        what = f"gather logits {part.shape[0]} x {words.total} {part.dtype}"
        exchange(group, [part.contiguous()] * len(parts), parts, what=what)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][:, ctx.words.first : ctx.words.end], None, None


def as_sharded(part: Tensor, words: Words, mesh: DeviceMesh) -> Tensor:
    """[..., V_r] as a DTensor [..., V] that is sharded along its last dim; nothing is copied."""
    shape = torch.Size([*part.shape[:-1], words.total])
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(
        part, mesh, [Shard(part.dim() - 1)], run_check=False, shape=shape, stride=stride
    )  # fmt: skip
    return whole
