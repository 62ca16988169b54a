"""What may be done to elements on the way: terms are reduced, types are cast. What torch cannot do is refused here.

Both are tried on one element when a plan is made, so that a type that torch cannot add is an error on every rank before
a byte moves, and not on one of them in the middle of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

REDUCE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, term: total.add_(term),
    "avg": lambda total, term: total.add_(term),
    "product": lambda total, term: total.mul_(term),
    "max": lambda total, term: torch.maximum(total, term, out=total),
    "min": lambda total, term: torch.minimum(total, term, out=total),
}
"""How a term is reduced into what came before it."""

LINEAR = ("sum", "avg")
"""Those whose gradient is the same for every term."""


def average(total: Tensor, terms: int) -> None:
    """Makes the sum of all terms their mean."""
    total.div_(terms)


@cache
def why_not_reduced(dtype: torch.dtype, op: str) -> str | None:
    """Why terms of a type cannot be reduced so; None if they can.

    >>> why_not_reduced(torch.float32, "avg")
    >>> why_not_reduced(torch.bool, "sum")
    'sums of torch.bool are not defined'
    """
    if op not in REDUCE:
        return f"expected one of {', '.join(REDUCE)}"
    if dtype == torch.bool and op in LINEAR:
        return f"sums of {dtype} are not defined"
    try:
        total = torch.ones(2, device="cpu").to(dtype)
        REDUCE[op](total, total.clone())
        if op == "avg":
            average(total, 2)
    except (RuntimeError, TypeError) as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None


@cache
def why_not_cast(dtype: torch.dtype, to: torch.dtype) -> str | None:
    """Why elements of a type cannot become another one; None if they can.

    >>> why_not_cast(torch.float32, torch.bfloat16)
    >>> why_not_cast(torch.complex64, torch.float32)
    'the imaginary part would be lost'
    """
    if dtype.is_complex and not to.is_complex:
        return "the imaginary part would be lost"
    try:
        source = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
        torch.empty(2 * to.itemsize, dtype=torch.uint8, device="cpu").view(to).copy_(source)
    except (RuntimeError, TypeError) as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None
