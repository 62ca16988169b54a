"""One row of `weft bench pipeline` on the ranks of its lab: every system in turns, predicted and happened."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft import tracing
from weft.bench.harness import Case, Measurement
from weft.bench.pipeline_cases import PipelineCase
from weft.bench.pipeline_models import SECONDS, Model, build, forward_one, torch_step
from weft.bench.ranks import measure_ranks, slowest, traced
from weft.cluster import Cluster
from weft.lab import Rank
from weft.layout import Layout, Mesh, Replicate
from weft.pipeline import Action, Costs, Edge, Kind, Pipeline, Schedule, Simulation, Transfers, schedule
from weft.reshard import plan_reshard
from weft.timeline import Timeline

TIMEOUT = 120.0
_FORWARDS = 5


@dataclass(frozen=True)
class System:
    """A way to run the step: schedule, strategy of the edges, how transfers go with computing, what travels."""

    schedule: str
    strategy: str = "optimal"
    transfers: Transfers = Transfers.OVERLAPPED
    payload: str = "tensors"


SYSTEMS = {
    "synchronous": System("1f1b", "send_recv", Transfers.SYNCHRONOUS),
    "alpa": System("1f1b", "all_gather", Transfers.SYNCHRONOUS),
    "1f1b": System("1f1b"),
    "eager": System("eager-1f1b"),
    "eager_delay": System("eager-1f1b+delay"),
    "signal": System("eager-1f1b", payload="signals"),
    "signal_delay": System("eager-1f1b+delay", payload="signals"),
}
TORCH = "torch"
ALL = (*SYSTEMS, TORCH)
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a row gave: times, predicted seconds by system, and the eager step as predicted and as it was."""

    measured: Measurement
    predicted: Mapping[str, float]
    timelines: tuple[Timeline, Timeline]


@dataclass(frozen=True)
class Sizes:
    """What the speed of the links is chosen by: seconds of a stage's forward while all compute, bytes of an edge."""

    forward: float
    edge_bytes: int


def emulated_sizes(case: PipelineCase) -> Sizes:
    """As they are declared."""
    return Sizes(SECONDS, build(case).edge_bytes)


def measure_sizes(rank: Rank, case: PipelineCase) -> Sizes:
    """The mean of the stages' forwards, each the median of a few."""
    model = build(case)
    seconds = []
    for _ in range(_FORWARDS):
        dist.barrier()
        start = tracing.now()
        forward_one(case, model.stages[rank.host], rank.host, dict(model.tensors), model.batch)
        seconds.append(tracing.now() - start)
    total = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    dist.all_reduce(total)
    return Sizes(float(total) / rank.world, model.edge_bytes)


def measure_case(rank: Rank, case: PipelineCase, gbps: float, rounds: int, names: Sequence[str]) -> Outcome:
    """The systems of these names in turns. Losses must be equal, and peaks as predicted, or it is an error."""
    model = build(case)
    with ExitStack() as stack:
        pipes = {
            name: stack.enter_context(_pipeline(case, model, system, rank, gbps))
            for name, system in SYSTEMS.items()
            if name in names
        }
        steps = {name: _clean(model, rank, _step(pipe, model)) for name, pipe in pipes.items()}
        if TORCH in names and not case.has_skips:
            steps[TORCH] = _clean(model, rank, torch_step(case, model, rank))
        _check_losses(steps)
        simulations = _simulate(case, model, steps, rank, gbps)
        labels = {
            "model": case.model, "stages": case.stages, "devices": case.devices, "share": case.share,
            "microbatches": case.microbatches, "emulated": case.emulated, "gbps": gbps,
        }  # fmt: skip
        measured = measure_ranks(Case(case.name, steps, labels), rank, rounds, warmup=0)  # each has made a step
        for name, simulation in simulations.items():
            _check_peaks(pipes[name], simulation)
        happened = traced(steps["eager"], rank)
    predicted = {name: simulation.seconds for name, simulation in simulations.items()}
    expected = Timeline(simulations["eager"].timeline.events, name="predicted")
    return Outcome(measured, predicted, (expected, happened))


def _pipeline(case: PipelineCase, model: Model, system: System, rank: Rank, gbps: float) -> Pipeline:
    return Pipeline(
        {rank.host: model.stages[rank.host]}, [_mesh(case, stage) for stage in range(case.stages)],
        _schedule(case, system), edges=case.graph, loss_fn=model.loss_fn, group=rank.group, timeout=TIMEOUT,
        transfers=system.transfers, strategy=system.strategy, cluster=_cluster(case, gbps), payload=system.payload,
    )  # fmt: skip


def _cluster(case: PipelineCase, gbps: float) -> Cluster:
    return Cluster.uniform(case.stages, gbps=gbps)


def _mesh(case: PipelineCase, stage: int) -> Mesh:
    return Mesh.grid(1, case.devices, first_rank=stage * case.devices, first_host=stage)


def _schedule(case: PipelineCase, system: System) -> Schedule:
    return schedule(system.schedule, stages=case.stages, microbatches=case.microbatches)


def _step(pipe: Pipeline, model: Model) -> Step:
    return lambda: pipe.step(model.batch, model.targets)


def _clean(model: Model, rank: Rank, step: Step) -> Step:
    def run() -> Tensor:
        model.stages[rank.host].zero_grad(set_to_none=True)
        return step()

    return run


def _check_losses(steps: Mapping[str, Step]) -> None:
    losses = {name: step() for name, step in steps.items()}
    for name, found in losses.items():
        if not name.startswith("signal") and not torch.allclose(found, losses["alpa"], rtol=1e-4):
            raise AssertionError(f"losses of {name} are {found.tolist()}, those of 1F1B {losses['alpa'].tolist()}")


def _check_peaks(pipe: Pipeline, simulation: Simulation) -> None:
    expected = {stage: simulation.peak_activations[stage] for stage in pipe.peak_activations}
    if pipe.peak_activations != expected:
        raise AssertionError(f"peak activations are {pipe.peak_activations}, predicted {expected}")


def _simulate(
    case: PipelineCase, model: Model, steps: Mapping[str, Step], rank: Rank, gbps: float
) -> dict[str, Simulation]:
    """Each system with stages as they run when nothing is sent, and transfers as their plans say."""
    whole, split = (_stage_seconds(case, steps[name], rank) for name in ("signal", "signal_delay"))
    found = {}
    for name, system in SYSTEMS.items():
        if name not in steps or system.payload != "tensors":
            continue
        costs = Costs(
            forward=whole[Kind.FORWARD],
            backward=whole[Kind.BACKWARD],
            input_gradient=split[Kind.INPUT_GRADIENT],
            weight_gradient=split[Kind.WEIGHT_GRADIENT],
            transfer={edge: _transfer_seconds(case, model, edge, system, gbps) for edge in case.graph.edges},
        )
        found[name] = _schedule(case, system).simulate(costs, case.graph, transfers=system.transfers)
    return found


def _transfer_seconds(case: PipelineCase, model: Model, edge: Edge, system: System, gbps: float) -> float:
    tensor = model.tensors[edge.source, edge.tensor]
    src, dst = (Layout(_mesh(case, stage), (Replicate(), Replicate())) for stage in (edge.source, edge.target))
    plan = plan_reshard(
        tensor.shape, tensor.dtype, src=src, dst=dst, cluster=_cluster(case, gbps), strategy=system.strategy
    )
    return plan.seconds


def _stage_seconds(case: PipelineCase, step: Step, rank: Rank) -> dict[Kind, tuple[float, ...]]:
    """The median of each kind of action on each stage, the slowest device's: from one traced step."""
    seconds: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    slowest(0.0)
    with tracing.trace() as trace:
        step()
    for event in trace.timeline.events:
        if event.kind == "compute":
            seconds[Action.parse(event.name).kind].append(event.end - event.start)
    medians = torch.zeros(len(Kind), case.stages, dtype=torch.float64)
    for row, kind in enumerate(Kind):
        medians[row, rank.host] = statistics.median(seconds[kind]) if seconds[kind] else 0.0
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return {kind: tuple(medians[row].tolist()) for row, kind in enumerate(Kind)}
