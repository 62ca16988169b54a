"""What a call is given, in words: ranks compare them before anything moves."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from weft.packed.call import Inputs


def told(inputs: Inputs) -> str:
    """What a call is given, in words that ranks compare."""
    first = 0 if inputs.vectors is None else 1
    given = [inputs.cu_seqlens, *inputs.indices[first:]]
    given += [t for t in (inputs.vectors, inputs.positions) if t is not None]
    return f"{inputs.tokens} tokens of {inputs.cu_seqlens.numel() - 1} sequences, inputs {digest(*given)}"


def digest(*tensors: Tensor) -> str:
    """Twelve hexadecimal digits by which ranks compare what they were given."""
    found = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        array: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        found.update(array.data)
    return found.hexdigest()
