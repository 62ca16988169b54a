"""Benchmarks: one file for each claim, with `NAME`, `HELP`, `run(options) -> Report`; promises have `demo()`.

gemm        the native linear against torch's
overlap     matmuls that communicate while they compute
reshard     tensors and a state dict between meshes
pipeline    training steps over several hosts
packed      models without padding; programs: a step of Trainer, a decoder as an encoder, requests that come and go
serve       embeddings over HTTP, under load
end_to_end  a tensor-parallel transformer: training, prefill, decoding; end_to_end_lab: what its ranks run
systems     what is measured against what
bounds      what a bound is made of, rows that are measured again, rows that are noisy
harness     systems in turns; cases, measurements, results, rows
machine     what a figure was measured on, and who else was using it

A benchmark of another claim is one module here and one line in `BENCHMARKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from weft.bench.harness import BenchOptions
    from weft.report import Headline, Report

# Paths, not modules: they import torch, and the command line must start without it.
BENCHMARKS = {
    "gemm": "weft.bench.gemm",
    "overlap": "weft.bench.overlap",
    "reshard": "weft.bench.reshard",
    "pipeline": "weft.bench.pipeline",
    "packed": "weft.bench.packed",
    "serve": "weft.bench.serve",
    "end_to_end": "weft.bench.end_to_end",
}


class Benchmark(Protocol):
    """What a module of this package offers."""

    NAME: str
    HELP: str

    def run(self, options: BenchOptions) -> Report:
        """Measures, and returns the rows and the summary."""


class PromiseBenchmark(Benchmark, Protocol):
    """The benchmark of something that the README promises."""

    def demo(self) -> Sequence[Headline]:
        """The line of `weft demo`, within half a minute."""


def load(name: str) -> Benchmark:
    """The benchmark of that name.

    >>> load("gem")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: got the benchmark 'gem'; expected one of: gemm, overlap, ...
    """
    if name not in BENCHMARKS:
        raise ValueError(
            f"got the benchmark {name!r}; expected one of: {', '.join(BENCHMARKS)}; "
            f"`weft bench --list` says what each measures"
        )
    return cast(Benchmark, import_module(BENCHMARKS[name]))


def load_promise(name: str) -> PromiseBenchmark:
    """The benchmark of a promise, which has a line in the demo."""
    return cast(PromiseBenchmark, load(name))
