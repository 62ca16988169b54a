"""Which rank holds which box of a tensor: `Mesh` and `Layout`, frozen values that never communicate.

A mesh is an array of ranks; each rank is on a host. A layout says for each *axis* of the mesh what it does to
a tensor, with torch's own placements: `Shard(dim)` cuts a *dim* by the rule of `torch.chunk`, `ShardSizes`
cuts it into the sizes that are given, `Replicate()` copies, `Partial()` leaves terms that are still to be
summed. Several axes may cut one dim, one after the other.

mesh    `Mesh`, and `DeclaredCluster`: the rates of the hosts' network cards
layout  `Layout`, `ShardSizes`, boxes, and the papers' notation

The papers write a layout by dims instead: `S0RR` is dim 0 cut along axis 0; `RS01R` is dim 1 cut along axis 0,
and each part along axis 1. We add `P1` at the end for terms along axis 1: `S0RP1`.
"""

from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from weft.layout.layout import Box, Layout, ShardSizes
from weft.layout.mesh import DeclaredCluster, Ints, Mesh, check_hosts, check_ranks, format_ints, parse_ints

__all__ = [
    "Box",
    "DeclaredCluster",
    "Ints",
    "Layout",
    "Mesh",
    "Partial",
    "Replicate",
    "Shard",
    "ShardSizes",
    "check_hosts",
    "check_ranks",
    "format_ints",
    "parse_ints",
]
