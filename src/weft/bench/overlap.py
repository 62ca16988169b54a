"""Overlapped matmuls against matmul-then-collective, on a lab whose links take a chosen share of the matmul's time.

Every rank has one thread. Times are those of the slowest rank. The bound of a row is the longer of its matmul and its
wire, each measured alone, in turns with the row, and at its fastest, plus the part of the shorter one that no plan can
hide: one unit of it. The second bound counts the CPU that messages take: the matmul beside the wire, where neither
waits for the other.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from weft.bench.bounds import (
    NOISY_COLUMN,
    NOISY_NOTE,
    beats,
    calm,
    median_of,
    noisy_extremes,
    settle,
    trust,
)
from weft.bench.harness import (
    BenchOptions,
    Case,
    Result,
    System,
    column,
    lab_meter,
    measure,
    over_cards,
    slowest,
    track,
)
from weft.bench.systems.overlap import OverlapCase, Systems, cases, matmul_flops, quick_cases
from weft.comm import Group
from weft.lab import Cluster, Rank
from weft.overlap.executor.context import Context, context_of
from weft.overlap.plan import OverlapPlan
from weft.overlap.search import predict_plan, ranked_plans
from weft.overlap.speeds import Work, work_of
from weft.report import Column, Headline, Report, Row
from weft.timeline import Timeline, overlap_efficiency, record

NAME = "overlap"
HELP = "matmuls that communicate while they compute, against torch, on links of chosen speed"
LARGE_M = 512  # from here on a plan should reach the bound
TIMEOUT = 300.0
_TRACED_CALLS = 5
_ALTERNATIVES = 3  # plans that are measured beside the chosen one
_PARTS = ("matmul", "wire", "beside")  # what bounds are made of

COLUMNS = [
    NOISY_COLUMN,
    Column("row", "ms"),
    Column("matmul_ms", "matmul", form=".1f"),
    Column("wire_ms", "wire", form=".1f"),
    Column("torch_ms", "torch", form=".1f"),
    Column("decomposed_ms", "decomp.", form=".1f"),
    Column("sequential_ms", "sequ.", form=".1f"),
    Column("weft_ms", "weft", form=".1f"),
    Column("bound_ms", "bound", form=".1f"),
    Column("cpu_bound_ms", "+cpu", form=".1f"),
    Column("vs_torch", "/torch", form=".2f", bar=True),
    Column("vs_sequential", "/sequ.", form=".2f"),
    Column("e_overlap", "E_ov.", form=".2f"),
    Column("predict_error", "err.", form=".0%"),
]


def run(options: BenchOptions) -> Report:
    """A lab for each row, because each row has its own links."""
    return over_cards(options, partial(_run, options))


def _run(options: BenchOptions, cards: str) -> Report:
    chosen = quick_cases() if options.quick else list(cases())
    flops = flops_of_a_core()
    rows, figures = [], []
    for case in track(chosen, title=NAME):
        gbps = case.gbps(flops, os.cpu_count() or 1)
        result = settle(partial(_result, case, gbps, cards, rounds=7 if options.quick else 9))
        rows.append(_row(case, result, gbps))
        if case.compares_plans:
            figures.append(result.figure(case.name, str(result.facts["plan"])))
    return Report(
        NAME,
        rows=rows,
        summary=summary(rows),
        columns=COLUMNS,
        title="overlap: MxKxN, hosts x devices, share; ms of the slowest rank, one thread a rank",
        notes=[
            "share: the wire's time over the matmul's; the link is as slow as that takes",
            "decomposed: torch matmul in P or 2P chunks with async collectives, whichever is faster",
            "sequ.: weft's matmul, then its communication; err.: of the prediction; plans and spreads are in the JSON",
            "bound: the matmul or the wire alone, at its fastest; +cpu: both at once, and neither waits for the other",
            NOISY_NOTE,
        ],
        figures=figures,
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: a product that travels for as long as it is computed."""
    case = quick_cases()[0]
    result = _result(case, case.gbps(flops_of_a_core(), os.cpu_count() or 1), "tcp", rounds=5)
    figures = [result.figure(case.name, str(result.facts["plan"]))]
    return [result.headline(case.name, today="torch", figures=figures)]


def flops_of_a_core() -> float:
    """Flops a second of one core when all cores compute: what the speed of the links is chosen by."""
    with Cluster(hosts=1, devices=min(2, os.cpu_count() or 1), gbps=None) as cluster:
        return min(cluster.run(_rank_flops))


def _rank_flops(rank: Rank) -> float:
    return matmul_flops()


def _result(case: OverlapCase, gbps: float, cards: str, *, rounds: int) -> Result:
    with Cluster(hosts=case.hosts, devices=case.devices, gbps=gbps, cards=cards) as cluster:
        return cluster.run(measure_case, case, rounds, timeout=TIMEOUT)[0]


def _row(case: OverlapCase, result: Result, gbps: float) -> Row:
    measured, bound = result.measured, result.bound or 0.0
    weft, matmul, sequential = (measured.median(system) for system in ("weft", "matmul", "sequential"))
    cut = [measured.median(s) for s in measured.case.systems if s.startswith("decomposed")]
    decomposed = min(cut) if cut else None
    others = [measured.median(s) for s in measured.case.systems if s.startswith("plan ")]
    whole = [measured.median(s) for s in measured.case.systems if s not in _PARTS]
    return {
        **measured.row(),
        "row": case.short_name,
        "decomposed_ms": None if decomposed is None else decomposed * 1e3,
        "bound_ms": bound * 1e3,
        "gbps": gbps,
        "small": case.small,
        "vs_torch": measured.median("torch") / weft,
        "vs_decomposed": None if decomposed is None else decomposed / weft,
        "vs_sequential": sequential / weft,
        "bound_fraction": bound / weft,
        **beats(result.bound, whole),
        "e_overlap": overlap_efficiency(weft, matmul_seconds=matmul, sequential_seconds=sequential),
        "predicted_ms": result.predicted["weft"] * 1e3,
        "predict_error": result.prediction_errors[0],
        # How much slower the chosen plan is than the best that was measured; None where no other was.
        "plan_regret": weft / min(weft, sequential, *others) - 1 if others else None,
        **result.facts,
    }


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The figures that the README quotes. Small rows have a figure of their own: there is nothing in them to hide."""
    small, rows = [row for row in rows if row.get("small")], [row for row in rows if not row.get("small")]
    large = [row for row in rows if row["m"] >= LARGE_M] or rows
    extremes = {
        "vs_torch_best": (max, "vs_torch"), "vs_torch_min": (min, "vs_torch"),
        "vs_sequential_best": (max, "vs_sequential"), "vs_sequential_min": (min, "vs_sequential"),
        "e_overlap_best": (max, "e_overlap"), "predict_error_worst": (max, "predict_error"),
    }  # fmt: skip
    in_large = {"bound_fraction_min": (min, "bound_fraction")}
    noisy = [text for text in (noisy_extremes(rows, extremes), noisy_extremes(large, in_large)) if text]
    return {
        "vs_torch_best": max(column(rows, "vs_torch")),
        "vs_torch_min": min(column(rows, "vs_torch")),
        "vs_sequential_best": max(column(rows, "vs_sequential")),
        "vs_sequential_min": min(column(rows, "vs_sequential")),
        "vs_decomposed_geomean": statistics.geometric_mean(column(calm(rows), "vs_decomposed")),
        "bound_fraction_median": median_of(large, "bound_fraction"),
        "bound_fraction_min": min(column(large, "bound_fraction")),
        "cpu_bound_fraction_median": median_of(large, "cpu_bound_fraction"),
        "e_overlap_best": max(column(rows, "e_overlap")),
        "predict_error_median": median_of(rows, "predict_error"),
        "predict_error_worst": max(column(rows, "predict_error")),
        "plan_regret_median": median_of(rows, "plan_regret"),
        "plan_regret_measured": max(column(rows, "plan_regret")),
        **trust(rows),
        "noisy_extremes": ", ".join(noisy),
        **({"small_vs_torch_min": min(column(small, "vs_torch"))} if small else {}),
    }


# ---- on the ranks of a row's lab -------------------------------------------------------------------------------------


def measure_case(rank: Rank, case: OverlapCase, rounds: int) -> Result:
    """Every system in turns, other plans where the case compares them, and one traced call."""
    systems = Systems(case, rank.group)
    context = context_of(rank.group)
    systems.weft(None)
    plan = context.planner.known(case.op, case.m, case.n, case.k, "float32")
    assert plan is not None
    sequential = replace(plan, groups=())
    group = Group(rank.group, timeout=TIMEOUT)
    calls: dict[str, System] = {
        "matmul": systems.matmul,
        "wire": systems.wire(group),
        "beside": systems.wire(group, beside=systems.matmul),
        "torch": systems.torch,
        "sequential": partial(systems.weft, sequential),
        "weft": partial(systems.weft, None),
    }
    if not case.small:
        calls |= {f"decomposed {c}": partial(systems.decomposed, c) for c in (rank.world, 2 * rank.world)}
    others = _other_plans(context, plan) if case.compares_plans else []
    calls |= {f"plan {i}": partial(systems.weft, other) for i, other in enumerate(others)}
    labels = {
        "op": case.op.value, "hosts": case.hosts, "devices": case.devices, "share": case.share,
        "m": case.m, "k": case.k, "n": case.n,
    }  # fmt: skip
    with torch.no_grad():
        measured = measure(Case(case.name, calls, labels), rounds=rounds, meter=lab_meter(), agree=slowest)
        happened = _traced(systems, rank)
    curves = context.planner.curves()
    matmul, wire, beside = (measured.best(part) for part in _PARTS)
    return Result(
        measured.without_functions(),
        bound=_bound(matmul, wire, work_of(plan, curves)),
        predicted={"weft": predict_plan(plan, curves).overlapped},
        timelines=(plan.simulate(curves), happened),
        facts={
            "plan": str(plan),
            "cpu_bound_ms": beside * 1e3,
            "cpu_bound_fraction": beside / measured.median("weft"),
        },
    )


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
