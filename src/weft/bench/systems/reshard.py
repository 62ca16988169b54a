"""What the ranks of the lab run for `weft bench reshard`: weft's strategies, and what a torch user writes today.

full_broadcast  `DTensor.full_tensor` on the trainer, a broadcast to the others, a slice there
dcp_files       torch.distributed.checkpoint: one side saves, the other loads

Every result is compared with the source after every run, and spoilt before the next one; neither is timed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from weft._torch import redistribution_logger
from weft.bench.harness import Case, Result, measure_ranks, slowest, traced
from weft.bench.machine import peak_growth
from weft.comm import Group
from weft.lab import Rank
from weft.layout import Box, ShardSizes
from weft.layout.mesh import DeclaredCluster
from weft.reshard import Executor, Plan, TensorSpec, plan_tensors
from weft.reshard.tensors import to_dtensor
from weft.timeline import Timeline

Shards = Mapping[int, Tensor]
TIMEOUT = 60.0


def measure_case(
    rank: Rank, name: str, specs: Sequence[TensorSpec], strategies: Sequence[str], gbps: float, rounds: int
) -> Result | None:
    """Every strategy in turns, and one traced run of `optimal`; rank 0 returns what came out."""
    torch.manual_seed(0)
    cluster = DeclaredCluster.uniform(max(rank.hosts) + 1, gbps=gbps)
    plans = {strategy: plan_tensors(specs, cluster=cluster, strategy=strategy) for strategy in strategies}
    group, shards = Group(rank.group, timeout=TIMEOUT), _CheckedShards(specs, rank.rank)
    with ExitStack() as stack:
        systems = {}
        for strategy, plan in plans.items():
            executor = stack.enter_context(Executor(plan, group))
            systems[strategy] = shards.timed(partial(executor.run, shards.src, shards.dst))
        measured = measure_ranks(Case(name, systems), rank, rounds, agree=shards.agree)
        happened = traced(systems["optimal"], rank)
    if rank.rank:
        return None
    best = plans["optimal"]
    return Result(
        measured,
        bound=best.lower_bound,
        predicted={strategy: plan.seconds for strategy, plan in plans.items()},
        timelines=(Timeline(best.simulate().events, name="predicted"), happened),
        facts={"wire_bytes": _wire_bytes(best)},
    )


def measure_state(
    rank: Rank, name: str, specs: Sequence[TensorSpec], gbps: float, rounds: int, limit: int, folder: str
) -> Result | None:
    """A state dict by one plan, by full tensors and broadcasts, and by torch's checkpoints, in turns.

    `staging_peak_mb` is the most memory that any rank took beyond its tensors.
    """
    cluster = DeclaredCluster.uniform(max(rank.hosts) + 1, gbps=gbps)
    plan = plan_tensors(specs, cluster=cluster)
    group, shards = Group(rank.group, timeout=TIMEOUT), _CheckedShards(specs, rank.rank)
    with Executor(plan, group, max_staging_bytes=limit) as executor:
        dist.barrier()
        staging = peak_growth(partial(executor.run, shards.src, shards.dst))
        systems = {
            "weft": shards.timed(partial(executor.run, shards.src, shards.dst)),
            "full_broadcast": shards.timed(full_broadcast(specs, rank, shards.src, shards.dst)),
            "dcp_files": shards.timed(dcp_files(specs, rank, shards.src, shards.dst, Path(folder))),
        }
        measured = measure_ranks(Case(name, systems), rank, rounds, agree=shards.agree)
    largest = shards.agree(float(staging))
    facts = {
        "staging_peak_mb": largest / 1e6,
        "staging_limit_mb": limit / 1e6,
        "wire_bytes": _wire_bytes(plan),
    }
    return None if rank.rank else Result(measured, plan.lower_bound, {"weft": plan.seconds}, facts=facts)


def _wire_bytes(plan: Plan) -> int:
    """What leaves all hosts together."""
    return sum(traffic.out for traffic in plan.bytes_by_card.values())


def full_broadcast(specs: Sequence[TensorSpec], rank: Rank, src: Shards, dst: Shards) -> Callable[[], None]:
    """`DTensor.full_tensor` on the trainer, a broadcast to the inference ranks, and a slice there; one by one."""
    mesh = _device_mesh(specs[0], "src")
    group = _group_of([specs[0].src.mesh.ranks[0], *specs[0].dst.mesh.ranks])
    # It advises to flatten the mesh; but nested and flat cuts differ where a dim does not divide.
    redistribution_logger().setLevel(logging.ERROR)

    def run() -> None:
        for i, spec in enumerate(specs):
            if rank.rank in spec.src.mesh.ranks:
                full = to_dtensor(src[i], mesh, _placements(spec, "src"), spec.shape).full_tensor()
            else:
                full = torch.empty(spec.shape, dtype=spec.dtype)
            if group is not None:
                dist.broadcast(full, spec.src.mesh.ranks[0], group=group)
            if rank.rank in spec.dst.mesh.ranks:
                box = spec.dst.box(spec.shape, rank.rank)
                dst[i].copy_(full[tuple(slice(a, b) for a, b in box)])

    return run


def dcp_files(specs: Sequence[TensorSpec], rank: Rank, src: Shards, dst: Shards, folder: Path) -> Callable[[], None]:
    """torch.distributed.checkpoint: the trainer saves, the inference ranks load into their layout.

    The files are on this machine, in its page cache: they cross no network card, which real ones would.
    """
    meshes = {side: _device_mesh(specs[0], side) for side in ("src", "dst")}
    groups = {side: _group_of(getattr(specs[0], side).mesh.ranks) for side in ("src", "dst")}

    def state(side: str, shards: Shards) -> dict[str, Tensor]:
        return {
            spec.name: to_dtensor(shards[i], meshes[side], _placements(spec, side), spec.shape)
            for i, spec in enumerate(specs)
        }

    def run() -> None:
        if rank.rank in specs[0].src.mesh.ranks:
            state_dict_saver.save(state("src", src), checkpoint_id=folder, process_group=groups["src"])
        dist.barrier()
        if rank.rank in specs[0].dst.mesh.ranks:
            state_dict_loader.load(state("dst", dst), checkpoint_id=folder, process_group=groups["dst"])
        dist.barrier()
        if rank.rank == 0:
            shutil.rmtree(folder)

    return run


def _placements(spec: TensorSpec, side: str) -> list[Placement]:
    placements = getattr(spec, side).placements
    assert not any(isinstance(placement, ShardSizes) for placement in placements), "DTensor has no such placement"
    return list(placements)


def _device_mesh(spec: TensorSpec, side: str) -> DeviceMesh:
    mesh = getattr(spec, side).mesh
    return DeviceMesh("cpu", torch.from_numpy(mesh.array), mesh_dim_names=mesh.axes)


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of these ranks; None elsewhere. Collective."""
    group = dist.new_group(list(ranks))
    return group if isinstance(group, dist.ProcessGroup) else None


@dataclass
class _CheckedShards:
    """This rank's shards of some tensors: the sources, and destinations that are checked and spoilt."""

    specs: Sequence[TensorSpec]
    rank: int
    src: dict[int, Tensor] = field(default_factory=dict)
    dst: dict[int, Tensor] = field(default_factory=dict)
    has_run: bool = False

    def __post_init__(self) -> None:
        for i, spec in enumerate(self.specs):
            for layout, side in ((spec.src, self.src), (spec.dst, self.dst)):
                if self.rank in layout.mesh.ranks:
                    side[i] = known_values(spec, layout.box(spec.shape, self.rank))
        self.spoil()

    def spoil(self) -> None:
        for tensor in self.dst.values():
            tensor.fill_(-1)

    def check(self) -> None:
        """Raises if a run since the last check left anything but the source's values; spoils them."""
        if not self.has_run:
            return
        self.has_run = False
        for i, tensor in self.dst.items():
            spec = self.specs[i]
            if not torch.equal(tensor, known_values(spec, spec.dst.box(spec.shape, self.rank))):
                raise AssertionError(f"wrong values in {spec.name!r} on rank {self.rank}")
        self.spoil()

    def agree(self, value: float) -> float:
        """The largest value of all ranks; the harness calls it before and after every turn."""
        self.check()
        return slowest(value)

    def timed(self, system: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            self.has_run = True
            system()

        return run


def known_values(spec: TensorSpec, box: Box) -> Tensor:
    """A box of a tensor whose values say where they are: exact in bfloat16, different in neighbours."""
    value = torch.zeros((), dtype=torch.float32)
    for dim, (first, last) in enumerate(box):
        index = torch.arange(first, last, dtype=torch.float32) * (2 * dim + 3) % 61
        value = value.unsqueeze(-1) + index
    return (value % 127).to(spec.dtype)
