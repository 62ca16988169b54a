"""Every private name of torch that weft uses, one small function or alias each: what a new torch may break is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _functorch, _get_tracing_state
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store
from torch.nn import Parameter
from torch.nn.modules import module as _module

# Process groups ---------------------------------------------------------------------------------------------


def group_store(pg: ProcessGroup) -> Store:
    """The store of a process group, under the group's own prefix; `KeyError` for one that torch does not know.

    torch drops this very object when the group is destroyed, and keeps it nowhere else. The public
    `ProcessGroup.get_group_store` gives another object for the same store.
    """
    return dist.distributed_c10d._get_process_group_store(pg)


def group_by_name(name: str) -> ProcessGroup:
    """The process group that custom ops know as `name`."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def group_timeout(pg: ProcessGroup, device: str) -> float:
    """The seconds that a process group was made with."""
    options = pg._get_backend(torch.device(device)).options
    return float(options._timeout.total_seconds())


# Tensors ----------------------------------------------------------------------------------------------------

_PLAIN = (Tensor, Parameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, without a record for gradients; another tensor is itself."""
    found: Tensor = tensor if type(tensor) in _PLAIN else getattr(tensor, "_local_tensor", tensor)
    return found


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as torch counts; -1 for one made in inference mode, which counts nothing."""
    return -1 if tensor.is_inference() else tensor._version


# Modules, transformations and tracers -----------------------------------------------------------------------


def has_global_module_hooks() -> bool:
    """Whether a hook is registered that runs at every module of the process (`register_module_forward_hook`, ...)."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def in_functorch() -> bool:
    """Whether a transformation of torch.func (vmap, grad, jvp) is at work."""
    return _functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether torch.jit.trace records what is computed."""
    return _get_tracing_state() is not None


def without_compile(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """The function as torch.compile leaves it alone; `fullgraph=True` says the reason. Public, but without types."""
    found: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return found
