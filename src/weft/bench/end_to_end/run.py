"""What resharding and the pipeline bring to a training step of two stages, each of the two switched off in turn.

A stage is a host of two ranks, and what goes from stage to stage is replicated over them, as between tensor-parallel
stages. Stages sleep for the time of their compute beside a small real matmul, as four ranks do not find a core each;
tensors travel for real.

weft              eager-1F1B, transfers beside computing, each tensor once over the wire and on inside the host
weft_no_reshard   the same schedule; each rank is sent a part, and an all-gather inside the host makes it whole
weft_no_pipeline  1F1B, which waits for every transfer where it is due
neither           1F1B that waits, and every rank is sent all: what a loop of send and recv does

A tensor-parallel transformer trained, prefilled and decoded by weft, against torch, Hugging Face and vLLM.

Every rank has one thread. Times are those of the slowest rank. All systems of a row start from the same weights and are
given the same texts; a row whose losses or tokens differ fails. docs/end_to_end.md says how each peer is run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from weft.bench.end_to_end.cases import DEMO_LLAMA, Load, ModelSize, Place, Scale, WorkKind, full, quick
from weft.bench.end_to_end.lab import (
    RUN_TIMEOUT,
    EndToEndOutcome,
    Machine,
    TorchStep,
    measure_generate,
    measure_machine,
    measure_train,
    torch_step,
)
from weft.bench.end_to_end.measure import CORE, SYSTEMS, Engines, save_model
from weft.bench.end_to_end.rows import COLUMNS, Result, summary
from weft.bench.harness import BenchOptions, Case, Measurement, measure_ranks, track
from weft.bench.pipeline import PipelineSystem, emulated_sizes
from weft.bench.systems.pipeline import PipelineCase, StagedModel, build
from weft.bench.systems.vllm import PYTHON
from weft.lab import Cluster, Rank
from weft.layout import Mesh
from weft.layout.mesh import DeclaredCluster as Wires
from weft.pipeline import Pipeline, Transfers, schedule
from weft.report import Headline, Report

PROMISE_SYSTEMS = {
    "weft": PipelineSystem("eager-1f1b"),
    "weft_no_reshard": PipelineSystem("eager-1f1b", "all_gather"),
    "weft_no_pipeline": PipelineSystem("1f1b", transfers=Transfers.SYNCHRONOUS),
    "neither": PipelineSystem("1f1b", "send_recv", Transfers.SYNCHRONOUS),
}
CASE = PipelineCase("gpt", stages=2, devices=2, share=0.5, microbatches=8, emulated=True)
_TIMEOUT = 120.0
_RUN_TIMEOUT = 900.0
Step = Callable[[], Tensor]


def promise_row(rounds: int, case: PipelineCase = CASE) -> dict[str, object]:
    """The row of the report, measured in a lab of its own."""
    sizes = emulated_sizes(case)
    gbps = sizes.edge_bytes * 8e-9 / (case.share * sizes.forward)
    with Cluster(case.stages, case.devices, gbps) as lab:
        measured = lab.run(_measure, case, gbps, rounds, timeout=_RUN_TIMEOUT)[0]
    found = {
        f"without_{name.removeprefix('weft_no_')}": measured.ratio(name, "weft") for name in list(PROMISE_SYSTEMS)[1:-1]
    }
    return {
        **measured.row(), "kind": "promises", "hosts": case.stages, "devices": case.devices, "gbps": gbps,
        "padded_ms": measured.median("neither") * 1e3, "vs_padded": measured.ratio("neither", "weft"), **found,
    }  # fmt: skip


def _measure(rank: Rank, case: PipelineCase, gbps: float, rounds: int) -> Measurement:
    model = build(case)
    with ExitStack() as stack:
        steps: dict[str, Step] = {}
        for name, system in PROMISE_SYSTEMS.items():
            pipe = stack.enter_context(_pipeline(case, model, system, rank, gbps))
            steps[name] = _step(pipe, model, rank)
        losses = {name: step() for name, step in steps.items()}
        for name, found in losses.items():
            if not torch.allclose(found, losses["neither"], rtol=1e-4):
                raise AssertionError(f"losses of {name} are {found.tolist()}, of 1F1B {losses['neither'].tolist()}")
        what = f"pipeline of {case.stages} stages x {case.devices}, emulated, transfers {case.share:g} of a forward"
        return measure_ranks(Case(what, steps), rank, rounds, warmup=0)


def _pipeline(case: PipelineCase, model: StagedModel, system: PipelineSystem, rank: Rank, gbps: float) -> Pipeline:
    meshes = [Mesh.grid(1, case.devices, first_rank=s * case.devices, first_host=s) for s in range(case.stages)]
    return Pipeline(
        {rank.host: model.stages[rank.host]}, meshes,
        schedule(system.schedule, stages=case.stages, microbatches=case.microbatches), edges=case.graph,
        loss_fn=model.loss_fn, group=rank.group, timeout=_TIMEOUT, transfers=system.transfers,
        strategy=system.strategy, cluster=Wires.uniform(case.stages, gbps=gbps),
    )  # fmt: skip


def _step(pipe: Pipeline, model: StagedModel, rank: Rank) -> Step:
    def step() -> Tensor:
        model.stages[rank.host].zero_grad(set_to_none=True)
        return pipe.step(model.batch, model.targets)

    return step


NAME = "end_to_end"
HELP = "training, prefill and decoding of a tensor-parallel Llama against torch, Hugging Face and vLLM"
NOTES = (
    "padded: torch's parallelize_module, or Hugging Face with tp_plan='auto', on a padded batch",
    "unpadded: the same on a packed batch (training), or one prompt at a time (prefill)",
    "vLLM: the fastest of one rank or two, eager or compiled, without the plugin; each is in the JSON",
    "- overlap: weft with every op's sequential plan; - packing: weft computes the padding, too",
    "bound: the longest of flops at the measured peak, bytes over a card, and weights read from memory in decoding",
    "exposed: the part of weft's time that was communication with nothing computed under it",
)


def run(options: BenchOptions, *, scale: Scale | None = None) -> Report:
    """A lab for each place, because each has its own links. `scale` is for tests, which have no time."""
    scale = scale or (quick() if options.quick else full())
    engines = None
    if scale.vllm and PYTHON.exists():
        engines = Engines.known(PYTHON.absolute(), compiled=not options.quick)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(scale.load, Path(folder), engines)
        results: list[Result] = []
        for place, kinds in track(scale.places, title=NAME):
            promises = scale.promises and place.is_headline
            results += bench.results(place, kinds, scale.rounds_of(place), promises=promises)
    absent = [] if PYTHON.exists() else [f"vLLM was not measured: there is no {PYTHON}; `make test-vllm` makes it"]
    return Report(
        NAME,
        rows=[*(result.row() for result in results), *([promise_row(scale.rounds)] if scale.promises else [])],
        summary=summary(results),
        columns=COLUMNS,
        title="end to end: ms of the slowest rank, one thread a rank; hosts x devices, torch's share of communication",
        notes=[*NOTES, *absent],
        figures=[result.figure() for result in results if result.kind is WorkKind.TRAIN and result.place.is_headline],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a training step of a small Llama over two hosts."""
    place, load = Place(DEMO_LLAMA, 2, 1, None), Load(train_tokens=512, longest_text=256)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load, Path(folder), None)
        # No time to see what torch needs: the wire takes half as long as all matmuls at this machine's peak.
        seconds = place.size.train_flops(load.train_lengths) / bench.machine(decoding=False).flops
        gbps = 8e-9 * place.size.train_bytes(load.train_tokens, place.hosts) / (0.5 * seconds)
        (result,) = bench.results(place, (WorkKind.TRAIN,), 3, trained_by=("torch_packed", "weft"), gbps=gbps)
    today, ours = result.seconds("torch_packed") * 1e3, result.seconds("weft") * 1e3
    what = f"training step, 2 layers of width {place.size.width}, {gbps:.1f} Gbit/s, against torch on packed texts"
    figures = [result.figure()]
    return [Headline(what, today, ours, result.bound * 1e3, "ms", today / ours, result.measured.disturbed, figures)]


class Bench:
    """Measures places one after the other; what it found out on the way it need not find out again."""

    def __init__(self, load: Load, folder: Path, engines: Engines | None) -> None:
        self._load, self._folder, self._engines = load, folder, engines
        self._machine: Machine | None = None
        self._steps: dict[tuple[ModelSize, int, int], TorchStep] = {}
        self._saved: dict[ModelSize, Path] = {}

    def results(
        self,
        place: Place,
        kinds: Sequence[WorkKind],
        rounds: int,
        *,
        promises: bool = False,
        trained_by: Sequence[str] = CORE,
        gbps: float | None = None,
    ) -> list[Result]:
        """The rows of one place, in one lab; with `promises` also by weft without each of them.

        `trained_by` are the other systems of a training row; `gbps` is for a place that has no share to choose it by.
        """
        step = None
        if place.share is not None:
            step = self._torch_step(place)
            gbps = step.gbps(place.share)
        machine = self.machine(decoding=WorkKind.DECODE in kinds)
        found: list[tuple[WorkKind, EndToEndOutcome]] = []
        with Cluster(place.hosts, place.devices, gbps) as lab:
            if WorkKind.TRAIN in kinds:
                arguments = (place, self._load, rounds, tuple(SYSTEMS) if promises else trained_by)
                found.append((WorkKind.TRAIN, lab.run(measure_train, *arguments, timeout=RUN_TIMEOUT)[0]))
            if rest := [kind for kind in kinds if kind is not WorkKind.TRAIN]:
                # vLLM knows nothing of hosts here: it is measured where all ranks are on one.
                engines = self._engines if place.hosts == 1 else None
                parts = (place, self._load, rounds, rest, str(self._model_folder(place.size)), engines, promises)
                found += lab.run(measure_generate, *parts, timeout=RUN_TIMEOUT)[0].items()
        return [Result(place, kind, self._load, outcome, gbps, machine, step) for kind, outcome in found]

    def machine(self, *, decoding: bool) -> Machine:
        """What this machine can do."""
        if self._machine is None or (decoding and not self._machine.bandwidth):
            self._machine = measure_machine(decoding=decoding)
        return self._machine

    def _torch_step(self, place: Place) -> TorchStep:
        key = (place.size, place.hosts, place.devices)
        if key not in self._steps:
            self._steps[key] = torch_step(place, self._load)
        return self._steps[key]

    def _model_folder(self, size: ModelSize) -> Path:
        if size not in self._saved:
            self._saved[size] = save_model(size, self._folder / f"model-{len(self._saved)}")
        return self._saved[size]
