"""Sets of seconds: unions, intersections and differences of intervals, each by one sweep.

An interval is a pair `(start, end)`. A *set* is a sorted list of disjoint intervals, which is what `union`
returns and what the other functions take. All is O(n log n), or O(n) on sets.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The seconds that at least one interval covers; empty intervals vanish, touching ones merge.

    >>> union([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)])
    [(0.0, 3.0), (4.0, 5.0)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The seconds that both sets cover.

    >>> intersection([(0.0, 3.0), (4.0, 6.0)], [(2.0, 5.0)])
    [(2.0, 3.0), (4.0, 5.0)]
    """
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The seconds that `a` covers and `b` does not.

    >>> difference([(0.0, 6.0)], [(1.0, 2.0), (5.0, 9.0)])
    [(0.0, 1.0), (2.0, 5.0)]
    """
    left: list[Interval] = []
    first = 0
    for start, end in a:
        while first < len(b) and b[first][1] <= start:
            first += 1
        k = first
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                left.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """How many seconds a set covers.

    >>> length([(0.0, 3.0), (4.0, 5.0)])
    4.0
    """
    return math.fsum(end - start for start, end in intervals)


def rows(intervals: Sequence[Interval]) -> list[int]:
    """Rows on which intervals can be drawn without one covering another: each takes the lowest free one.

    `intervals` must be sorted by start. As many rows are used as intervals run at once at the busiest moment.

    >>> rows([(0.0, 4.0), (1.0, 2.0), (2.0, 3.0), (4.0, 5.0)])
    [0, 1, 1, 0]
    """
    placed: list[int] = []
    free: list[int] = []
    running: list[tuple[float, int]] = []
    used = 0
    for start, end in intervals:
        while running and running[0][0] <= start:
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, used = used, used + 1
        heapq.heappush(running, (end, row))
        placed.append(row)
    return placed
