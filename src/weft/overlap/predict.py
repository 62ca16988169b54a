"""How long a partition into groups takes, and which is best: FlashOverlap's recurrence, solved exactly.

The work is a row of *units* in the order of computing; unit t takes seconds to compute and then bytes to send. A group
is a run of units that is sent at once, when its last unit is computed and the group before it is out:

    out = max(computed, out) + wire(bytes of the group)

where `computed` also counts the CPU that the messages of earlier groups have taken. `out` after a prefix of units
grows with `out` after any shorter prefix, so the best way to cut a prefix is made of best ways to cut shorter ones:
a dynamic program over all O(T^2) groups finds the optimum that the paper's pruned search only approaches. For an
input that travels time runs backwards: the last chunk to arrive takes the place of the first group to leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from weft.overlap.curves import Curves


@dataclass(frozen=True)
class Work:
    """Units in the order of computing: seconds and wire bytes of each.

    before:  seconds of computing that need no message (the rows that are there), before the first unit
    after:   seconds that follow, whatever happens: sums, and leaving the call
    last:    the part of `after` that can start only when the last message is through
    """

    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]
    before: float = 0.0
    after: float = 0.0
    last: float = 0.0
    backwards: bool = False

    @property
    def units(self) -> int:
        return len(self.seconds)

    @property
    def compute(self) -> float:
        """Seconds of all computing."""
        return self.before + sum(self.seconds)


def predict_sequential(work: Work, curves: Curves) -> float:
    """Everything computed, then everything sent; or the other way round."""
    return curves.call_overhead + work.compute + curves.wire(sum(work.nbytes)) + curves.cpu_per_message + work.after


def predict(work: Work, groups: Sequence[int], curves: Curves) -> float:
    """Seconds with these group sizes, which add up to the number of units."""
    if sum(groups) != work.units or any(size < 1 for size in groups):
        raise ValueError(f"groups are {tuple(groups)}, expected sizes of at least 1 that add up to {work.units}")
    prefix = _Prefix(work, curves)
    out, ends = 0.0, list(accumulate(groups[::-1] if work.backwards else groups))
    for start, end in pairwise([0, *ends]):
        out = prefix.sent(out, start, end)
    return prefix.total(out, ends[-2] if len(ends) > 1 else 0)


def bound(work: Work, curves: Curves) -> float:
    """No plan is faster: all computing, or all bytes as one message; and what cannot be hidden of either."""
    return max(work.compute, curves.wire(sum(work.nbytes)))


class _Prefix:
    """Sums over prefixes of the units, from the end when time runs backwards."""

    def __init__(self, work: Work, curves: Curves) -> None:
        seconds, nbytes = work.seconds, work.nbytes
        if work.backwards:
            seconds, nbytes = seconds[::-1], nbytes[::-1]
        self.work, self.curves = work, curves
        self.seconds = [0.0, *accumulate(seconds)]
        self.nbytes = [0.0, *accumulate(nbytes)]
        # Computing that comes before any message goes to the far end when time runs backwards.
        self.head = 0.0 if work.backwards else work.before

    def computed(self, start: int, end: int) -> float:
        """When units up to `end` are computed, if messages of units up to `start` took their CPU meanwhile."""
        return self.head + self.seconds[end] + self.curves.cpu_per_byte * self.nbytes[start]

    def sent(self, out: float, start: int, end: int) -> float:
        """When the group [start, end) is out, if the one before it was at `out`."""
        nbytes = self.nbytes[end] - self.nbytes[start]
        if not nbytes:
            return out
        return max(self.computed(start, end), out) + self.curves.wire(nbytes) + self.curves.cpu_per_message

    def total(self, out: float, last: int) -> float:
        """The end, when the last message is through at `out` and its group starts at `last`."""
        work, all_units = self.work, self.work.units
        computed = work.compute + self.curves.cpu_per_byte * self.nbytes[last if not work.backwards else all_units]
        return self.curves.call_overhead + max(computed + work.after, out + work.last)


def best_groups(work: Work, curves: Curves) -> tuple[int, ...]:
    """The group sizes with the earliest end, exactly; O(T^2).

    A prefix is best when its last message is out earliest. Only the whole is judged by its end, which also counts the
    CPU that all messages but the last have taken.
    """
    prefix = _Prefix(work, curves)
    best = [0.0] + [float("inf")] * work.units
    came_from = [0] * (work.units + 1)
    for end in range(1, work.units + 1):
        for start in range(end):
            out = prefix.sent(best[start], start, end)
            if end == work.units:
                out = prefix.total(out, start)
            if out < best[end]:
                best[end], came_from[end] = out, start
    sizes = []
    end = work.units
    while end:
        sizes.append(end - came_from[end])
        end = came_from[end]
    return tuple(sizes) if work.backwards else tuple(sizes[::-1])


def partitions(units: int) -> Iterator[tuple[int, ...]]:
    """All 2^(units - 1) ways to cut `units` into groups.

    >>> list(partitions(3))
    [(3,), (1, 2), (2, 1), (1, 1, 1)]
    """
    for cuts in range(units):
        for points in combinations(range(1, units), cuts):
            yield tuple(b - a for a, b in pairwise((0, *points, units)))


def exhaustive_groups(work: Work, curves: Curves) -> tuple[int, ...]:
    """The best of all partitions by trying each; for few units."""
    return min(partitions(work.units), key=lambda groups: predict(work, groups, curves))


def pruned_groups(work: Work, curves: Curves, *, first: int = 2, last: int = 4) -> tuple[int, ...]:
    """The paper's search: a small first group and a small last one, and between them groups of one size each."""
    found: list[tuple[int, ...]] = [(work.units,)]
    for head in range(1, min(first, work.units) + 1):
        for tail in range(1, min(last, work.units - head) + 1):
            middle = work.units - head - tail
            for size in range(1, middle + 1):
                full, rest = divmod(middle, size)
                found.append((head, *[size] * full, *([rest] if rest else []), tail))
            if middle == 0:
                found.append((head, tail))
    return min(found, key=lambda groups: predict(work, groups, curves))
