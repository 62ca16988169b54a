"""Figures of all workers, in memory that they share: each writes its own row, whoever is asked adds them up.

The names are those of TEI's metrics. Prometheus' own client keeps a file for each process, which one that is killed
leaves behind; this memory has no name, and a worker that is started anew counts on where the dead one stopped.
"""

from __future__ import annotations

import mmap
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.jobs.serve.errors import Problem

_SECONDS = tuple(0.0005 * 2**i for i in range(18))  # to about a minute
_SIZES = tuple(float(2**i) for i in range(13))
_TOKENS = tuple(float(2**i) for i in range(18))
_METHODS = ("single", "batch")
COUNTERS: dict[str, tuple[str, Sequence[str], str]] = {  # name: (label, its values, what it counts)
    "te_request_count": ("method", _METHODS, "Requests"),
    "te_request_success": ("method", _METHODS, "Requests that were answered"),
    "te_request_failure": ("err", tuple(p.name.lower() for p in Problem), "Requests that were refused or failed"),
    "te_embed_count": ("", ("",), "Texts to embed"),
    "te_embed_success": ("", ("",), "Texts that were embedded"),
    "te_predict_count": ("", ("",), "Texts to score"),
    "te_predict_success": ("", ("",), "Texts that were scored"),
    "te_tokenize_count": ("", ("",), "Texts to tokenize alone"),
    "weft_batches": ("", ("",), "Batches that were computed"),
    "weft_batch_seconds": ("", ("",), "Seconds that they took"),
    "weft_tokens": ("", ("",), "Tokens that were computed"),
    "weft_dropped": ("", ("",), "Requests whose client left before the answer"),
}
GAUGES = {"te_queue_size": "Texts that wait", "weft_requests_in_flight": "Requests that are worked on"}
HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "te_request_duration": (_SECONDS, "Seconds of a request"),
    "te_request_tokenization_duration": (_SECONDS, "Seconds of a request's tokenizing"),
    "te_request_queue_duration": (_SECONDS, "Seconds of a request in the queue"),
    "te_request_inference_duration": (_SECONDS, "Seconds of a request's batches"),
    "te_request_input_length": (_TOKENS, "Tokens of a request"),
    "te_batch_next_size": (_SIZES, "Texts of a batch"),
    "te_batch_next_tokens": (_TOKENS, "Tokens of a batch"),
}
_RING = 512  # latencies that are kept, for percentiles
_RECENT = 30.0  # seconds


def _layout() -> tuple[dict[tuple[str, str], int], dict[str, int], int]:
    """Where counters and gauges are, where each histogram begins, and where the latencies begin."""
    single: dict[tuple[str, str], int] = {}
    for name, (_, values, _) in COUNTERS.items():
        for value in values:
            single[name, value] = len(single)
    for name in GAUGES:
        single[name, ""] = len(single)
    at = len(single)
    several = {}
    for name, (bounds, _) in HISTOGRAMS.items():
        several[name] = at
        at += len(bounds) + 3  # buckets, the one beyond, sum, count
    return single, several, at


_SLOTS, _STARTS, _LATENCIES = _layout()
_WIDTH = _LATENCIES + 1 + 2 * _RING


@dataclass(frozen=True)
class RequestFigures:
    """What became of a request."""

    method: str
    texts: int
    tokens: int
    total: float
    tokenizing: float = 0.0
    queue: float = 0.0
    compute: float = 0.0


class WorkerBoard:
    """The row of one worker. Each slot is written by one thread only: requests by the loop, batches by the engine."""

    def __init__(self, row: NDArray[np.float64]) -> None:
        memory: Any = row
        self._row: Any = memoryview(memory)  # its elements are Python's numbers, which is faster than numpy's
        for name in GAUGES:
            self._row[_SLOTS[name, ""]] = 0.0  # a worker before this one may have died with something in it

    def count(self, name: str, value: str = "", by: float = 1.0) -> None:
        self._row[_SLOTS[name, value]] += by

    def gauge(self, name: str, value: float) -> None:
        self._row[_SLOTS[name, ""]] = value

    def observe(self, name: str, value: float) -> None:
        bounds, start = HISTOGRAMS[name][0], _STARTS[name]
        self._row[start + bisect_left(bounds, value)] += 1
        self._row[start + len(bounds) + 1] += value
        self._row[start + len(bounds) + 2] += 1

    def answered(self, figures: RequestFigures) -> None:
        """A request had its answer."""
        self.count("te_request_success", figures.method)
        self.observe("te_request_duration", figures.total)
        self.observe("te_request_tokenization_duration", figures.tokenizing)
        self.observe("te_request_queue_duration", figures.queue)
        self.observe("te_request_inference_duration", figures.compute)
        self.observe("te_request_input_length", figures.tokens)
        number = int(self._row[_LATENCIES])
        at = _LATENCIES + 1 + 2 * (number % _RING)
        self._row[at], self._row[at + 1] = time.perf_counter(), figures.total
        self._row[_LATENCIES] = number + 1

    def batch(self, texts: int, tokens: int, seconds: float) -> None:
        """A batch was computed."""
        self.count("weft_batches")
        self.count("weft_batch_seconds", by=seconds)
        self.count("weft_tokens", by=tokens)
        self.observe("te_batch_next_size", texts)
        self.observe("te_batch_next_tokens", tokens)


class Board:
    """The rows of all workers."""

    def __init__(self, workers: int = 1) -> None:
        self._memory = mmap.mmap(-1, workers * _WIDTH * 8)  # anonymous and shared: forks write into the same
        self._rows = np.frombuffer(self._memory, np.float64).reshape(workers, _WIDTH)

    def worker(self, index: int) -> WorkerBoard:
        return WorkerBoard(self._rows[index])

    def value(self, name: str, label: str = "") -> float:
        """Of a counter or a gauge, summed over the workers."""
        return float(self._rows[:, _SLOTS[name, label]].sum())

    def prometheus(self) -> str:
        """All of it in the text format of Prometheus. `_total` is not added to counters' names, as TEI does not."""
        lines = []
        for name, (label, values, text) in COUNTERS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
            for value in values:
                tag = f'{{{label}="{value}"}}' if label else ""
                lines.append(f"{name}{tag} {self.value(name, value):.17g}")
        for name, text in GAUGES.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {self.value(name):.17g}"]
        for name, (bounds, text) in HISTOGRAMS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
            *buckets, total, count = self._histogram(name)
            sums = np.cumsum(buckets)
            for bound, below in zip([*map(repr, bounds), "+Inf"], sums, strict=True):
                lines.append(f'{name}_bucket{{le="{bound}"}} {below:.17g}')
            lines += [f"{name}_sum {total:.17g}", f"{name}_count {count:.17g}"]
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str) -> list[float]:
        start, length = _STARTS[name], len(HISTOGRAMS[name][0]) + 3
        return [float(x) for x in self._rows[:, start : start + length].sum(0)]

    def latencies(self) -> list[float]:
        """Seconds of the requests of the last half minute, or of the last few hundred of each worker, in order."""
        pairs = self._rows[:, _LATENCIES + 1 :].reshape(-1, 2)
        recent = pairs[pairs[:, 0] > max(time.perf_counter() - _RECENT, 0.0), 1]
        return [float(x) for x in np.sort(recent)]

    def summary(self) -> dict[str, Any]:
        """What the page shows: counts since the start, what is waiting now, percentiles of late."""
        late = self.latencies()
        failures = sum(self.value("te_request_failure", value) for value in COUNTERS["te_request_failure"][1])
        return {
            "time": time.perf_counter(),
            "workers": len(self._rows),
            "requests": sum(self.value("te_request_success", method) for method in _METHODS),
            "failures": failures,
            "overloaded": self.value("te_request_failure", "overloaded"),
            "dropped": self.value("weft_dropped"),
            "queue": self.value("te_queue_size"),
            "in_flight": self.value("weft_requests_in_flight"),
            "tokens": self.value("weft_tokens"),
            "batches": self.value("weft_batches"),
            "batch_seconds": self.value("weft_batch_seconds"),
            "batch_texts": self._histogram("te_batch_next_size")[-2],
            "latency": {f"p{q}": _percentile(late, q) for q in (50, 95, 99)},
        }


def _percentile(ordered: Sequence[float], q: int) -> float | None:
    return ordered[min(len(ordered) * q // 100, len(ordered) - 1)] if ordered else None
