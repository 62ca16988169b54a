"""Resharding in a lab of 1 Gbit/s cards: every strategy, against the bound of the busiest card.

The cases are those of the paper's artefact; the systems are the strategies of the same executor. Then a state
dict by one plan, against what a torch user writes today. Bytes are verified after every run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from weft.bench.harness import Options, track
from weft.bench.reshard_cases import CASES, QUICK_CASES, REPLICATE, ReshardCase, llama_state
from weft.bench.reshard_lab import Outcome, StateOutcome, measure_case, measure_state
from weft.lab import Cluster
from weft.layout import Layout, Mesh
from weft.report import Column, Figure, Headline, Report
from weft.reshard import STRATEGIES, plan_reshard

NAME = "reshard"
HELP = "tensors and a state dict between meshes, in a lab of 1 Gbit/s cards: each strategy against the bound"

GBPS = 1.0
STAGING_LIMIT = 64 << 20
_RUN_TIMEOUT = 600.0

COLUMNS = [
    Column("case", "case"),
    *(Column(f"{name}_s", f"{name}, s", form=".3f") for name in STRATEGIES),
    Column("full_broadcast_s", "full tensors, s", form=".3f"),
    Column("dcp_files_s", "checkpoint, s", form=".3f"),
    Column("bound_s", "bound, s", form=".3f"),
    Column("fraction", "of bound", form=".3f", bar=True),
    Column("predict_error", "prediction off", form=".1%"),
    Column("disturbed", "disturbed", form="d"),
]


def run(options: Options) -> Report:
    """All cases, one lab each; then the state dict; then the planner alone."""
    cases = QUICK_CASES if options.quick else CASES
    outcomes = [_case(case, rounds=3 if options.quick else 7) for case in track(cases, title="reshard")]
    state = _state(scale=2 if options.quick else 1, rounds=3 if options.quick else 7)
    rows = [_row(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)]
    return Report(
        NAME,
        rows=[*rows, _state_row(state)],
        summary=_summary(outcomes, state),
        columns=COLUMNS,
        title=f"resharding, cards of {GBPS:g} Gbit/s: each strategy, and how close `optimal` is to the bound",
        notes=[
            "bound: the busiest network card, in or out, under the best choice of senders",
            "prediction off: the largest of the strategies' |predicted / measured - 1|",
            "checkpoint: its files stay in this machine's memory and cross no card",
        ],
        figures=[_figure(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)],
    )


def demo() -> list[Headline]:
    """The line of `weft demo`: one tensor to every device of another mesh."""
    case = REPLICATE[-3]
    outcome = _case(case, rounds=3, strategies=("send_recv", "optimal"))
    today, ours = outcome.measured.median("send_recv"), outcome.measured.median("optimal")
    what = f"reshard {case.name}, against send/recv"
    figure = _figure(case, outcome)
    return [Headline(what, today, ours, outcome.bound, "s", today / ours, outcome.measured.disturbed, [figure])]


def _figure(case: ReshardCase, outcome: Outcome) -> Figure:
    predicted, happened = outcome.timelines
    note = f"{predicted.seconds:.3f} s predicted, {happened.seconds:.3f} s measured"
    return Figure(f"optimal: {case.name}", (predicted, happened), [note])


def _case(case: ReshardCase, *, rounds: int, strategies: Iterable[str] = STRATEGIES) -> Outcome:
    with Cluster(case.hosts, case.devices, GBPS) as lab:
        results = lab.run(measure_case, [case.spec()], list(strategies), GBPS, rounds, timeout=_RUN_TIMEOUT)
    assert results[0] is not None
    return results[0]


def _state(*, scale: int, rounds: int) -> StateOutcome:
    with tempfile.TemporaryDirectory() as folder, Cluster(3, 2, GBPS) as lab:
        job = (llama_state(scale=scale), GBPS, rounds, STAGING_LIMIT, f"{folder}/checkpoint")
        results = lab.run(measure_state, *job, timeout=_RUN_TIMEOUT)
    assert results[0] is not None
    return results[0]


def _errors(outcome: Outcome) -> list[float]:
    return [abs(s / outcome.measured.median(name) - 1) for name, s in outcome.predicted.items()]


def _fraction(outcome: Outcome) -> float:
    return outcome.bound / outcome.measured.median("optimal")


def _row(case: ReshardCase, outcome: Outcome) -> dict[str, object]:
    measured = outcome.measured
    row: dict[str, object] = {"case": case.name, "bound_s": outcome.bound, "fraction": _fraction(outcome)}
    for name in STRATEGIES:
        row |= {f"{name}_s": measured.median(name), f"{name}_spread": measured.spread(name)}
        row[f"{name}_predicted_s"] = outcome.predicted[name]
    return {**row, "predict_error": max(_errors(outcome)), "disturbed": measured.disturbed}


def _state_row(state: StateOutcome) -> dict[str, object]:
    measured = state.measured
    return {
        "case": "state dict of 150 tensors, (2,2) FSDP to (1,2) TP",
        "optimal_s": measured.median("weft"),
        "optimal_spread": measured.spread("weft"),
        "full_broadcast_s": measured.median("full_broadcast"),
        "dcp_files_s": measured.median("dcp_files"),
        "bound_s": state.bound,
        "fraction": state.bound / measured.median("weft"),
        "predict_error": abs(state.predicted / measured.median("weft") - 1),
        "staging_peak_mb": state.staging / 1e6,
        "staging_limit_mb": state.staging_limit / 1e6,
        "disturbed": measured.disturbed,
    }


def _summary(outcomes: Sequence[Outcome], state: StateOutcome) -> dict[str, object]:
    fractions = [_fraction(outcome) for outcome in outcomes]
    others = [name for name in STRATEGIES if name != "optimal"]
    return {
        "bound_fraction_min": min(fractions),
        "bound_fraction_median": statistics.median(fractions),
        "vs_send_recv_best": max(outcome.measured.ratio("send_recv", "optimal") for outcome in outcomes),
        "vs_best_other_worst": min(min(o.measured.ratio(n, "optimal") for n in others) for o in outcomes),
        "predict_error_median": statistics.median(e for outcome in outcomes for e in _errors(outcome)),
        "state_dict_bound_fraction": state.bound / state.measured.median("weft"),
        "state_dict_vs_full_broadcast": state.measured.ratio("full_broadcast", "weft"),
        "state_dict_vs_dcp_files": state.measured.ratio("dcp_files", "weft"),
        "staging_peak_fraction": state.staging / state.staging_limit,
        "plan_seconds_1024": _plan_seconds(),
    }


def _plan_seconds() -> float:
    """Planning between two meshes of 1,024 devices, 2-D layouts: every source rank meets every destination rank."""
    array = np.arange(1024).reshape(32, 32)
    src, dst = (Mesh.of(array + 1024 * i, hosts=array // 8 + 128 * i) for i in (0, 1))
    start = time.perf_counter()
    plan_reshard((8192, 8192), torch.bfloat16, src=Layout.parse(src, "S01R"), dst=Layout.parse(dst, "RS01"))
    return time.perf_counter() - start
