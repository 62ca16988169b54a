"""The native linear against torch's, on the shapes of transformers, and what its signals cost.

torch is called as users call it, `F.linear(x, w)`; weft with a weight that was packed before, as a model does once.
Both allocate their output. The machine's peak is a loop of fused multiply-adds that takes turns with the rest, so that
a fraction of it is not spoilt by a clock that changed in between.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

import torch
from torch.nn import functional as F

from weft.bench.harness import BenchOptions, Case, Measurement, column, measure, track
from weft.comm import Counters
from weft.kernels import PackedWeight, TileSchedule, Tiling, linear
from weft.kernels.cpu import fma_loop
from weft.report import Column, Report, Row

NAME = "gemm"
HELP = "the native linear against torch.nn.functional.linear, float32 and bfloat16, 1 and 2 threads"

SHAPES = [  # (M, K, N)
    (2048, 1024, 4096), (512, 1024, 4096), (128, 1024, 4096), (64, 1024, 4096), (2328, 768, 768), (2328, 768, 3072),
    (2328, 3072, 768), (300, 384, 1536), (17, 768, 768), (1, 1024, 4096), (4096, 512, 512), (1000, 1000, 1000),
]  # fmt: skip
QUICK_SHAPES = [(2048, 1024, 4096), (2328, 768, 768), (64, 1024, 4096), (1, 1024, 4096)]
LARGE_M = 512  # from here on the matmul should run near the peak
THREADS = (1, 2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

COLUMNS = [
    Column("case", "M x K x N"),
    Column("dtype", "type"),
    Column("threads", "threads", form="d"),
    Column("torch_ms", "torch ms", form=".3f"),
    Column("weft_ms", "weft ms", form=".3f"),
    Column("weft_spread", "spread", form=".0%"),
    Column("gflops", "GFLOP/s", form=".1f"),
    Column("peak_fraction", "of peak", form=".2f"),
    Column("ratio", "torch / weft", form=".2f", bar=True),
    Column("disturbed", "disturbed", form="d"),
]


def run(options: BenchOptions) -> Report:
    """Every shape, type and number of threads; then the same matmul with and without signals."""
    shapes = QUICK_SHAPES if options.quick else SHAPES
    plan = [(shape, dtype, threads) for dtype in DTYPES for threads in THREADS for shape in shapes]
    if options.quick:  # torch's bfloat16 takes seconds for the large ones
        plan = [row for row in plan if row[1] == "fp32" or row[0][0] < LARGE_M]
    rows = [_matmul_row(*row) for row in track(plan, title="gemm")]
    rows += [_signal_row(threads, rounds=11 if options.quick else 31) for threads in THREADS]
    return Report(
        NAME,
        rows=rows,
        summary=summary(rows),
        columns=COLUMNS,
        title="linear: packed once, against torch.nn.functional.linear",
        notes=[
            "peak: independent fused multiply-adds, measured in turns with the rows",
            "last rows: the same tiles with signals (weft), without (plain), and with a thread that waits",
        ],
    )


def _matmul_row(shape: tuple[int, int, int], dtype: str, threads: int) -> Row:
    """One shape, type and number of threads."""
    m, k, n = shape
    x, w = torch.randn(m, k).to(DTYPES[dtype]), torch.randn(n, k).to(DTYPES[dtype])
    packed = PackedWeight.from_dense(w)
    loop_flops = fma_loop(threads=threads)
    case = Case(
        f"{m} x {k} x {n}",
        {
            "torch": lambda: F.linear(x, w),
            "weft": lambda: linear(x, packed, threads=threads),
            "peak": lambda: fma_loop(threads=threads),
        },
        labels={"m": m, "k": k, "n": n, "dtype": dtype, "threads": threads},
    )
    with _torch_threads(threads), torch.no_grad():
        measured = measure(case)
    flops, peak = 2 * m * k * n / measured.median("weft"), loop_flops / measured.median("peak")
    return {
        **{key: value for key, value in measured.row().items() if not key.startswith("peak_")},
        "gflops": flops / 1e9,
        "peak_gflops": peak / 1e9,
        "peak_fraction": flops / peak,
        "ratio": measured.ratio("torch", "weft"),
    }


def _signal_row(threads: int, *, rounds: int) -> Row:
    """The same tiles in the same order: without signals, with them, and with a thread that sleeps on each group."""
    m, k, n = 2048, 1024, 4096
    x, packed = torch.randn(m, k), PackedWeight.from_dense(torch.randn(n, k))
    tiling = Tiling(m, n, 96, 256)
    schedule = TileSchedule(tiling, group_of=[tile * 8 // tiling.count for tile in range(tiling.count)])
    sizes, out = schedule.group_sizes.tolist(), torch.empty(m, n)

    def signalled(done: Counters) -> None:
        linear(x, packed, out=out, schedule=schedule, done=done.tensor, threads=threads)

    def waited() -> None:
        done = Counters(schedule.groups)

        def wait() -> None:
            for group, size in enumerate(sizes):
                done.wait(group, size, timeout=60, what=f"group {group}")

        waiter = Thread(target=wait)
        waiter.start()
        signalled(done)
        waiter.join()

    case = Case(
        f"signals: {tiling.count} tiles, 8 groups",
        {
            "plain": lambda: linear(x, packed, out=out, schedule=schedule, threads=threads),
            "weft": lambda: signalled(Counters(schedule.groups)),
            "waited": waited,
        },
        labels={"m": m, "k": k, "n": n, "dtype": "fp32", "threads": threads},
    )
    measured = measure(case, rounds=rounds)
    return {
        **measured.row(),
        "signal_cost": _paired_cost(measured, "weft"),
        "signal_cost_with_waiter": _paired_cost(measured, "waited"),
    }


def _paired_cost(measured: Measurement, system: str) -> float:
    """The median over rounds of system / plain - 1: turns of one round see the same machine."""
    return statistics.median(r.seconds[system] / r.seconds["plain"] for r in measured.rounds) - 1


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """The figures that the README quotes."""
    ratios = {dtype: column([row for row in rows if row["dtype"] == dtype], "ratio") for dtype in DTYPES}
    large = [row for row in rows if row["dtype"] == "fp32" and row["m"] >= LARGE_M]
    fractions = column(large, "peak_fraction")
    return {
        "geomean_vs_torch_fp32": statistics.geometric_mean(ratios["fp32"]),
        "min_vs_torch_fp32": min(ratios["fp32"]),
        "peak_fraction": min(fractions),
        "peak_fraction_median": statistics.median(fractions),
        "geomean_vs_torch_bf16": statistics.geometric_mean(ratios["bf16"]),
        "min_vs_torch_bf16": min(ratios["bf16"]),
        "signal_cost": max(column(rows, "signal_cost")),
        "signal_cost_with_waiter": max(column(rows, "signal_cost_with_waiter")),
    }


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
