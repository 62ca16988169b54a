"""A tensor-parallel transformer trained, prefilled and decoded by weft, against torch, Hugging Face and vLLM.

Every rank has one thread. Times are those of the slowest rank. All systems of a row start from the same weights and are
given the same texts; a row whose losses or tokens differ fails. docs/end_to_end.md says how each peer is run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weft.bench.bounds import NOISY_COLUMN, NOISY_NOTE, beats, message_cpu, settle, trust, with_cpu
from weft.bench.end_to_end_lab import (
    FIRST,
    RUN_TIMEOUT,
    Machine,
    TorchStep,
    measure_generate,
    measure_machine,
    measure_train,
    torch_step,
)
from weft.bench.harness import BenchOptions, Case, Measurement, Result, column, measure_ranks, over_cards, track
from weft.bench.pipeline import PipelineSystem, check_losses, emulated_sizes, open_pipelines, pipeline_step
from weft.bench.systems.end_to_end import DEMO_LLAMA, Load, ModelSize, Place, Scale, WorkKind, full, quick
from weft.bench.systems.parallel import CORE_TRAIN_SYSTEMS, TRAIN_SYSTEMS, Engines, save_model
from weft.bench.systems.pipeline import PipelineCase, build
from weft.bench.systems.vllm import PYTHON
from weft.lab import Cluster, Rank
from weft.pipeline import Transfers
from weft.report import Column, Figure, Headline, Report, Row

NAME = "end_to_end"
HELP = "training, prefill and decoding of a tensor-parallel Llama against torch, Hugging Face and vLLM"
NOTES = (
    "padded: torch's parallelize_module, or Hugging Face with tp_plan='auto', on a padded batch",
    "unpadded: the same on a packed batch (training), or one prompt at a time (prefill)",
    "vLLM: the fastest of one rank or two, eager or compiled, without the plugin; each is in the JSON",
    "- overlap: weft with every op's sequential plan; - packing: weft computes the padding, too",
    "bound: the longest of flops at the run's best peak, bytes over a card, and weights read from memory in decoding",
    "+cpu: the same, when the cores that compute also carry the bytes, as these cards have them do",
    "exposed: the part of weft's time that was communication with nothing computed under it",
    NOISY_NOTE,
)
OURS = "weft"
# What people run today, with padding and without it.
PADDED = {WorkKind.TRAIN: "torch_padded", WorkKind.PREFILL: "hf_tp", WorkKind.DECODE: "hf_tp"}
UNPADDED = {WorkKind.TRAIN: "torch_packed", WorkKind.PREFILL: "hf_tp_loop"}

COLUMNS = [
    NOISY_COLUMN,
    Column("case", "ms"),
    Column("gbps", "Gbit/s", form=".2f"),
    Column("padded_ms", "padded", form=".0f"),
    Column("unpadded_ms", "unpadded", form=".0f"),
    Column("vllm_ms", "vLLM", form=".0f"),
    Column("weft_ms", "weft", form=".0f"),
    Column("weft_no_overlap_ms", "- overlap", form=".0f"),
    Column("weft_no_packing_ms", "- packing", form=".0f"),
    Column("weft_no_reshard_ms", "- reshard", form=".0f"),
    Column("weft_no_pipeline_ms", "- pipeline", form=".0f"),
    Column("bound_ms", "bound", form=".0f"),
    Column("cpu_bound_ms", "+cpu", form=".0f"),
    Column("vs_padded", "/padded", form=".2f", bar=True),
    Column("vs_unpadded", "/unpad.", form=".2f"),
    Column("vs_vllm", "/vLLM", form=".2f"),
    Column("weft_tokens_per_s", "tok/s", form=".0f"),
    Column("exposed", "exposed", form=".0%"),
]


@dataclass(frozen=True)
class PlaceResult:
    """One kind of work at one place, measured; `step` is torch's on a fast link, where the place has a share."""

    place: Place
    kind: WorkKind
    result: Result
    gbps: float | None
    step: TorchStep | None


@dataclass(frozen=True)
class CardsRun:
    """What was measured on one kind of cards: places, the row of other promises, and what a byte takes of a core."""

    found: Sequence[PlaceResult]
    promises: Row | None
    machine: Machine
    cpu_per_byte: float


def run(options: BenchOptions, *, scale: Scale | None = None) -> Report:
    """A lab for each place, because each has its own links. `scale` is for tests, which have no time.

    Everything is measured before any bound is: a bound takes the best that the machine showed in the whole run.
    """
    scale = scale or (quick() if options.quick else full())
    runs = {cards: _measure(options, scale, cards) for cards in options.cards}
    machine = Machine()
    for each in runs.values():
        machine = machine.best(each.machine)
    return over_cards(options, lambda cards: _report(scale.load, runs[cards], machine))


def _measure(options: BenchOptions, scale: Scale, cards: str) -> CardsRun:
    engines = None
    if scale.vllm and PYTHON.exists():
        engines = Engines.known(PYTHON.absolute(), compiled=not options.quick)
    found: list[PlaceResult] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(scale.load, Path(folder), engines, cards)
        for place, kinds in track(scale.places, title=NAME):
            promises = scale.promises and place.is_headline
            found += bench.results(place, kinds, scale.rounds_of(place), promises=promises)
    row = promise_row(scale.rounds, cards=cards) if scale.promises else None
    return CardsRun(found, row, bench.machine, message_cpu(cards))


def _report(load: Load, run: CardsRun, machine: Machine) -> Report:
    rows: list[Row] = []
    figures: list[Figure] = []
    for each in run.found:
        rows.append(finished_row(each, load, machine, cpu_per_byte=run.cpu_per_byte))
        if each.kind is WorkKind.TRAIN and each.place.is_headline:
            figures.append(figure(each.result))
    rows += [] if run.promises is None else [run.promises]
    absent = [] if PYTHON.exists() else [f"vLLM was not measured: there is no {PYTHON}; `make test-vllm` makes it"]
    return Report(
        NAME,
        rows=rows,
        summary=summary(rows),
        columns=COLUMNS,
        title="end to end: ms of the slowest rank, one thread a rank; hosts x devices, torch's share of communication",
        notes=[*NOTES, *absent],
        figures=figures,
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a training step of a small Llama over two hosts."""
    place, load = Place(DEMO_LLAMA, 2, 1, None), Load(train_tokens=512, longest_text=256)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load, Path(folder), None)
        # No time to see what torch needs: the wire takes half as long as all matmuls at this machine's peak.
        seconds = place.size.train_flops(load.train_lengths) / bench.look_at_machine(decoding=False).flops
        gbps = 8e-9 * place.size.train_bytes(load.train_tokens, place.hosts) / (0.5 * seconds)
        systems = ("torch_packed", "weft")
        (found,) = bench.results(place, (WorkKind.TRAIN,), 3, trained_by=systems, gbps=gbps, again=False)
    result = replace(found.result, bound=bound_seconds(place, WorkKind.TRAIN, load, bench.machine, gbps))
    what = f"training step, 2 layers of width {place.size.width}, {gbps:.1f} Gbit/s, against torch on packed texts"
    return [result.headline(what, today="torch_packed", figures=[figure(result)])]


class Bench:
    """Measures places one after the other; what several of them need is found out once."""

    def __init__(self, load: Load, folder: Path, engines: Engines | None, cards: str = "tcp") -> None:
        self._load, self._folder, self._engines, self._cards = load, folder, engines, cards
        self.machine = Machine()
        self._steps: dict[tuple[ModelSize, int, int], TorchStep] = {}
        self._saved: dict[ModelSize, Path] = {}

    def results(
        self,
        place: Place,
        kinds: Sequence[WorkKind],
        rounds: int,
        *,
        promises: bool = False,
        trained_by: Sequence[str] = CORE_TRAIN_SYSTEMS,
        gbps: float | None = None,
        again: bool = True,
    ) -> list[PlaceResult]:
        """What each kind of work gave at one place, in one lab; with `promises` also by weft without each of them.

        `trained_by` are the other systems of a training row; `gbps` is for a place that has no share to choose it by;
        `again` measures noisy rows again.
        """
        step = None
        if place.share is not None:
            step = self._torch_step(place)
            gbps = step.gbps(place.share)
        self.look_at_machine(decoding=WorkKind.DECODE in kinds)
        taken: Callable[[Callable[[], Result]], Result] = settle if again else (lambda take: take())
        found: dict[WorkKind, Result] = {}
        with Cluster(place.hosts, place.devices, gbps, cards="tcp" if gbps is None else self._cards) as lab:
            if WorkKind.TRAIN in kinds:
                arguments = (place, self._load, rounds, tuple(TRAIN_SYSTEMS) if promises else trained_by)
                found[WorkKind.TRAIN] = taken(lambda: lab.run(measure_train, *arguments, timeout=RUN_TIMEOUT)[0])
            if rest := [kind for kind in kinds if kind is not WorkKind.TRAIN]:
                # vLLM knows nothing of hosts here: it is measured where all ranks are on one.
                engines = self._engines if place.hosts == 1 else None

                def generated(some: Sequence[WorkKind]) -> dict[WorkKind, Result]:
                    parts = (place, self._load, rounds, some, str(self._model_folder(place.size)), engines, promises)
                    return lab.run(measure_generate, *parts, timeout=RUN_TIMEOUT)[0]

                first = generated(rest)  # all kinds at once: loading takes long
                for kind in rest:
                    found[kind] = taken(partial(_first_or_again, first, kind, generated))
        return [PlaceResult(place, kind, result, gbps, step) for kind, result in found.items()]

    def look_at_machine(self, *, decoding: bool) -> Machine:
        """What this machine shows now; `machine` keeps the best of it."""
        now = measure_machine(decoding=decoding)
        self.machine = self.machine.best(now)
        return now

    def _torch_step(self, place: Place) -> TorchStep:
        key = (place.size, place.hosts, place.devices)
        if key not in self._steps:
            self._steps[key] = torch_step(place, self._load, self._cards)
        return self._steps[key]

    def _model_folder(self, size: ModelSize) -> Path:
        if size not in self._saved:
            self._saved[size] = save_model(size, self._folder / f"model-{len(self._saved)}")
        return self._saved[size]


def _first_or_again(
    first: dict[WorkKind, Result], kind: WorkKind, again: Callable[[Sequence[WorkKind]], dict[WorkKind, Result]]
) -> Result:
    """What was measured of a kind together with the others, or, once that is taken, what it gives alone."""
    return first.pop(kind) if kind in first else again([kind])[kind]


# ---- rows ------------------------------------------------------------------------------------------------------------


def finished_row(found: PlaceResult, load: Load, machine: Machine, *, cpu_per_byte: float) -> Row:
    """The row with its bounds, at the best that the machine showed."""
    place, kind, gbps = found.place, found.kind, found.gbps
    result = replace(found.result, bound=bound_seconds(place, kind, load, machine, gbps))
    second = bound_seconds(place, kind, load, machine, gbps, cpu_per_byte=cpu_per_byte)
    return {**make_row(place, kind, load, result, gbps=gbps, step=found.step), "cpu_bound_ms": second * 1e3}


def make_row(
    place: Place, kind: WorkKind, load: Load, result: Result, *, gbps: float | None, step: TorchStep | None = None
) -> Row:
    """The values of a row; `step` is torch's on a fast link, which says how much of its time the link took."""
    measured, bound = result.measured, result.bound or 0.0
    seconds = {name: _seconds(measured, name, kind) for name in measured.case.systems if not name.endswith(FIRST)}
    tokens = _tokens(kind, load)
    row: dict[str, object] = {
        **measured.row(),
        "kind": kind.value, "model": place.size.name, "hosts": place.hosts, "devices": place.devices,
        "share": place.share, "gbps": gbps, "tokens": tokens, "rounds": len(measured.rounds),
        "is_headline": place.is_headline,
    }  # fmt: skip
    for name, each in seconds.items():
        row |= {f"{name}_ms": each * 1e3, f"{name}_tokens_per_s": tokens / each}
    # vLLM at its best without the plugin: whatever number of ranks, compiled or not.
    engines = [name for name in seconds if name.startswith("vllm") and "plugin" not in name]
    vllm = min(engines, key=seconds.__getitem__, default=None)
    for title, peer in (("padded", PADDED.get(kind)), ("unpadded", UNPADDED.get(kind)), ("vllm", vllm)):
        taken = None if peer is None else seconds.get(peer)
        row[f"{title}_ms"] = None if taken is None else taken * 1e3
        row[f"vs_{title}"] = None if taken is None else taken / seconds[OURS]
    packed = seconds.get("torch_packed")
    return {
        **row,
        "bound_ms": bound * 1e3,
        "bound_fraction": bound / seconds[OURS],
        **beats(result.bound, seconds.values()),
        "torch_share": None if step is None or packed is None else 1 - step.seconds / packed,
        **result.facts,
    }


def _seconds(measured: Measurement, system: str, kind: WorkKind) -> float:
    """The median; of decoding, what the tokens after the first take."""
    whole = measured.median(system)
    return whole - measured.median(system + FIRST) if kind is WorkKind.DECODE else whole


def _tokens(kind: WorkKind, load: Load) -> int:
    """What tokens a second are counted by: read in training and prefill, written in decoding."""
    if kind is WorkKind.TRAIN:
        return load.train_tokens
    return sum(load.prompt_lengths) if kind is WorkKind.PREFILL else load.prompts * load.new_tokens


def figure(result: Result) -> Figure:
    """What was predicted of weft's call, above what happened; or this alone."""
    notes = ["predicted: ops by their plans, gaps as measured"] if len(result.timelines) > 1 else []
    return result.figure(result.measured.case.name, *notes)


def bound_seconds(
    place: Place, kind: WorkKind, load: Load, machine: Machine, gbps: float | None, *, cpu_per_byte: float = 0.0
) -> float:
    """The longest of: all flops at the machine's best, all bytes over a card, all weights read once a decoding step.

    Norms, the softmax, the optimiser and latency are free here, so that it is reached by nobody. With `cpu_per_byte`,
    what crosses between hosts takes its time from the cores that compute.
    """
    size, wire = place.size, 0.0 if gbps is None else 8e-9 / gbps

    def longest(flops: float, sent: float, read: float = 0.0) -> float:
        computing = with_cpu(flops / machine.flops, nbytes=sent * place.hosts, cpu_per_byte=cpu_per_byte)
        return max(computing, sent * wire, read)

    if kind is WorkKind.TRAIN:
        return longest(size.train_flops(load.train_lengths), size.train_bytes(load.train_tokens, place.hosts))
    if kind is WorkKind.PREFILL:
        sent = size.forward_bytes(sum(load.prompt_lengths), place.hosts)
        return longest(size.prefill_flops(load.prompt_lengths), sent)
    flops = size.forward_flops([1] * load.prompts, head_rows=load.prompts)
    sent = size.forward_bytes(load.prompts, place.hosts)
    return load.new_tokens * longest(flops, sent, size.decode_weight_bytes / machine.bandwidth)


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The figures of Llama at 30 %, of prefill and decoding also inside a host; of several rows the worst.

    None where nothing was measured.
    """
    train, prefill, decode = (_headlines(rows, kind) for kind in WorkKind)

    def worst(chosen: Sequence[Row], key: str) -> float | None:
        return min(column(chosen, key), default=None)

    return {
        "train_vs_torch_packed": worst(train, "vs_unpadded"),
        "train_vs_torch_padded": worst(train, "vs_padded"),
        "prefill_vs_hf_tp": worst(prefill, "vs_padded"),
        "prefill_vs_vllm": next(iter(column(prefill, "vs_vllm")), None),
        "decode_vs_hf_tp": worst(decode, "vs_padded"),
        "decode_vs_vllm": next(iter(column(decode, "vs_vllm")), None),
        "vllm_plugin_prefill": _plugin(prefill),
        "vllm_plugin_decode": _plugin(decode),
        "exposed_comm_fraction": max(column(train, "exposed"), default=None),
        **trust(rows),
        "noisy_extremes": ", ".join(row["case"] for row in (*train, *prefill, *decode) if row.get("noisy")),
    }


def _headlines(rows: Sequence[Row], kind: WorkKind) -> list[Row]:
    """What a figure is taken from; training figures are about links, and one host has none."""
    found = [row for row in rows if row["kind"] == kind.value and row["is_headline"]]
    return [row for row in found if kind is not WorkKind.TRAIN or row["hosts"] > 1]


def _plugin(rows: Sequence[Row]) -> float | None:
    """Two ranks with the plugin against two ranks without it, started alike."""
    both = ("vllm_2_ms", "vllm_2_plugin_ms")
    return next((row[both[0]] / row[both[1]] for row in rows if all(key in row for key in both)), None)


# ---- what the other two promises bring -------------------------------------------------------------------------------

# Resharding and the pipeline, each switched off in turn, in a training step of two stages. A stage is a host of two
# ranks, and what goes from stage to stage is replicated over them, as between tensor-parallel stages.
PROMISE_SYSTEMS = {
    # Each tensor once over the wire and on inside the host, transfers beside computing.
    "weft": PipelineSystem("eager-1f1b"),
    # Each rank is sent a part, and an all-gather inside the host makes it whole.
    "weft_no_reshard": PipelineSystem("eager-1f1b", "all_gather"),
    # Waits for every transfer where it is due.
    "weft_no_pipeline": PipelineSystem("1f1b", transfers=Transfers.SYNCHRONOUS),
    # Waits, and every rank is sent all: what a loop of send and recv does.
    "neither": PipelineSystem("1f1b", "send_recv", Transfers.SYNCHRONOUS),
}
PROMISE_CASE = PipelineCase("gpt", stages=2, devices=2, share=0.5, microbatches=8, emulated=True)
_PROMISE_TIMEOUT = 900.0


def promise_row(rounds: int, case: PipelineCase = PROMISE_CASE, *, cards: str = "tcp") -> Row:
    """The row of these systems, measured in a lab of its own."""
    gbps = emulated_sizes(case).gbps(case.share)
    with Cluster(case.stages, case.devices, gbps, cards=cards) as lab:
        job = (_measure_promises, case, gbps, rounds)
        result = settle(lambda: Result(lab.run(*job, timeout=_PROMISE_TIMEOUT)[0]))
    measured = result.measured
    return {
        **measured.row(), **result.facts, "kind": "promises", "hosts": case.stages, "devices": case.devices,
        "gbps": gbps, "is_headline": False, "padded_ms": measured.median("neither") * 1e3,
        "vs_padded": measured.ratio("neither", "weft"),
        "without_reshard": measured.ratio("weft_no_reshard", "weft"),
        "without_pipeline": measured.ratio("weft_no_pipeline", "weft"),
    }  # fmt: skip


def _measure_promises(rank: Rank, case: PipelineCase, gbps: float, rounds: int) -> Measurement:
    model = build(case)
    with ExitStack() as stack:
        pipes = open_pipelines(stack, case, model, PROMISE_SYSTEMS, rank, gbps)
        steps = {name: pipeline_step(pipe, model, rank) for name, pipe in pipes.items()}
        check_losses(steps, like="neither")
        what = f"pipeline of {case.stages} stages x {case.devices}, emulated, transfers {case.share:g} of a forward"
        return measure_ranks(Case(what, steps), rank, rounds, warmup=0)
