"""Whether a call may go past torch's dispatcher, which costs as much as a small matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from weft._torch import is_transformed

_TYPES = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to add.

    It has when someone compiles, traces, counts (a dispatch mode), transforms (vmap, jvp) or differentiates, for
    subclasses of Tensor, and for lazily negated views.

    >>> is_plain(torch.ones(2)), is_plain(torch.ones(2, requires_grad=True))
    (True, False)
    """
    if torch.compiler.is_compiling() or is_transformed():
        return False
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (type(t) not in _TYPES or (grad and t.requires_grad) or t.is_neg()):
            return False
    return True
