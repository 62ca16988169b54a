"""Every private name of torch that weft uses, one small function or alias each: what a new torch may break is here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store
from torch.utils import _python_dispatch


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


def is_transformed() -> bool:
    """Whether a dispatch mode, a tracer, forward-mode gradients or a transform of torch.func is active."""
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return True
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_counting() -> bool:
    """Whether any dispatch mode is active."""
    return bool(torch._C._len_torch_dispatch_stack())


def flop_registries() -> list[dict[Any, Any]]:
    """The formulas of every active `FlopCounterMode`, by op: it copies torch's table when it is made."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    found = [getattr(getattr(mode, "counter", None), "flop_registry", None) for mode in modes]
    return [registry for registry in found if isinstance(registry, dict)]
