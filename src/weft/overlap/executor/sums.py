"""Sums of what ranks have computed: hosts in order, and inside a host ranks in order, whoever adds; and their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.comm.host_collectives import add_in_order
from weft.kernels.dispatch import kernels_for
from weft.kernels.norm import LayerNorm, RMSNorm

_CACHED_BYTES = 1 << 17  # of a sum that is read again at once: it, its parts and its residual stay in the second level


class RowNorm:
    """What follows a sum, row by row: + residual, in place, and the norm of that, which `normed` returns."""

    def __init__(self, norm: RMSNorm | LayerNorm, residual: Tensor | None) -> None:
        self._norm = norm
        self._residual = None if residual is None else residual.contiguous()
        self._weight = None if norm.weight is None else norm.weight.contiguous()
        self._beta = None if norm.beta is None else norm.beta.contiguous()

    def prepare(self, total: Tensor) -> None:
        """Makes room for the norm of `total`; in the caller's thread, whose mode the result must have."""
        self._out, self._done = torch.empty_like(total), 0

    def follow(self, total: Tensor, m0: int, m1: int) -> None:
        """Rows m0 to m1 of the sum `total` [M, N] are there."""
        rows, norm = total[m0:m1], self._norm
        residual = None if self._residual is None else self._residual[m0:m1]
        kernels_for(total).norm(
            rows, self._weight, self._beta, out=self._out[m0:m1], eps=norm.eps, rms=isinstance(norm, RMSNorm),
            residual=residual, total=None if residual is None else rows,
        )  # fmt: skip
        self._done += m1 - m0

    def normed(self, total: Tensor) -> Tensor:
        """The norm of all rows, once each has come."""
        assert self._done == total.shape[0], f"{self._done} of {total.shape[0]} rows are normed"
        return self._out


def add_rows(
    terms: Sequence[Sequence[Tensor]], out: Tensor, bias: Tensor | None, m0: int, m1: int, after: RowNorm | None
) -> None:
    """`add_terms` to rows m0 to m1 of `out`, and what comes after while they are in the cache."""
    if after is None:
        add_terms(terms, out[m0:m1], bias)
        return
    step = max(1, _CACHED_BYTES // max(1, out.stride(0) * out.element_size()))
    for first in range(m0, m1, step):
        end = min(first + step, m1)
        add_terms([[part[first - m0 : end - m0] for part in term] for term in terms], out[first:end], bias)
        after.follow(out, first, end)


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
