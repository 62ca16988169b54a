"""What a row is worth: bounds that nobody beats, rows that are measured again, summaries that say what they leave out.

A bound is made of the best that was seen: of the matmul alone, or the wire alone, in the fastest of the rounds that
took turns with the row; of a machine's peak, in the whole run. A system whose median is below its bound shows that the
bound is wrong, not that the system is good: `bounds_beaten` counts such rows, and must be 0.

A row whose rounds spread over a fifth of their median is measured again, up to three times, and the calmest of the
measurements counts. What is still noisy then is marked: medians of a summary leave it out, minima and maxima do not,
but `noisy_extremes` names those that come from such a row.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from weft.bench.harness import Measurement, Result, column
from weft.lab import check
from weft.report import Column, Row

NOISY = 0.2
"""The interquartile range of a system's rounds over their median; beyond it a row is measured again."""
REPEATS = 3
_SHORTEST = 1e-4  # seconds: the spread of a call that does next to nothing is the clock's
BEATEN = "beats_bound"
NOISY_KEY = "noisy"
NOISY_COLUMN = Column(NOISY_KEY, "", form="")
NOISY_NOTE = "~: rounds spread over 20 % in each of four measurements; medians of the summary leave such rows out"


def row_spread(measured: Measurement) -> float:
    """The largest spread of the systems that take long enough to have one."""
    spreads = (measured.spread(name) for name in measured.case.systems if measured.median(name) >= _SHORTEST)
    return max(spreads, default=0.0)


def settle(take: Callable[[], Result]) -> Result:
    """A result that is calm, or the calmest of four; its bound is the lowest that any of them found.

    `take` measures the row once. The result's facts say how often it was measured (`takes`) and whether it is noisy.
    """
    taken = [take()]
    while row_spread(taken[-1].measured) > NOISY and len(taken) <= REPEATS:
        taken.append(take())
    calmest = min(taken, key=lambda result: row_spread(result.measured))
    bound = min((r.bound for r in taken if r.bound is not None), default=None)
    mark = "~" if row_spread(calmest.measured) > NOISY else ""
    return replace(calmest, bound=bound, facts={**calmest.facts, "takes": len(taken), NOISY_KEY: mark})


def beats(bound: float | None, seconds: Iterable[float]) -> dict[str, object]:
    """The part of a row that says whether any of its systems, by their medians, was faster than the bound.

    >>> beats(2.0, [2.5, 1.9]), beats(None, [1.0])
    ({'beats_bound': True}, {'beats_bound': False})
    """
    return {BEATEN: bound is not None and min(seconds) < bound}


def trust(rows: Sequence[Row]) -> dict[str, object]:
    """The part of a summary that says what the rest is worth.

    >>> trust([{"beats_bound": False, "noisy": "~"}, {"beats_bound": False, "noisy": ""}])
    {'bounds_beaten': 0, 'noisy_rows': 1, 'rows': 2}
    """
    beaten, noisy = sum(bool(row.get(BEATEN)) for row in rows), sum(bool(row.get(NOISY_KEY)) for row in rows)
    return {"bounds_beaten": beaten, "noisy_rows": noisy, "rows": len(rows)}


def calm(rows: Sequence[Row]) -> list[Row]:
    """The rows that are not noisy; all, where none is calm: `noisy_rows` tells."""
    return [row for row in rows if not row.get(NOISY_KEY)] or list(rows)


def median_of(rows: Sequence[Row], key: str) -> float:
    """The median of what calm rows have under a key.

    >>> median_of([{"x": 1.0}, {"x": 2.0, "noisy": "~"}, {"x": 3.0}, {"x": None}], "x")
    2.0
    """
    return statistics.median(column(calm(rows), key) or column(rows, key))


def noisy_extremes(rows: Sequence[Row], keys: Mapping[str, tuple[Callable[[Sequence[float]], float], str]]) -> str:
    """The keys of a summary whose minimum or maximum comes from a noisy row: {key: (min or max, the rows' key)}.

    >>> noisy_extremes([{"x": 1.0, "noisy": "~"}, {"x": 2.0}], {"worst": (min, "x"), "best": (max, "x")})
    'worst'
    """
    steady = [row for row in rows if not row.get(NOISY_KEY)]
    found = []
    for name, (extreme, key) in keys.items():
        values, others = column(rows, key), column(steady, key)
        if values and (not others or extreme(values) != extreme(others)):
            found.append(name)
    return ", ".join(found)


def message_cpu(cards: str) -> float:
    """CPU seconds that sender and receiver together take for a byte between hosts with such cards, at least."""
    found = check(2, 1.0, devices=1, cards=cards, seconds=0.5)
    return min(row.cpu for row in found.rows) * 1e-9


def with_cpu(seconds: float, *, nbytes: float, cpu_per_byte: float, cores: int | None = None) -> float:
    """`seconds` of computing on all cores, which also move `nbytes` between hosts: no faster than both together.

    >>> with_cpu(1.0, nbytes=1e9, cpu_per_byte=2e-9, cores=2)
    2.0
    """
    return seconds + nbytes * cpu_per_byte / (cores or os.cpu_count() or 1)


def at_best_peak(rows: Iterable[Row]) -> list[Row]:
    """Rows with `peak_fraction` as a part of the best `peak_gflops` of all of them, the best that this machine showed.

    >>> at_best_peak([{"peak_gflops": 50.0, "peak_fraction": 0.8}, {"peak_gflops": 100.0, "peak_fraction": 0.9}, {}])
    [{'peak_gflops': 100.0, 'peak_fraction': 0.4}, {'peak_gflops': 100.0, 'peak_fraction': 0.9}, {}]
    """
    rows = list(rows)
    best = max(column(rows, "peak_gflops"), default=0.0)

    def scaled(row: Row) -> Row:
        if not row.get("peak_gflops") or row.get("peak_fraction") is None:
            return row
        return {**row, "peak_gflops": best, "peak_fraction": row["peak_fraction"] * row["peak_gflops"] / best}

    return [scaled(row) for row in rows]
