"""Every private name of torch that weft uses, one small function or alias each: what a new torch may break is here."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store


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
