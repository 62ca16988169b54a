"""Training steps of pipelines in a lab: today's 1F1B against eager-1F1B, and against a network that costs nothing.

A host is a stage. Real rows compute; emulated ones sleep for the time of their compute beside a small real matmul,
because this many ranks do not find a core each. Tensors always travel for real, and losses are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.harness import Measurement, Options, track
from weft.bench.pipeline_cases import PipelineCase, cases, quick_cases
from weft.bench.pipeline_lab import ALL, SYSTEMS, TORCH, Outcome, Sizes, emulated_sizes, measure_case, measure_sizes
from weft.lab import Cluster
from weft.report import Column, Figure, Headline, Report

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
    outcome: Outcome

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


def run(options: Options) -> Report:
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
