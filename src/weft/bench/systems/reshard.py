"""What a torch user writes today to bring a state dict to another mesh: two ways, each at its best.

What the ranks of the lab run for `weft bench reshard`.

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
from weft.bench.harness import Case, Measurement, measure_ranks, slowest, traced
from weft.comm import Group
from weft.lab import Rank
from weft.layout import Box, ShardSizes
from weft.layout.mesh import DeclaredCluster
from weft.reshard import Executor, TensorSpec, plan_tensors
from weft.reshard.tensors import to_dtensor
from weft.timeline import Timeline

Shards = Mapping[int, Tensor]


def full_broadcast(specs: Sequence[TensorSpec], rank: Rank, src: Shards, dst: Shards) -> Callable[[], None]:
    """`DTensor.full_tensor` on the trainer, a broadcast to the inference ranks, and a slice there; one by one."""
    mesh, group = _device_mesh(specs[0], "src"), _receivers(specs[0])
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
    groups = {side: mesh_group(specs[0], side) for side in ("src", "dst")}

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


def mesh_group(spec: TensorSpec, side: str) -> dist.ProcessGroup | None:
    """A process group of all ranks of one side; None elsewhere. Collective."""
    group = dist.new_group(list(getattr(spec, side).mesh.ranks))
    return group if isinstance(group, dist.ProcessGroup) else None


def _receivers(spec: TensorSpec) -> dist.ProcessGroup | None:
    group = dist.new_group([spec.src.mesh.ranks[0], *spec.dst.mesh.ranks])
    return group if isinstance(group, dist.ProcessGroup) else None


TIMEOUT = 60.0


@dataclass(frozen=True)
class ReshardOutcome:
    """What rank 0 reports: times, the bound, each strategy's prediction in seconds, and `optimal` as drawn.

    timelines: as predicted, and as one run of all ranks was
    """

    measured: Measurement
    bound: float
    predicted: Mapping[str, float]
    timelines: tuple[Timeline, Timeline]


@dataclass(frozen=True)
class StateOutcome:
    """The same for a state dict, with the most memory that any rank took beyond its tensors."""

    measured: Measurement
    bound: float
    predicted: float
    staging: int
    staging_limit: int


@dataclass
class _Shards:
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


def measure_case(
    rank: Rank, specs: Sequence[TensorSpec], strategies: Sequence[str], gbps: float, rounds: int
) -> ReshardOutcome | None:
    """Every strategy in turns; rank 0 returns what came out."""
    torch.manual_seed(0)
    cluster = DeclaredCluster.uniform(max(rank.hosts) + 1, gbps=gbps)
    plans = {name: plan_tensors(specs, cluster=cluster, strategy=name) for name in strategies}
    group, shards = Group(rank.group, timeout=TIMEOUT), _Shards(specs, rank.rank)
    with ExitStack() as stack:
        systems = {}
        for name, plan in plans.items():
            executor = stack.enter_context(Executor(plan, group))
            systems[name] = shards.timed(partial(executor.run, shards.src, shards.dst))
        measured = measure_ranks(Case("", systems), rank, rounds, agree=shards.agree)
        happened = traced(systems["optimal"], rank)
    if rank.rank:
        return None
    plan = plans["optimal"]
    timelines = (Timeline(plan.simulate().events, name="predicted"), happened)
    return ReshardOutcome(measured, plan.lower_bound, {n: plan.seconds for n, plan in plans.items()}, timelines)


def measure_state(
    rank: Rank, specs: Sequence[TensorSpec], gbps: float, rounds: int, limit: int, folder: str
) -> StateOutcome | None:
    """A state dict by one plan, by full tensors and broadcasts, and by torch's checkpoints, in turns."""
    cluster = DeclaredCluster.uniform(max(rank.hosts) + 1, gbps=gbps)
    plan = plan_tensors(specs, cluster=cluster)
    group, shards = Group(rank.group, timeout=TIMEOUT), _Shards(specs, rank.rank)
    with Executor(plan, group, max_staging_bytes=limit) as executor:
        staging = _peak_growth(partial(executor.run, shards.src, shards.dst))
        systems = {
            "weft": shards.timed(partial(executor.run, shards.src, shards.dst)),
            "full_broadcast": shards.timed(full_broadcast(specs, rank, shards.src, shards.dst)),
            "dcp_files": shards.timed(dcp_files(specs, rank, shards.src, shards.dst, Path(folder))),
        }
        measured = measure_ranks(Case("", systems), rank, rounds, agree=shards.agree)
    largest = shards.agree(float(staging))
    return None if rank.rank else StateOutcome(measured, plan.lower_bound, plan.seconds, int(largest), limit)


def _peak_growth(run: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory grew at its peak during a run."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {key} in /proc/self/status")
