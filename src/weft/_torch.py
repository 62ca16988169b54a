"""Every private name of torch that weft uses, one function or alias each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch, _get_tracing_state
from torch.nn.modules import module as _module


def has_global_module_hooks() -> bool:
    """Whether a hook is registered that runs at every module of the process (`register_module_forward_hook`, ...)."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, as torch counts; -1 for one made in inference mode, which counts nothing."""
    return -1 if tensor.is_inference() else tensor._version


def in_functorch() -> bool:
    """Whether a transformation of torch.func (vmap, grad, jvp) is at work."""
    return _functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether torch.jit.trace records what is computed."""
    return _get_tracing_state() is not None


def is_faking() -> bool:
    """Whether ops compute shapes only (FakeTensorMode)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def tell_flop_counters(formulas: dict[Any, Callable[..., int]]) -> None:
    """Tells the FlopCounterModes that are at work how to count ops, which they would count as nothing.

    Registering formulas once would import them, and Triton with them.
    """
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            counter: Any = getattr(mode, "counter", None)
            if isinstance(getattr(counter, "flop_registry", None), dict):
                counter.flop_registry.update(formulas)


def without_compile(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """The function as torch.compile leaves it alone; `fullgraph=True` says the reason. Public, but without types."""
    found: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return found
