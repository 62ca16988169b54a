"""One row of `weft bench overlap` on the ranks of its lab: every system in turns, other plans, and one traced call.

Overlapped matmuls against matmul-then-collective, on a lab whose links take a chosen share of the matmul's time.

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

from weft.bench import machine
from weft.bench.harness import BenchOptions, Case, Measurement, measure, slowest, track
from weft.bench.systems.overlap import Call, OverlapCase, Systems, cases, quick_cases
from weft.comm import Group
from weft.kernels import linear
from weft.lab import Cluster, Rank
from weft.overlap.executor.context import Context, context_of
from weft.overlap.executor.resources import pack
from weft.overlap.plan import OverlapPlan
from weft.overlap.search import predict_plan, ranked_plans
from weft.overlap.speeds import Work, work_of
from weft.report import Column, Figure, Headline, Report
from weft.timeline import Timeline, overlap_efficiency, record

TIMEOUT = 300.0
_PROBE = (256, 1024, 1024)
_TRACED_CALLS = 5
_ALTERNATIVES = 3


@dataclass(frozen=True)
class OverlapOutcome:
    """What one row gave: times, the plan that weft followed, what was predicted, and one call as it was and should be.

    `alternatives` names the systems that are other plans of the same call; empty where none were measured.
    """

    measured: Measurement
    plan: OverlapPlan
    predicted: float
    bound: float
    alternatives: tuple[str, ...]
    timelines: tuple[Timeline, Timeline]


def flops_of_a_core() -> float:
    """Flops a second of one core when all cores compute: what the speed of the links is chosen by."""
    with Cluster(hosts=1, devices=min(2, os.cpu_count() or 1), gbps=None) as cluster:
        return min(cluster.run(_rank_flops))


def _rank_flops(rank: Rank) -> float:
    m, k, n = _PROBE
    x, w = torch.randn(m, k), pack(torch.randn(n, k))
    case = Case("flops", {"matmul": lambda: linear(x, w)})
    seconds = measure(case, meter=machine.NoiseMeter(root=os.getppid()), agree=slowest).median("matmul")
    return 2.0 * m * k * n / seconds


def measure_case(rank: Rank, case: OverlapCase, rounds: int) -> OverlapOutcome:
    """One row on one rank; the measurement that comes back has names, not functions."""
    systems = Systems(case, rank.group)
    context = context_of(rank.group)
    systems.weft(None)
    plan = context.planner.known(case.op, case.m, case.n, case.k, "float32")
    assert plan is not None
    sequential = replace(plan, groups=())
    calls: dict[str, Call] = {
        "matmul": systems.matmul,
        "wire": systems.wire(Group(rank.group, timeout=TIMEOUT)),
        "torch": systems.torch,
        f"decomposed {rank.world}": lambda: systems.decomposed(rank.world),
        f"decomposed {2 * rank.world}": lambda: systems.decomposed(2 * rank.world),
        "sequential": lambda: systems.weft(sequential),
        "weft": lambda: systems.weft(None),
    }
    others = _other_plans(context, plan) if case.compares_plans else []
    alternatives = {f"plan {i}": _following(systems, other) for i, other in enumerate(others)}
    labels = {
        "op": case.op.value, "hosts": case.hosts, "devices": case.devices, "share": case.share,
        "m": case.m, "k": case.k, "n": case.n,
    }  # fmt: skip
    meter = machine.NoiseMeter(root=os.getppid())
    with torch.no_grad():
        whole = Case(case.name, calls | alternatives, labels)
        measured = measure(whole, rounds=rounds, meter=meter, agree=slowest)
        happened = _traced(systems, rank)
    curves = context.planner.curves()
    bound = _bound(measured.median("matmul"), measured.median("wire"), work_of(plan, curves))
    named = replace(measured, case=replace(whole, systems=dict.fromkeys(whole.systems, _nothing)))
    timelines = (plan.simulate(curves), happened)
    return OverlapOutcome(named, plan, predict_plan(plan, curves).overlapped, bound, tuple(alternatives), timelines)


def _nothing() -> None:
    """Stands for a system whose function has stayed on its rank."""


def _following(systems: Systems, plan: OverlapPlan) -> Call:
    return lambda: systems.weft(plan)


def _other_plans(context: Context, chosen: OverlapPlan) -> list[OverlapPlan]:
    """What else could have been chosen: the next best predicted plans, and an even one. The same on all ranks."""
    even = replace(chosen, groups=(1,) * 4)
    ranked = [p for p in ranked_plans(chosen, context.planner.curves()) if not p.sequential]
    return [p for p in dict.fromkeys([even, *ranked]) if p != chosen][:_ALTERNATIVES]


def _traced(systems: Systems, rank: Rank) -> Timeline:
    """All ranks in one call, on one clock: of a few calls the one that took the median time."""
    traces = []
    for _ in range(_TRACED_CALLS):
        dist.barrier()
        with record.trace() as trace:
            systems.weft(None)
        traces.append((slowest(trace.calls[0].seconds), trace))
    traces.sort(key=lambda pair: pair[0])
    gathered = traces[len(traces) // 2][1].gather(group=rank.group)
    return Timeline(gathered.events, name="measured")


def _bound(matmul: float, wire: float, work: Work) -> float:
    """max(matmul, wire), plus the first or last unit of computing or of sending, whichever is cheaper to show."""
    sending = [nbytes for nbytes in work.nbytes if nbytes]
    if not sending or work.compute == 0:
        return max(matmul, wire)
    first_tile = matmul * min(work.seconds) / work.compute
    last_message = wire * min(sending) / sum(sending)
    hidden_by_own_rows = work.backwards or len(sending) < work.units
    return max(matmul, wire) + (0.0 if hidden_by_own_rows and matmul > wire else min(first_tile, last_message))


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
    outcome: OverlapOutcome
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


def run(options: BenchOptions) -> Report:
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
