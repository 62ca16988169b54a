"""Rows and summaries of the benchmarks, from times that are made up: a summary needs nothing but stored rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from weft.bench import bounds, gemm, overlap, packed, pipeline, reshard
from weft.bench.harness import Case, Measurement, Result, Round, column
from weft.bench.systems.overlap import quick_cases
from weft.report import Row
from weft.reshard import STRATEGIES
from weft.timeline import Event, Timeline


def measured(seconds: dict[str, float], name: str = "row", **labels: object) -> Measurement:
    return Measurement(Case(name, dict.fromkeys(seconds, int), labels), (Round(seconds, 0.0),), 0)


def stored(rows: Sequence[Row]) -> list[Row]:
    """As they come back from a file."""
    found: list[Row] = json.loads(json.dumps(list(rows), allow_nan=False))
    return found


def overlap_rows() -> list[Row]:
    times = {"matmul": 1.0, "wire": 1.0, "torch": 3.0, "decomposed 2": 2.5, "decomposed 4": 2.0, "sequential": 2.0}
    times |= {"weft": 1.25, "plan 0": 1.0}
    facts = {"plan": "a plan", "cpu_bound_fraction": 0.9}
    result = Result(measured(times, m=2048), bound=0.9, predicted={"weft": 1.0}, facts=facts)
    few = {"matmul": 0.1, "wire": 1.0, "torch": 1.5, "sequential": 1.3, "weft": 1.25}
    short = Result(measured(few, m=16), bound=1.1, predicted={"weft": 1.0}, facts={**facts, "plan": "another"})
    small = next(case for case in quick_cases() if case.small)
    return [overlap._row(quick_cases()[0], result, 1.0), overlap._row(small, short, 1.0)]


def pipeline_rows() -> list[Row]:
    names = ("synchronous", "alpa", "1f1b", "eager", "eager_delay", "signal", "signal_delay")
    rows = []
    for model, emulated in (("gpt", True), ("u-transformer", True), ("gpt", False)):
        times = dict(zip(names, (4.0, 3.0, 2.5, 2.0, 2.2, 1.5, 1.6), strict=True)) | (
            {} if emulated else {"torch": 5.0}
        )
        result = measured(times, model=model, share=0.5, emulated=emulated)
        rows.append(pipeline._row(Result(result, bound=1.5, predicted={"alpa": 3.0, "eager": 1.0})))
    return rows


def reshard_rows() -> list[Row]:
    times = dict.fromkeys(STRATEGIES, 2.0) | {"send_recv": 8.0, "optimal": 1.0}
    return [reshard._row(Result(measured(times), bound=0.5, predicted=dict.fromkeys(STRATEGIES, 1.0)))]


def reshard_state() -> Row:
    facts = {"staging_peak_mb": 10.0, "staging_limit_mb": 40.0, "wire_bytes": 10**9}
    times = {"weft": 1.0, "full_broadcast": 3.0, "dcp_files": 4.0}
    return reshard._state_row(Result(measured(times), bound=0.5, predicted={"weft": 1.5}, facts=facts))


def gemm_rows() -> list[Row]:
    plain = [{"dtype": d, "m": m, "ratio": 1.5, "peak_fraction": 0.8} for d in gemm.DTYPES for m in (1, 2048)]
    return [*plain, {"dtype": "fp32", "m": 2048, "signal_cost": 0.01, "signal_cost_with_waiter": 0.02}]


SUMMARIES: dict[str, tuple[Callable[[], list[Row]], Callable[[Sequence[Row]], dict[str, object]], dict[str, float]]] = {
    "gemm": (gemm_rows, gemm.summary, {"peak_fraction": 0.8, "signal_cost": 0.01}),
    "overlap": (
        overlap_rows,
        overlap.summary,
        {
            "vs_torch_best": 2.4,
            "vs_torch_min": 2.4,
            "vs_decomposed_geomean": 1.6,
            "predict_error_median": 0.2,
            "plan_regret_measured": 0.25,
            "small_vs_torch_min": 1.2,
            "bounds_beaten": 0,
            "noisy_rows": 0,
            "rows": 1,
        },
    ),
    "pipeline": (
        pipeline_rows,
        pipeline.summary,
        {
            "gpt_vs_alpa": 1.5,
            "signal_fraction_min": 0.75,
            "vs_torch_1f1b": 2.5,
            "predict_error_median": 0.25,
            "bounds_beaten": 0,
            "rows": 3,
        },
    ),
    "reshard": (
        reshard_rows,
        lambda rows: reshard.summary(rows, *stored([reshard_state()]), plan_seconds=0.1),
        {
            "vs_send_recv_best": 8.0,
            "vs_best_other_worst": 2.0,
            "bound_fraction_min": 0.5,
            "staging_peak_fraction": 0.25,
            "bounds_beaten": 0,
            "rows": 2,
        },
    ),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_made_of_stored_rows(name: str) -> None:
    make, summary, expected = SUMMARIES[name]
    rows = make()
    found = summary(stored(rows))
    assert found == summary(rows)
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_a_peer_that_could_not_run_says_why_in_the_row_and_in_the_summary() -> None:
    result = Result(measured({"weft": 1.0, "hf sdpa": 2.0, "peak": 0.1}), bound=0.5)
    facts = {"vs_onnxruntime": "not installed", "absent": "onnxruntime: not installed"}
    row = packed._row(Result(result.measured, result.bound, facts=facts))
    assert (row["best_peer"], row["vs_best_peer"], row["peak_fraction"]) == ("hf sdpa", 2.0, 0.5)
    assert "peak_ms" not in row
    rows = dict.fromkeys(("head", "same", "attention", "train", "embed", "rerank"), row)
    trainer = {"vs_hf_sdpa": 3.0, "registry_vs_hf_sdpa": 1.5}
    arrivals = {"vs_best_peer": 1.25}
    found = packed.summary(**rows, decoder=row, trainer=trainer, arrivals=arrivals, memory={"ratio": 0.1})
    assert (found["trainer_vs_sdpa"], found["trainer_registry_vs_sdpa"], found["qwen3_vs_sdpa"]) == (3.0, 1.5, 2.0)
    assert found["continuous_vs_closed"] == 1.25
    assert found["crossencoder_vs_st"] == 2.0
    assert (found["vs_hf_sdpa"], found["vs_onnxruntime"], found["vs_compile"]) == (2.0, "not installed", "not measured")


def test_a_column_leaves_out_what_is_no_number() -> None:
    assert column([{"x": 1}, {"x": None}, {"x": "not installed"}, {}], "x") == [1.0]


def test_a_result_draws_its_timelines_and_gives_its_headline() -> None:
    predicted, happened = (Timeline([Event("cpu", "compute", "y", 0.0, s)], name="") for s in (0.5, 1.0))
    result = Result(measured({"torch": 3.0, "weft": 2.0}), bound=1.0, timelines=(predicted, happened))
    figure = result.figure("a step", "a note")
    assert list(figure.notes) == ["500 ms predicted, 1.00 s measured", "a note"]
    assert list(Result(result.measured, timelines=(happened,)).figure("a step").notes) == ["1.00 s measured"]
    line = result.headline("a step", today="torch", figures=[figure])
    assert (line.today, line.weft, line.bound, line.ratio) == (3000.0, 2000.0, 1000.0, 1.5)


# ---- bounds and noise ------------------------------------------------------------------------------------------------


def taken(*seconds: float, bound: float | None = None, peers: float = 9.0) -> Result:
    case = Case("row", {"weft": int, "torch": int, "nothing": int})
    rounds = tuple(Round({"weft": s, "torch": peers, "nothing": 1e-7 * s}, 0.0) for s in seconds)
    return Result(Measurement(case, rounds, 0), bound=bound, facts={"plan": "a plan"})


CALM, WILD, WILDER = (1.0, 1.0, 1.0, 1.1, 1.0), (1.0, 1.5, 1.0, 1.4, 1.2), (1.0, 3.0, 1.0, 2.5, 1.2)


def settled(*takes: Result) -> tuple[Result, int]:
    left = list(takes)
    return bounds.settle(lambda: left.pop(0)), len(takes) - len(left)


def test_a_calm_row_is_measured_once() -> None:
    result, takes = settled(taken(*CALM, bound=0.9), taken(*CALM))
    assert (takes, result.facts) == (1, {"plan": "a plan", "takes": 1, "noisy": ""})


def test_a_noisy_row_is_measured_again_until_it_is_calm_and_keeps_the_lowest_bound() -> None:
    result, takes = settled(taken(*WILD, bound=0.8), taken(*CALM, bound=0.9), taken(*CALM))
    assert (takes, result.facts["noisy"], result.bound) == (2, "", 0.8)
    assert result.measured.median("weft") == 1.0


def test_what_stays_noisy_is_marked_and_the_calmest_of_four_counts() -> None:
    result, takes = settled(taken(*WILDER), taken(*WILD), *[taken(*WILDER)] * 3)
    assert (takes, result.facts["takes"], result.facts["noisy"], result.bound) == (4, 4, "~", None)
    assert result.measured.seconds("weft") == WILD


def test_the_spread_of_a_call_that_does_nothing_does_not_count() -> None:
    case = Case("row", {"weft": int, "nothing": int})
    rounds = tuple(Round({"weft": 1.0, "nothing": n * 1e-7}, 0.0) for n in (1, 5, 9, 20))
    assert bounds.row_spread(Measurement(case, rounds, 0)) == 0.0


def test_any_system_that_beats_the_bound_shows_that_it_is_wrong() -> None:
    times = {
        "matmul": 1.0,
        "wire": 0.1,
        "beside": 1.0,
        "torch": 0.8,
        "decomposed 2": 2.0,
        "sequential": 2.0,
        "weft": 1.25,
    }
    facts = {"plan": "a plan", "cpu_bound_fraction": 0.9}
    beaten = Result(measured(times, m=512), bound=0.9, predicted={"weft": 1.0}, facts=facts)
    row = overlap._row(quick_cases()[0], beaten, 1.0)
    assert row["beats_bound"] is True
    fine = overlap._row(quick_cases()[0], Result(beaten.measured, 0.7, beaten.predicted, facts=facts), 1.0)
    assert fine["beats_bound"] is False  # the wire alone is no system
    assert bounds.trust([row, fine, {"noisy": "~"}]) == {"bounds_beaten": 1, "noisy_rows": 1, "rows": 3}


def test_medians_leave_noisy_rows_out_and_minima_name_them() -> None:
    rows = overlap_rows()[:1] * 3
    rows[0] = {**rows[0], "bound_fraction": 0.1, "vs_torch": 9.0, "noisy": "~"}
    found = overlap.summary(rows)
    assert found["bound_fraction_median"] == pytest.approx(rows[1]["bound_fraction"])
    assert (found["bound_fraction_min"], found["vs_torch_best"], found["noisy_rows"]) == (0.1, 9.0, 1)
    assert found["noisy_extremes"] == "vs_torch_best, bound_fraction_min"
    everything = [{**row, "noisy": "~"} for row in rows]
    assert overlap.summary(everything)["bound_fraction_median"] == rows[1]["bound_fraction"]


def test_a_cpu_bound_counts_what_messages_take_of_the_cores() -> None:
    row = {"bound_s": 1.0, "wire_bytes": 10**9}
    busy = reshard._with_cpu_bound(row, 1e-6)["cpu_bound_s"]
    assert busy == bounds.with_cpu(0.0, nbytes=1e9, cpu_per_byte=1e-6) > 1.0
    assert reshard._with_cpu_bound(row, 1e-15)["cpu_bound_s"] == 1.0
