"""A tensor-parallel transformer trained, prefilled and decoded by weft, against torch, Hugging Face and vLLM.

Every rank has one thread. Times are those of the slowest rank. All systems of a row start from the same weights and are
given the same texts; a row whose losses or tokens differ fails. docs/end_to_end.md says how each peer is run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from weft.bench.end_to_end_calibrate import RUN_TIMEOUT, Machine, TorchStep, measure_machine, torch_step
from weft.bench.end_to_end_cases import Kind, Load, Place, Scale, full, quick
from weft.bench.end_to_end_infer import Engines
from weft.bench.end_to_end_lab import Outcome, measure_generate, measure_train
from weft.bench.end_to_end_models import save_model
from weft.bench.end_to_end_promises import promise_row
from weft.bench.end_to_end_rows import COLUMNS, Result, summary
from weft.bench.end_to_end_sizes import DEMO_LLAMA, ModelSize
from weft.bench.end_to_end_train import CORE, SYSTEMS
from weft.bench.end_to_end_vllm import PYTHON
from weft.bench.harness import Options, track
from weft.lab import Cluster
from weft.report import Headline, Report

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


def run(options: Options, *, scale: Scale | None = None) -> Report:
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
        figures=[result.figure() for result in results if result.kind is Kind.TRAIN and result.place.is_headline],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a training step of a small Llama over two hosts."""
    place, load = Place(DEMO_LLAMA, 2, 1, None), Load(train_tokens=512, longest_text=256)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(load, Path(folder), None)
        # No time to see what torch needs: the wire takes half as long as all matmuls at this machine's peak.
        seconds = place.size.train_flops(load.train_lengths) / bench.machine(decoding=False).flops
        gbps = 8e-9 * place.size.train_bytes(load.train_tokens, place.hosts) / (0.5 * seconds)
        (result,) = bench.results(place, (Kind.TRAIN,), 3, trained_by=("torch_packed", "weft"), gbps=gbps)
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
        kinds: Sequence[Kind],
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
        machine = self.machine(decoding=Kind.DECODE in kinds)
        found: list[tuple[Kind, Outcome]] = []
        with Cluster(place.hosts, place.devices, gbps) as lab:
            if Kind.TRAIN in kinds:
                arguments = (place, self._load, rounds, tuple(SYSTEMS) if promises else trained_by)
                found.append((Kind.TRAIN, lab.run(measure_train, *arguments, timeout=RUN_TIMEOUT)[0]))
            if rest := [kind for kind in kinds if kind is not Kind.TRAIN]:
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
