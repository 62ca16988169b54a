"""Adding up partial results: ranks in order inside a host, then hosts in order.

float32 is added as it is. bfloat16 is added in float32; a host's sum is rounded once, because that is what crosses
the network, and so is the total. The order is the same whoever adds, in whatever pieces: all plans give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = parts[0] + parts[1] + ..., in this order, rounded once. `out` may be one of two parts."""
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:  # torch adds two bfloat16 in float32
        torch.add(parts[0], parts[1], out=out)
    elif out.dtype == torch.float32:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
    else:
        out.copy_(_widened(parts))


def _widened(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    return total


def add_terms(terms: Sequence[Sequence[Tensor]], out: Tensor, bias: Tensor | None) -> None:
    """out = (sum of terms[0]) + (sum of terms[1]) + ... + bias; a term holds the parts of one host.

    >>> out = torch.empty(2)
    >>> add_terms([[torch.ones(2), torch.ones(2)], [torch.ones(2)]], out, bias=torch.ones(2))
    >>> out.tolist()
    [4.0, 4.0]
    """
    parts = list(terms[0]) if len(terms) == 1 else [term[0] if len(term) == 1 else _rounded(term) for term in terms]
    if bias is None:
        add_parts(parts, out)
    elif out.dtype == torch.float32:
        add_parts(parts, out)
        out.add_(bias)
    else:
        out.copy_(_widened(parts).add_(bias))


def _rounded(parts: Sequence[Tensor]) -> Tensor:
    total = torch.empty_like(parts[0])
    add_parts(parts, total)
    return total
