"""The judge of gradients where Hugging Face's own are not exact enough: the same model in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Hugging Face's code computes norms, rotary positions and softmax in float32, whatever the model is: not here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        given = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._wide, args), **given)

    @staticmethod
    def _wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


def check_by_exact(
    got: dict[str, Tensor], want: dict[str, Tensor], exact: dict[str, Tensor], limits: dict[str, float]
) -> None:  # fmt: skip
    """Raises where a gradient is farther from the exact one than its limit, and than Hugging Face's is."""
    for name, limit in limits.items():
        ours, theirs = (distance(each[name], exact[name]) for each in (got, want))
        assert ours <= max(limit, theirs), (
            f"the gradient of {name} is {ours:.2e} from that in float64, Hugging Face's {theirs:.2e}; may be {limit}"
        )


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one is not a number."""
    found = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    return found if found == found else float("inf")
