"""One row of `weft bench pipeline` on the ranks of its lab: every system in turns, predicted and happened.

Training steps of pipelines in a lab: today's 1F1B against eager-1F1B, and against a network that costs nothing.

A host is a stage. Real rows compute; emulated ones sleep for the time of their compute beside a small real matmul,
because this many ranks do not find a core each. Tensors always travel for real, and losses are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.bench.harness import BenchOptions, Case, Measurement, measure_ranks, slowest, traced, track
from weft.bench.systems.pipeline import (
    SECONDS,
    PipelineCase,
    StagedModel,
    build,
    cases,
    forward_one,
    quick_cases,
    torch_step,
)
from weft.lab import Cluster, Rank
from weft.layout import DeclaredCluster, Layout, Mesh, Replicate
from weft.pipeline import Action, Costs, Edge, Kind, Pipeline, Schedule, Simulation, Transfers, schedule
from weft.report import Column, Figure, Headline, Report
from weft.reshard import plan_reshard
from weft.timeline import Timeline, record

TIMEOUT = 120.0
_FORWARDS = 5


@dataclass(frozen=True)
class PipelineSystem:
    """A way to run the step: schedule, strategy of the edges, how transfers go with computing, what travels."""

    schedule: str
    strategy: str = "optimal"
    transfers: Transfers = Transfers.OVERLAPPED
    payload: str = "tensors"


SYSTEMS = {
    "synchronous": PipelineSystem("1f1b", "send_recv", Transfers.SYNCHRONOUS),
    "alpa": PipelineSystem("1f1b", "all_gather", Transfers.SYNCHRONOUS),
    "1f1b": PipelineSystem("1f1b"),
    "eager": PipelineSystem("eager-1f1b"),
    "eager_delay": PipelineSystem("eager-1f1b+delay"),
    "signal": PipelineSystem("eager-1f1b", payload="signals"),
    "signal_delay": PipelineSystem("eager-1f1b+delay", payload="signals"),
}
TORCH = "torch"
ALL = (*SYSTEMS, TORCH)
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class PipelineOutcome:
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
        start = record.now()
        forward_one(case, model.stages[rank.host], rank.host, dict(model.tensors), model.batch)
        seconds.append(record.now() - start)
    total = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    dist.all_reduce(total)
    return Sizes(float(total) / rank.world, model.edge_bytes)


def measure_case(rank: Rank, case: PipelineCase, gbps: float, rounds: int, names: Sequence[str]) -> PipelineOutcome:
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
    return PipelineOutcome(measured, predicted, (expected, happened))


def _pipeline(case: PipelineCase, model: StagedModel, system: PipelineSystem, rank: Rank, gbps: float) -> Pipeline:
    return Pipeline(
        {rank.host: model.stages[rank.host]}, [_mesh(case, stage) for stage in range(case.stages)],
        _schedule(case, system), edges=case.graph, loss_fn=model.loss_fn, group=rank.group, timeout=TIMEOUT,
        transfers=system.transfers, strategy=system.strategy, cluster=_cluster(case, gbps), payload=system.payload,
    )  # fmt: skip


def _cluster(case: PipelineCase, gbps: float) -> DeclaredCluster:
    return DeclaredCluster.uniform(case.stages, gbps=gbps)


def _mesh(case: PipelineCase, stage: int) -> Mesh:
    return Mesh.grid(1, case.devices, first_rank=stage * case.devices, first_host=stage)


def _schedule(case: PipelineCase, system: PipelineSystem) -> Schedule:
    return schedule(system.schedule, stages=case.stages, microbatches=case.microbatches)


def _step(pipe: Pipeline, model: StagedModel) -> Step:
    return lambda: pipe.step(model.batch, model.targets)


def _clean(model: StagedModel, rank: Rank, step: Step) -> Step:
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
    case: PipelineCase, model: StagedModel, steps: Mapping[str, Step], rank: Rank, gbps: float
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


def _transfer_seconds(case: PipelineCase, model: StagedModel, edge: Edge, system: PipelineSystem, gbps: float) -> float:
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
    with record.trace() as trace:
        step()
    for event in trace.timeline.events:
        if event.kind == "compute":
            seconds[Action.parse(event.name).kind].append(event.end - event.start)
    medians = torch.zeros(len(Kind), case.stages, dtype=torch.float64)
    for row, kind in enumerate(Kind):
        medians[row, rank.host] = statistics.median(seconds[kind]) if seconds[kind] else 0.0
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return {kind: tuple(medians[row].tolist()) for row, kind in enumerate(Kind)}


NAME = "pipeline"
HELP = "training steps of a GPT and a U-Transformer over 2 and 4 hosts: schedules and transfers against each other"
HALF = 0.5  # the share that the figures of the summary are taken at
_RUN_TIMEOUT = 900.0
_EAGER = ("eager", "eager_delay")

COLUMNS = [
    Column("case", "model, stages x devices, share"),
    Column(f"{TORCH}_ms", "torch 1F1B", form=".0f"),
    *(Column(f"{name}_ms", name.replace("_", "+"), form=".0f") for name in SYSTEMS if name != "signal_delay"),
    Column("vs_alpa", "eager vs alpa", form=".2f", bar=True),
    Column("vs_1f1b", "vs 1f1b", form=".2f"),
    Column("signal_fraction", "of signal", form=".3f"),
    Column("predict_error", "pred. err.", form=".1%"),
    Column("disturbed", "disturbed", form="d"),
]


@dataclass(frozen=True)
class Result:
    """One row, measured."""

    case: PipelineCase
    outcome: PipelineOutcome

    @property
    def measured(self) -> Measurement:
        return self.outcome.measured

    @property
    def best(self) -> str:
        """The faster of the two eager schedules."""
        return min(_EAGER, key=self.measured.median)

    def ratio(self, system: str) -> float | None:
        """How much longer a system takes than the better eager schedule; None where it can't run."""
        return self.measured.ratio(system, self.best) if system in self.measured.case.systems else None

    @property
    def signal_fraction(self) -> float:
        """The better eager schedule against itself with nothing to send."""
        return min(self.measured.median(s) for s in ("signal", "signal_delay")) / self.measured.median(self.best)

    @property
    def errors(self) -> list[float]:
        return [abs(self.outcome.predicted[name] / self.measured.median(name) - 1) for name in self.outcome.predicted]

    def row(self) -> dict[str, object]:
        return {
            **self.measured.row(),
            **{f"{name}_predicted_ms": seconds * 1e3 for name, seconds in self.outcome.predicted.items()},
            "vs_alpa": self.ratio("alpa"),
            "vs_synchronous": self.ratio("synchronous"),
            "vs_1f1b": self.ratio("1f1b"),
            "vs_torch": self.ratio(TORCH),
            "signal_fraction": self.signal_fraction,
            "predict_error": statistics.median(self.errors),
        }

    def figure(self) -> Figure:
        """The eager step as predicted, above what happened."""
        predicted, happened = self.outcome.timelines
        note = f"{predicted.seconds * 1e3:.0f} ms predicted, {happened.seconds * 1e3:.0f} ms measured"
        return Figure(f"eager-1f1b: {self.case.name}", (predicted, happened), [note])


def run(options: BenchOptions) -> Report:
    """A lab for each row, because each row has its own links."""
    chosen = quick_cases() if options.quick else list(cases())
    results = [_result(case, 3 if options.quick else 7) for case in track(chosen, title=NAME)]
    return Report(
        NAME,
        rows=[result.row() for result in results],
        summary=summary(results),
        columns=COLUMNS,
        title="pipeline: ms of a training step, one thread a rank",
        notes=[
            "share: seconds of one transfer over seconds of one forward; the links are as slow as that takes",
            "synchronous: 1F1B with send and recv to every device in the training loop; alpa: the same with one copy "
            "for each host and an all-gather inside; 1f1b: transfers beside computing, by the same runtime",
            "signal: the eager schedule with a few bytes in place of each tensor; eager vs ...: the better of the two",
            "real rows with more stages than cores share them",
        ],
        figures=[result.figure() for result in results],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a GPT over four hosts."""
    result = _result(quick_cases()[0], 3, ("alpa", "eager", "eager_delay", "signal", "signal_delay"))
    today, ours = result.measured.median("alpa"), result.measured.median(result.best)
    bound = min(result.measured.median(s) for s in ("signal", "signal_delay"))
    what = f"pipeline step ({result.case.name}), against 1F1B"
    return [Headline(what, today, ours, bound, "s", today / ours, result.measured.disturbed, [result.figure()])]


def _result(case: PipelineCase, rounds: int, systems: Sequence[str] = ALL) -> Result:
    sizes = emulated_sizes(case) if case.emulated else _real_sizes(case)
    gbps = sizes.edge_bytes * 8e-9 / (case.share * sizes.forward)
    with Cluster(case.stages, case.devices, gbps) as lab:
        return Result(case, lab.run(measure_case, case, gbps, rounds, systems, timeout=_RUN_TIMEOUT)[0])


def _real_sizes(case: PipelineCase) -> Sizes:
    with Cluster(case.stages, case.devices, None) as lab:
        return lab.run(measure_sizes, case, timeout=_RUN_TIMEOUT)[0]


def summary(results: Sequence[Result]) -> dict[str, object]:
    """The figures at half a forward a transfer; the worst of the rows that each is about."""
    half = [result for result in results if result.case.share == HALF]

    def worst(model: str) -> float:
        found = [result.ratio("alpa") for result in half if result.case.model == model and result.case.emulated]
        return min(ratio for ratio in found if ratio is not None)

    by_torch = [ratio for result in results if (ratio := result.ratio(TORCH)) is not None]
    return {
        "gpt_vs_alpa": worst("gpt"),
        "unet_vs_alpa": worst("u-transformer"),
        "signal_fraction_min": min(result.signal_fraction for result in half),
        "vs_torch_1f1b": min(by_torch),
        "predict_error_median": statistics.median(error for result in results for error in result.errors),
    }
