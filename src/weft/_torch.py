"""Every private name of torch that weft uses, one function or alias each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, _dispatch_keys, _get_tracing_state
from torch._C._dynamo import eval_frame
from torch._guards import detect_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

StridedShard = _StridedShard
"""The placement with which FSDP2 says that a later axis of the mesh cuts first."""

_WRAPPERS = (
    DispatchKey.Python,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchGradWrapper,
    DispatchKey.Functionalize,
)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, without a record for gradients; another tensor is itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def settled(tensor: Tensor) -> Tensor:
    """The tensor, once a functional collective that still writes it is done; others are themselves."""
    if isinstance(tensor, AsyncCollectiveTensor):
        done: Tensor = tensor.wait()
        return done
    return tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it has no memory of its own: subclasses that dispatch in Python, and what torch.func hands out."""
    keys = _dispatch_keys(tensor)
    return any(keys.has(key) for key in _WRAPPERS)


def has_memory(tensor: Tensor) -> bool:
    """False for the zeros that automatic differentiation makes without memory."""
    return not torch._is_zerotensor(tensor)


def shard_order(tensor: DTensor) -> dict[int, tuple[int, ...]]:
    """For each dim of a DTensor that is cut, the mesh axes in the order in which they cut it, where torch says so."""
    return {int(entry[0]): tuple(entry[1]) for entry in getattr(tensor._spec, "shard_order", None) or ()}


def strides_are_order(tensor: DTensor) -> bool:
    """False where a `StridedShard` came from a view, and really means strides."""
    spec: Any = tensor._spec
    return getattr(spec, "use_strided_shard_as_shard_order", True) is not False


def is_tracing() -> bool:
    """Whether torch.jit.trace records what is computed."""
    return _get_tracing_state() is not None


def is_faking() -> bool:
    """Whether tensors are made without memory, to find out about shapes."""
    return detect_fake_mode() is not None


def leave_to_python(function: Callable[..., Any], reason: str) -> None:
    """What torch.compiler.disable does to a function, without importing the compiler, which takes a second."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    # Neither its own frame nor those that it calls.
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
