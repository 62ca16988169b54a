"""One table: which module computes on which device. Everything above calls `kernels_for(tensor)` and nothing else."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

from torch import Tensor

_MODULES = {"cpu": "weft.kernels.cpu"}


def kernels_for(tensor: Tensor) -> ModuleType:
    """The module with `empty`, `pack`, `unpack` and `linear` for the device of `tensor`."""
    return _module(tensor.device.type)


@cache
def _module(device: str) -> ModuleType:
    if device not in _MODULES:
        raise ValueError(f"weft has kernels for {', '.join(_MODULES)}, got a tensor on {device}; move it with .cpu()")
    return importlib.import_module(_MODULES[device])
