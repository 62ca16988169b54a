"""Sums of what ranks have computed: hosts in order, and inside a host ranks in order, whoever adds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.host_collectives import add_in_order


def add_terms(terms: Sequence[Sequence[Tensor]], out: Tensor, bias: Tensor | None) -> None:
    """out = (sum of terms[0]) + (sum of terms[1]) + ... + bias; a term holds the parts of one host.

    >>> out = torch.empty(2)
    >>> add_terms([[torch.ones(2), torch.ones(2)], [torch.ones(2)]], out, bias=torch.ones(2))
    >>> out.tolist()
    [4.0, 4.0]
    """
    parts = list(terms[0]) if len(terms) == 1 else [term[0] if len(term) == 1 else _sum_of(term) for term in terms]
    if bias is None or out.dtype == torch.float32:
        add_in_order(parts, out)
        if bias is not None:
            out.add_(bias)
        return
    total = parts[0].float()
    for part in (*parts[1:], bias):
        total.add_(part)
    out.copy_(total)


def _sum_of(parts: Sequence[Tensor]) -> Tensor:
    total = torch.empty_like(parts[0])
    add_in_order(parts, total)
    return total
