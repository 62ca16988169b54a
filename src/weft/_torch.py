"""What weft uses of torch that torch does not promise to keep: one function or alias each, and why it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d


def gloo_group(name: str, ranks: Sequence[int], *, timeout: float) -> ProcessGroup:
    """`dist.new_group` over gloo for these ranks alone, in this order, under a name that they have agreed on.

    `new_group(use_local_synchronization=True)` names a group by its ranks and by how many groups this process is in:
    ranks that are in different numbers of groups never meet, and a group that is made after another one of its ranks
    was destroyed finds that one's addresses in the store.
    """
    world, here = distributed_c10d._world, dist.get_rank()
    _, store = world.pg_map[distributed_c10d._get_default_group()]
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(here),
        list(ranks),
        dist.Backend("gloo"),
        store,
        distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=timeout),
    )
    assert isinstance(made, ProcessGroup)
    world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def version_of(tensor: Tensor) -> int:
    """How often torch has seen a tensor's memory be written to; tensors made in inference mode do not count: 0."""
    return 0 if tensor.is_inference() else tensor._version
