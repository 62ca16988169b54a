"""A stage that takes a given time and hardly any CPU: for pipelines with more ranks than this machine has cores.

It does a small real matmul and sleeps for the rest; tensors have their real sizes and really travel. Both gradients
of the backward pass sleep on their own, so that a schedule which splits them finds them split.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 8  # of the small matmul


class EmulatedStage(nn.Module):
    """[tokens, width] tensors -> one such tensor, or a dict with one for each name where `outputs` are several.

    A forward lasts `seconds`, the gradient of the input and that of the weights `seconds` each.

    >>> stage = EmulatedStage(("x",), width=4, seconds=0.0)
    >>> stage(torch.ones(16, 4)).shape
    torch.Size([16, 4])
    """

    def __init__(self, outputs: tuple[str, ...], *, width: int, seconds: float) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.outputs, self.seconds = outputs, seconds

    def forward(self, *tensors: Tensor, **named: Tensor) -> Any:
        first, *others = (*tensors, *named.values())
        weight = _spend(self.mix.weight, self.seconds)
        mixed = F.linear(first[:_ROWS], weight, self.mix.bias)
        y = torch.cat([mixed, first[_ROWS:]])
        for other in others:
            y = y + other
        time.sleep(self.seconds)
        y = _spend(y, self.seconds)
        return dict.fromkeys(self.outputs, y) if len(self.outputs) > 1 else y


class _Spend(torch.autograd.Function):
    """Its gradient takes some time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def _spend(x: Tensor, seconds: float) -> Tensor:
    y: Tensor = _Spend.apply(x, seconds)  # type: ignore[no-untyped-call]
    return y
