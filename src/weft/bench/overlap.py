"""Overlapped matmuls against matmul-then-collective, on a lab whose links take a chosen share of the matmul's time.

Every rank has one thread. Times are those of the slowest rank. The bound of a row is the longer of its matmul and its
wire, each measured alone, plus the part of the shorter one that no plan can hide: one unit of it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from weft.bench.harness import Measurement, Options, track
from weft.bench.overlap_cases import OverlapCase, cases, quick_cases
from weft.bench.overlap_lab import TIMEOUT, Outcome, flops_of_a_core, measure_case
from weft.lab import Cluster
from weft.report import Column, Figure, Headline, Report
from weft.timeline import overlap_efficiency

NAME = "overlap"
HELP = "matmuls that communicate while they compute, against torch, on links of chosen speed"
LARGE_M = 512  # from here on a plan should reach the bound

COLUMNS = [
    Column("row", "ms"),
    Column("matmul_ms", "matmul", form=".1f"),
    Column("wire_ms", "wire", form=".1f"),
    Column("torch_ms", "torch", form=".1f"),
    Column("decomposed_ms", "decomp.", form=".1f"),
    Column("sequential_ms", "sequ.", form=".1f"),
    Column("weft_ms", "weft", form=".1f"),
    Column("bound_ms", "bound", form=".1f"),
    Column("vs_torch", "/torch", form=".2f", bar=True),
    Column("vs_sequential", "/sequ.", form=".2f"),
    Column("e_overlap", "E_ov.", form=".2f"),
    Column("predict_error", "err.", form=".0%"),
]


@dataclass(frozen=True)
class Result:
    """One row, measured: its case, what its lab gave, and the rate of the lab's links."""

    case: OverlapCase
    outcome: Outcome
    gbps: float

    @property
    def measured(self) -> Measurement:
        return self.outcome.measured

    @property
    def decomposed(self) -> float:
        return min(self.measured.median(s) for s in self.measured.case.systems if s.startswith("decomposed"))

    def ratio(self, slower: float) -> float:
        return slower / self.measured.median("weft")

    @property
    def e_overlap(self) -> float | None:
        return overlap_efficiency(
            self.measured.median("weft"),
            matmul_seconds=self.measured.median("matmul"),
            sequential_seconds=self.measured.median("sequential"),
        )

    @property
    def plan_regret(self) -> float | None:
        """How much slower the chosen plan is than the best that was measured; None where no other was."""
        if not self.outcome.alternatives:
            return None
        measured = [self.measured.median(s) for s in ("weft", "sequential", *self.outcome.alternatives)]
        return measured[0] / min(measured) - 1

    def figure(self) -> Figure:
        """What was predicted of a call, above what happened."""
        predicted, happened = self.outcome.timelines
        seconds = f"{predicted.seconds * 1e3:.2f} ms predicted, {happened.seconds * 1e3:.2f} ms measured"
        return Figure(self.case.name, (predicted, happened), [seconds, str(self.outcome.plan)])

    def row(self) -> dict[str, object]:
        weft, bound, predicted = self.measured.median("weft"), self.outcome.bound, self.outcome.predicted
        return {
            **self.measured.row(),
            "row": self.case.short_name,
            "decomposed_ms": self.decomposed * 1e3,
            "bound_ms": bound * 1e3,
            "gbps": self.gbps,
            "vs_torch": self.ratio(self.measured.median("torch")),
            "vs_decomposed": self.ratio(self.decomposed),
            "vs_sequential": self.ratio(self.measured.median("sequential")),
            "bound_fraction": bound / weft,
            "e_overlap": self.e_overlap,
            "predicted_ms": predicted * 1e3,
            "predict_error": abs(predicted - weft) / weft,
            "plan_regret": self.plan_regret,
            "plan": str(self.outcome.plan),
        }


def run(options: Options) -> Report:
    """A lab for each row, because each row has its own links."""
    chosen = quick_cases() if options.quick else list(cases())
    flops = flops_of_a_core()
    rounds = 7 if options.quick else 9
    results = [_result(case, flops, rounds) for case in track(chosen, title=NAME)]
    return Report(
        NAME,
        rows=[result.row() for result in results],
        summary=summary(results),
        columns=COLUMNS,
        title="overlap: MxKxN, hosts x devices, share; ms of the slowest rank, one thread a rank",
        notes=[
            "share: the wire's time over the matmul's; the link is as slow as that takes",
            "decomposed: torch matmul in P or 2P chunks with async collectives, whichever is faster",
            "sequ.: weft's matmul, then its communication; err.: of the prediction; plans and spreads are in the JSON",
        ],
        figures=[result.figure() for result in results if result.case.compares_plans],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a product that travels for as long as it is computed."""
    return [_headline(_result(quick_cases()[0], flops_of_a_core(), 5))]


def _headline(result: Result) -> Headline:
    today, weft = result.measured.median("torch"), result.measured.median("weft")
    seconds = (today * 1e3, weft * 1e3, result.outcome.bound * 1e3)
    return Headline(result.case.name, *seconds, "ms", today / weft, result.measured.disturbed, [result.figure()])


def _result(case: OverlapCase, flops: float, rounds: int) -> Result:
    gbps = case.gbps(flops, os.cpu_count() or 1)
    with Cluster(hosts=case.hosts, devices=case.devices, gbps=gbps) as cluster:
        return Result(case, cluster.run(measure_case, case, rounds, timeout=TIMEOUT)[0], gbps)


def summary(results: Sequence[Result]) -> dict[str, object]:
    """The figures that the README quotes."""
    rows = [result.row() for result in results]

    def figures(key: str, chosen: Sequence[dict[str, object]] = rows) -> list[float]:
        return [float(str(row[key])) for row in chosen if row[key] is not None]

    large = [result.row() for result in results if result.case.m >= LARGE_M] or rows
    return {
        "vs_torch_best": max(figures("vs_torch")),
        "vs_torch_min": min(figures("vs_torch")),
        "vs_sequential_best": max(figures("vs_sequential")),
        "vs_decomposed_geomean": statistics.geometric_mean(figures("vs_decomposed")),
        "bound_fraction_median": statistics.median(figures("bound_fraction", large)),
        "bound_fraction_min": min(figures("bound_fraction", large)),
        "e_overlap_best": max(figures("e_overlap")),
        "predict_error_median": statistics.median(figures("predict_error")),
        "plan_regret_measured": max(figures("plan_regret")),
    }
