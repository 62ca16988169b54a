"""Overlapped matmuls against matmul-then-collective, on a lab whose links take a chosen share of the matmul's time.

Every rank has one thread. Times are those of the slowest rank. The bound of a row is the longer of its matmul and its
wire, each measured alone, plus the part of the shorter one that no plan can hide: one unit of it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from weft.bench import noise
from weft.bench.harness import Case, Measurement, Options, measure, track
from weft.bench.overlap_cases import OverlapCase, cases, quick_cases
from weft.bench.overlap_systems import Systems
from weft.comm import Group
from weft.kernels import linear
from weft.lab import Cluster, Rank
from weft.overlap.choose import predict_plan
from weft.overlap.context import context_of
from weft.overlap.plan import OverlapPlan
from weft.overlap.predict import Work
from weft.overlap.weights import pack
from weft.overlap.work import work_of
from weft.report import Column, Headline, Report
from weft.timeline import overlap_efficiency

NAME = "overlap"
HELP = "matmuls that communicate while they compute, against torch, on links of chosen speed"
LARGE_M = 512  # from here on a plan should reach the bound
_TIMEOUT = 300.0
_PROBE = (256, 1024, 1024)

COLUMNS = [
    Column("case", "op, MxKxN, hosts x devices, share"),
    Column("matmul_ms", "matmul", form=".2f"),
    Column("wire_ms", "wire", form=".2f"),
    Column("torch_ms", "torch", form=".2f"),
    Column("decomposed_ms", "decomposed", form=".2f"),
    Column("sequential_ms", "sequential", form=".2f"),
    Column("weft_ms", "weft", form=".2f"),
    Column("weft_spread", "spread", form=".0%"),
    Column("bound_ms", "bound", form=".2f"),
    Column("vs_torch", "vs torch", form=".2f", bar=True),
    Column("vs_sequential", "vs seq.", form=".2f"),
    Column("e_overlap", "E_overlap", form=".2f"),
    Column("predict_error", "pred. err.", form=".0%"),
]


@dataclass(frozen=True)
class Result:
    """One row, measured: seconds of each system, the plan that weft followed, and what was predicted."""

    case: OverlapCase
    measured: Measurement
    plan: OverlapPlan
    predicted: float
    bound: float
    gbps: float

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

    def row(self) -> dict[str, object]:
        weft = self.measured.median("weft")
        return {
            **self.measured.row(),
            "decomposed_ms": self.decomposed * 1e3,
            "bound_ms": self.bound * 1e3,
            "gbps": self.gbps,
            "vs_torch": self.ratio(self.measured.median("torch")),
            "vs_decomposed": self.ratio(self.decomposed),
            "vs_sequential": self.ratio(self.measured.median("sequential")),
            "bound_fraction": self.bound / weft,
            "e_overlap": self.e_overlap,
            "predicted_ms": self.predicted * 1e3,
            "predict_error": abs(self.predicted - weft) / weft,
            "plan": str(self.plan),
        }


def run(options: Options) -> Report:
    """A lab for each row, because each row has its own links."""
    chosen = quick_cases() if options.quick else list(cases())
    flops = _flops()
    rounds = 7 if options.quick else 9
    results = [_result(case, flops, rounds) for case in track(chosen, title=NAME)]
    return Report(
        NAME,
        rows=[result.row() for result in results],
        summary=summary(results),
        columns=COLUMNS,
        title="overlap: ms of the slowest rank, one thread a rank",
        notes=[
            "share: the wire's time over the matmul's; the link is as slow as that takes",
            "decomposed: torch matmul in P or 2P chunks with async collectives, whichever is faster",
        ],
    )


def demo() -> list[Headline]:
    """The lines of `weft demo`: a product that travels, and an input that does, as long as it is computed."""
    flops = _flops()
    return [_headline(_result(case, flops, 7)) for case in quick_cases()[:2]]


def _headline(result: Result) -> Headline:
    today, weft = result.measured.median("torch"), result.measured.median("weft")
    seconds = (today * 1e3, weft * 1e3, result.bound * 1e3)
    return Headline(result.case.name, *seconds, "ms", today / weft, result.measured.disturbed)


def _flops() -> float:
    """Of one core, when all cores compute: what the speed of the links is chosen by."""
    with Cluster(hosts=1, devices=min(2, os.cpu_count() or 1), gbps=None) as cluster:
        return min(cluster.run(_rank_flops))


def _rank_flops(rank: Rank) -> float:
    m, k, n = _PROBE
    x, w = torch.randn(m, k), pack(torch.randn(n, k))
    case = Case("flops", {"matmul": lambda: linear(x, w)})
    seconds = measure(case, meter=noise.Meter(root=os.getppid()), agree=_agree).median("matmul")
    return 2.0 * m * k * n / seconds


def _agree(value: float) -> float:
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def _result(case: OverlapCase, flops: float, rounds: int) -> Result:
    gbps = case.gbps(flops, os.cpu_count() or 1)
    with Cluster(hosts=case.hosts, devices=case.devices, gbps=gbps) as cluster:
        measured, plan, predicted, bound = cluster.run(measure_case, case, rounds, timeout=_TIMEOUT)[0]
    return Result(case, measured, plan, predicted, bound, gbps)


def measure_case(rank: Rank, case: OverlapCase, rounds: int) -> tuple[Measurement, OverlapPlan, float, float]:
    """One row on one rank of its lab; the measurement that comes back has names, not functions."""
    systems = Systems(case, rank.group)
    context = context_of(rank.group)
    systems.weft(None)
    plan = context.planner.known(case.op, case.m, case.n, case.k, "float32")
    assert plan is not None
    sequential = replace(plan, groups=())
    calls = {
        "matmul": systems.matmul,
        "wire": systems.wire(Group(rank.group, timeout=_TIMEOUT)),
        "torch": systems.torch,
        f"decomposed {rank.world}": lambda: systems.decomposed(rank.world),
        f"decomposed {2 * rank.world}": lambda: systems.decomposed(2 * rank.world),
        "sequential": lambda: systems.weft(sequential),
        "weft": lambda: systems.weft(None),
    }
    labels = {
        "op": case.op.value, "hosts": case.hosts, "devices": case.devices, "share": case.share,
        "m": case.m, "k": case.k, "n": case.n,
    }  # fmt: skip
    meter = noise.Meter(root=os.getppid())
    with torch.no_grad():
        measured = measure(Case(case.name, calls, labels), rounds=rounds, meter=meter, agree=_agree)
    curves = context.planner.curves()
    bound = _bound(measured.median("matmul"), measured.median("wire"), work_of(plan, curves))
    named = replace(measured, case=Case(case.name, dict.fromkeys(calls, _nothing), labels))
    return named, plan, predict_plan(plan, curves).overlapped, bound


def _nothing() -> None:
    """Stands for a system whose function has stayed on its rank."""


def _bound(matmul: float, wire: float, work: Work) -> float:
    """max(matmul, wire), plus the first or last unit of computing or of sending, whichever is cheaper to show."""
    sending = [nbytes for nbytes in work.nbytes if nbytes]
    if not sending or work.compute == 0:
        return max(matmul, wire)
    first_tile = matmul * min(work.seconds) / work.compute
    last_message = wire * min(sending) / sum(sending)
    hidden_by_own_rows = work.backwards or len(sending) < work.units
    return max(matmul, wire) + (0.0 if hidden_by_own_rows and matmul > wire else min(first_tile, last_message))


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
    }
