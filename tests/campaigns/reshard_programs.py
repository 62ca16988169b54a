"""Random reshards as values: what is moved from where to where, how, and what must come out.

All ranks make the same program from the same random numbers, and every rank can compute what every rank must get.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from reshard_cases import random_shards

from weft.layout import Layout, Mesh, Partial, Replicate, Shard, ShardSizes
from weft.reference import reshard_reference
from weft.reshard import STRATEGIES, TensorSpec
from weft.reshard.spec import LINEAR, REDUCE, why_not_cast, why_not_reduced

TYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)
SIZES = (0, 1, 2, 3, 5, 7, 8, 16, 33)
STRIDES = ("plain", "plain", "transposed", "stepped", "one", "offset", "conj", "neg", "last")
MODES = ("grad", "no_grad", "inference")


@dataclass(frozen=True)
class Move:
    """One tensor to be moved: how it lies, the random numbers in it, how its shards lie in memory."""

    spec: TensorSpec
    seed: int
    stride: str

    def source(self, rank: int) -> torch.Tensor | None:
        """A rank's shard of the source."""
        return random_shards(self.spec, self.seed).get(rank)

    def result(self, rank: int) -> torch.Tensor | None:
        """What a rank must get."""
        return reshard_reference(self.spec, random_shards(self.spec, self.seed)).get(rank)


def random_mesh(chance: random.Random, hosts: Sequence[int]) -> Mesh:
    """Some of the ranks in any order. `hosts` are theirs; where all share one they may count as several."""
    world = len(hosts)
    shapes = [(n,) for n in range(1, world + 1)] + [(2, 2), (1, 2), (2, 1)]
    shape = chance.choice([shape for shape in shapes if math.prod(shape) <= world])
    ranks = np.array(chance.sample(range(world), math.prod(shape))).reshape(shape)
    return Mesh.of(ranks, hosts=np.array(hosts)[ranks])


def random_layout(chance: random.Random, mesh: Mesh, shape: Sequence[int], op: str | None) -> Layout:
    """Any placements; with `op` some axis has terms that are reduced so."""
    kinds: list[object] = [Replicate(), *(Shard(dim) for dim in range(-len(shape), len(shape)))]
    placements = [chance.choice(kinds) for _ in mesh.shape]
    if len(mesh.shape) == 1 and shape and chance.random() < 0.3:
        dim = chance.randrange(len(shape))
        cuts = [0, *sorted(chance.randint(0, shape[dim]) for _ in range(mesh.size - 1)), shape[dim]]
        placements = [ShardSizes(dim, tuple(b - a for a, b in pairwise(cuts)))]
    if op is not None:
        placements[chance.randrange(len(placements))] = Partial(op)
    order = tuple(chance.sample(range(len(mesh.shape)), len(mesh.shape)))
    return Layout(mesh, placements, order)  # type: ignore[arg-type]


def random_move(
    chance: random.Random,
    hosts: Sequence[int],
    name: str = "tensor",
    *,
    floating: bool = False,
    ordered: bool = False,
    large: bool = False,
) -> Move:
    """Any tensor from any mesh and layout to any other; of a type with gradients if `floating`.

    ordered: the destination's axes may cut in any order, which only a Layout can say
    large:   it takes a while, so that what comes next runs beside it
    """
    types = [each for each in TYPES if each.is_floating_point and each.itemsize > 1] if floating else TYPES
    dtype, other, op = chance.choice(types), None, None
    shape = tuple(chance.choice(SIZES) for _ in range(chance.randint(0, 3)))
    shape = (chance.choice([65, 130, 257]), chance.choice([200, 301])) if large else shape
    if chance.random() < 0.3 and dtype != torch.float8_e4m3fn:
        ops = [each for each in REDUCE if why_not_reduced(dtype, each) is None and (each in LINEAR or not floating)]
        op = chance.choice(ops) if ops else None
    if chance.random() < 0.25:
        other = chance.choice([each for each in types if why_not_cast(dtype, each) is None])
    source, target = random_mesh(chance, hosts), random_mesh(chance, hosts)
    src, dst = random_layout(chance, source, shape, op), random_layout(chance, target, shape, None)
    dst = dst if ordered else Layout(dst.mesh, dst.placements)
    spec = TensorSpec(name, shape, dtype, src, dst, other or dtype)
    return Move(spec, chance.randrange(2**20), chance.choice(STRIDES))


def random_options(chance: random.Random) -> dict[str, object]:
    """How to move: strategy, chunks, staging memory."""
    return {
        "strategy": chance.choice(sorted(STRATEGIES)),
        "chunk_bytes": chance.choice([1024, 2048, None, None]),
        "max_staging_bytes": chance.choice([1 << 20, 1 << 28]),
    }
