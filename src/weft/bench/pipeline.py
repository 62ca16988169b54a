"""Training steps of pipelines in a lab: today's 1F1B against eager-1F1B, and against a network that costs nothing.

A host is a stage. Real rows compute; emulated ones sleep for the time of their compute beside a small real matmul,
because this many ranks do not find a core each. Tensors always travel for real, and losses are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.bench.bounds import NOISY_COLUMN, NOISY_NOTE, beats, calm, noisy_extremes, settle, trust
from weft.bench.harness import BenchOptions, Case, Result, column, measure_ranks, over_cards, slowest, traced, track
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
from weft.report import Column, Headline, Report, Row
from weft.reshard import plan_reshard
from weft.timeline import Timeline, record

NAME = "pipeline"
HELP = "training steps of a GPT and a U-Transformer over 2 and 4 hosts: schedules and transfers against each other"
HALF = 0.5  # the share that the figures of the summary are taken at
TIMEOUT = 120.0
_RUN_TIMEOUT = 900.0
_FORWARDS = 5
Step = Callable[[], Tensor]


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
SIGNALS = ("signal", "signal_delay")  # a few bytes in place of each tensor: what a free network would give
EAGER = ("eager", "eager_delay")
TORCH = "torch"
ALL = (*SYSTEMS, TORCH)
COLUMNS = [
    NOISY_COLUMN,
    Column("case", "model, stages x devices, share"),
    Column(f"{TORCH}_ms", "torch 1F1B", form=".0f"),
    *(Column(f"{name}_ms", name.replace("_", "+"), form=".0f") for name in SYSTEMS if name != "signal_delay"),
    Column("vs_alpa", "eager vs alpa", form=".2f", bar=True),
    Column("vs_1f1b", "vs 1f1b", form=".2f"),
    Column("signal_fraction", "of signal", form=".3f"),
    Column("predict_error", "pred. err.", form=".1%"),
    Column("disturbed", "disturbed", form="d"),
]


def run(options: BenchOptions) -> Report:
    """A lab for each row, because each row has its own links."""
    return over_cards(options, partial(_run, options))


def _run(options: BenchOptions, cards: str) -> Report:
    chosen = quick_cases() if options.quick else list(cases())
    rows, figures = [], []
    for case in track(chosen, title=NAME):
        result = settle(partial(_result, case, cards, 3 if options.quick else 7))
        rows.append(_row(result))
        figures.append(result.figure(f"eager-1f1b: {case.name}"))
    return Report(
        NAME,
        rows=rows,
        summary=summary(rows),
        columns=COLUMNS,
        title="pipeline: ms of a training step, one thread a rank",
        notes=[
            "share: seconds of one transfer over seconds of one forward; the links are as slow as that takes",
            "synchronous: 1F1B with send and recv to every device in the training loop; alpa: the same with one copy "
            "for each host and an all-gather inside; 1f1b: transfers beside computing, by the same runtime",
            "signal: the eager schedule with a few bytes in place of each tensor; eager vs ...: the better of the two",
            "real rows with more stages than cores share them",
            NOISY_NOTE,
        ],
        figures=figures,
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a GPT over four hosts."""
    case = quick_cases()[0]
    result = _result(case, "tcp", 3, ("alpa", *EAGER, *SIGNALS))
    what, figures = f"pipeline step ({case.name}), against 1F1B", [result.figure(f"eager-1f1b: {case.name}")]
    return [result.headline(what, today="alpa", ours=_best(result), unit="s", figures=figures)]


def _result(case: PipelineCase, cards: str, rounds: int, systems: Sequence[str] = ALL) -> Result:
    gbps = (emulated_sizes(case) if case.emulated else _real_sizes(case)).gbps(case.share)
    with Cluster(case.stages, case.devices, gbps, cards=cards) as lab:
        return lab.run(measure_case, case, gbps, rounds, systems, timeout=_RUN_TIMEOUT)[0]


def _best(result: Result) -> str:
    """The faster of the two eager schedules."""
    return min(EAGER, key=result.measured.median)


def _row(result: Result) -> Row:
    measured, best = result.measured, _best(result)

    def versus(system: str) -> float | None:
        """How much longer a system takes than the better eager schedule; None where it can't run."""
        return measured.ratio(system, best) if system in measured.case.systems else None

    return {
        **measured.row(),
        **{f"{name}_predicted_ms": seconds * 1e3 for name, seconds in result.predicted.items()},
        "vs_alpa": versus("alpa"),
        "vs_synchronous": versus("synchronous"),
        "vs_1f1b": versus("1f1b"),
        "vs_torch": versus(TORCH),
        "signal_fraction": min(measured.median(name) for name in SIGNALS) / measured.median(best),
        "bound_ms": (result.bound or 0.0) * 1e3,
        **beats(result.bound, (measured.median(s) for s in measured.case.systems if s not in SIGNALS)),
        "predict_error": statistics.median(result.prediction_errors),
        **result.facts,
    }


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The figures at half a forward a transfer; the worst of the rows that each is about."""
    half = [row for row in rows if row["share"] == HALF]

    def worst(model: str) -> float:
        return min(column([row for row in half if row["model"] == model and row["emulated"]], "vs_alpa"))

    errors = [
        abs(row[f"{name}_predicted_ms"] / row[f"{name}_ms"] - 1)
        for row in calm(rows)
        for name in SYSTEMS
        if f"{name}_predicted_ms" in row
    ]
    return {
        "gpt_vs_alpa": worst("gpt"),
        "unet_vs_alpa": worst("u-transformer"),
        "signal_fraction_min": min(column(half, "signal_fraction")),
        "vs_torch_1f1b": min(column(rows, "vs_torch")),
        "predict_error_median": statistics.median(errors),
        **trust(rows),
        "noisy_extremes": noisy_extremes(half, {"signal_fraction_min": (min, "signal_fraction")}),
    }


@dataclass(frozen=True)
class Sizes:
    """What the speed of the links is chosen by: seconds of a stage's forward while all compute, bytes of an edge."""

    forward: float
    edge_bytes: int

    def gbps(self, share: float) -> float:
        """The rate at which a transfer lasts `share` times a forward."""
        return self.edge_bytes * 8e-9 / (share * self.forward)


def emulated_sizes(case: PipelineCase) -> Sizes:
    """As they are declared."""
    return Sizes(SECONDS, build(case).edge_bytes)


def _real_sizes(case: PipelineCase) -> Sizes:
    with Cluster(case.stages, case.devices, None) as lab:
        return lab.run(measure_sizes, case, timeout=_RUN_TIMEOUT)[0]


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


def measure_case(rank: Rank, case: PipelineCase, gbps: float, rounds: int, names: Sequence[str]) -> Result:
    """The systems of these names in turns. Losses must be equal, and peaks as predicted, or it is an error."""
    model = build(case)
    with ExitStack() as stack:
        chosen = {name: system for name, system in SYSTEMS.items() if name in names}
        pipes = open_pipelines(stack, case, model, chosen, rank, gbps)
        steps = {name: pipeline_step(pipe, model, rank) for name, pipe in pipes.items()}
        if TORCH in names and not case.has_skips:
            steps[TORCH] = _zeroed(model, rank, torch_step(case, model, rank))
        check_losses(steps, like="alpa")
        simulations = _simulate(case, model, steps, rank, gbps)
        labels = {
            "model": case.model, "stages": case.stages, "devices": case.devices, "share": case.share,
            "microbatches": case.microbatches, "emulated": case.emulated, "gbps": gbps,
        }  # fmt: skip
        measured = measure_ranks(Case(case.name, steps, labels), rank, rounds, warmup=0)  # each has made a step
        for name, simulation in simulations.items():
            _check_peaks(pipes[name], simulation)
        happened = traced(steps["eager"], rank)
    return Result(
        measured,
        bound=min(measured.best(name) for name in SIGNALS),  # nobody computes faster than with nothing to send
        predicted={name: simulation.seconds for name, simulation in simulations.items()},
        timelines=(Timeline(simulations["eager"].timeline.events, name="predicted"), happened),
    )


def open_pipelines(
    stack: ExitStack,
    case: PipelineCase,
    model: StagedModel,
    systems: Mapping[str, PipelineSystem],
    rank: Rank,
    gbps: float,
) -> dict[str, Pipeline]:
    """A pipeline for each system, all on the same stages; `stack` closes them."""
    return {
        name: stack.enter_context(
            Pipeline(
                {rank.host: model.stages[rank.host]},
                [_mesh(case, stage) for stage in range(case.stages)],
                _schedule(case, system),
                edges=case.graph,
                loss_fn=model.loss_fn,
                group=rank.group,
                timeout=TIMEOUT,
                transfers=system.transfers,
                strategy=system.strategy,
                cluster=_cluster(case, gbps),
                payload=system.payload,
            )
        )
        for name, system in systems.items()
    }


def pipeline_step(pipe: Pipeline, model: StagedModel, rank: Rank) -> Step:
    """A whole training step but for the optimiser."""
    return _zeroed(model, rank, lambda: pipe.step(model.batch, model.targets))


def _zeroed(model: StagedModel, rank: Rank, step: Step) -> Step:
    def run() -> Tensor:
        model.stages[rank.host].zero_grad(set_to_none=True)
        return step()

    return run


def check_losses(steps: Mapping[str, Step], *, like: str) -> None:
    """Makes one step of each system, and raises unless all that send tensors have the losses of `like`."""
    losses = {name: step() for name, step in steps.items()}
    for name, found in losses.items():
        if name not in SIGNALS and not torch.allclose(found, losses[like], rtol=1e-4):
            raise AssertionError(f"losses of {name} are {found.tolist()}, those of 1F1B {losses[like].tolist()}")


def _cluster(case: PipelineCase, gbps: float) -> DeclaredCluster:
    return DeclaredCluster.uniform(case.stages, gbps=gbps)


def _mesh(case: PipelineCase, stage: int) -> Mesh:
    return Mesh.grid(1, case.devices, first_rank=stage * case.devices, first_host=stage)


def _schedule(case: PipelineCase, system: PipelineSystem) -> Schedule:
    return schedule(system.schedule, stages=case.stages, microbatches=case.microbatches)


def _check_peaks(pipe: Pipeline, simulation: Simulation) -> None:
    expected = {stage: simulation.peak_activations[stage] for stage in pipe.peak_activations}
    if pipe.peak_activations != expected:
        raise AssertionError(f"peak activations are {pipe.peak_activations}, predicted {expected}")


def _simulate(
    case: PipelineCase, model: StagedModel, steps: Mapping[str, Step], rank: Rank, gbps: float
) -> dict[str, Simulation]:
    """Each system with stages as they run when nothing is sent, and transfers as their plans say."""
    whole, split = (_stage_seconds(case, steps[name], rank) for name in SIGNALS)
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
