"""Interval sets against a brute-force oracle: integer intervals as Python sets of unit cells."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weft.timeline import events

Cells = set[int]
bounds = st.integers(0, 40)
interval = st.tuples(bounds, bounds).map(lambda p: (float(min(p)), float(max(p))))
many = st.lists(interval, max_size=12)


def cells(spans: list[tuple[float, float]]) -> Cells:
    return {cell for start, end in spans for cell in range(int(start), int(end))}


def is_a_set(spans: list[tuple[float, float]]) -> bool:
    """Sorted, disjoint, without empty intervals."""
    return all(s < e for s, e in spans) and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(many)
def test_union_covers_what_any_interval_covers(spans: list[tuple[float, float]]) -> None:
    merged = events.union(spans)
    assert is_a_set(merged)
    assert cells(merged) == cells(spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged)), "touching intervals must merge"


@given(many, many)
def test_intersection_and_difference_split_a_set(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> None:
    left, right = events.union(a), events.union(b)
    common, rest = events.intersection(left, right), events.difference(left, right)
    assert is_a_set(common)
    assert is_a_set(rest)
    assert cells(common) == cells(a) & cells(b)
    assert cells(rest) == cells(a) - cells(b)
    assert events.length(common) + events.length(rest) == events.length(left) == len(cells(a))


@given(many)
def test_rows_never_cover_each_other_and_are_as_few_as_possible(spans: list[tuple[float, float]]) -> None:
    spans = sorted(s for s in spans if s[0] < s[1])
    placed = events.rows(spans)
    for row in set(placed):
        own = [s for s, r in zip(spans, placed, strict=True) if r == row]
        assert is_a_set(own)
    busiest = max((sum(s <= t < e for s, e in spans) for t in range(41)), default=0)
    assert len(set(placed)) == busiest
    assert set(placed) == set(range(busiest))
