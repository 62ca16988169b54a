"""An order in which no card waits: the open shop with preemption, solved exactly.

loads[i, j] is the time that sender i needs for receiver j, in whole quanta. No order can be shorter than the
largest sum of a row or a column, and one of exactly that length exists (Birkhoff and von Neumann; Gonzalez
and Sahni): fill the matrix up until all rows and columns have that sum; then there is a way to pair off all
senders and receivers; let the pairs send until one of them is done, and repeat.

Among the many ways to pair off, those with large entries are taken first (a threshold that is halved when
there is no such way), so that few and long phases come out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.layout import Ints


@dataclass(frozen=True)
class Phase:
    """From `start` on, for `length` quanta, each pair (row, column) of `pairs` sends."""

    start: int
    length: int
    pairs: tuple[tuple[int, int], ...]


def open_shop(loads: Ints) -> list[Phase]:
    """The phases of a matrix [senders, receivers] of whole numbers.

    >>> open_shop(np.array([[1, 1], [1, 1]]))
    [Phase(start=0, length=1, pairs=((0, 0), (1, 1))), Phase(start=1, length=1, pairs=((0, 1), (1, 0)))]
    """
    rows, columns = loads.shape
    left = _fill_up(loads)
    total = int(left[0].sum()) if len(left) else 0
    matching = _Matching(len(left))
    phases: list[Phase] = []
    now, threshold = 0, 1 << (int(left.max(initial=1)).bit_length() - 1)
    matching.allow(left >= threshold)
    while now < total:
        if not matching.complete():
            threshold //= 2
            matching.allow(left >= threshold)
            continue
        columns_of = matching.column
        entries = left[np.arange(len(left)), columns_of]
        length = int(entries.min())
        pairs = tuple((i, j) for i, j in enumerate(columns_of[:rows]) if j < columns and loads[i, j])
        phases.append(Phase(now, length, pairs))
        left[np.arange(len(left)), columns_of] -= length
        now += length
        for row in np.nonzero(entries - length < threshold)[0].tolist():
            matching.forbid(row)
    return phases


def _fill_up(loads: Ints) -> Ints:
    """[r + c, r + c] with `loads` in the corner and all rows and columns of the same sum."""
    out, into = loads.sum(axis=1), loads.sum(axis=0)
    total = max(out.max(initial=0), into.max(initial=0))
    return np.block([[loads, np.diag(total - out)], [np.diag(total - into), loads.T]]).astype(np.int64)


class _Matching:
    """A matching of rows and columns that is repaired, not made anew, when entries come and go.

    Sets of columns are the bits of Python integers: a breadth-first search then takes few steps.
    """

    def __init__(self, size: int) -> None:
        self.column = [-1] * size  # of each row
        self._row = [-1] * size  # of each column
        self._allowed = [0] * size  # the columns that each row may take
        self._free = (1 << size) - 1  # the columns that are not taken

    def allow(self, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
        """Sets which entries may be taken; those that are taken stay so."""
        packed = np.packbits(allowed, axis=1, bitorder="little")
        self._allowed = [int.from_bytes(row.tobytes(), "little") for row in packed]

    def forbid(self, row: int) -> None:
        """Takes the entry of a row out of the matching, and out of those that may be taken."""
        column = self.column[row]
        self._allowed[row] &= ~(1 << column)
        self.column[row] = self._row[column] = -1
        self._free |= 1 << column

    def complete(self) -> bool:
        """Matches every row if that can be done."""
        return all(self.column[row] >= 0 or self._augment(row) for row in range(len(self.column)))

    def _augment(self, start: int) -> bool:
        came_from: dict[int, int] = {}  # column -> row that reached it
        unseen = (1 << len(self.column)) - 1
        rows = [start]
        for row in rows:
            reached = self._allowed[row] & unseen
            end = reached & self._free
            if end:
                self._flip((end & -end).bit_length() - 1, row, came_from)
                return True
            unseen &= ~reached
            while reached:
                column = (reached & -reached).bit_length() - 1
                reached &= reached - 1
                came_from[column] = row
                rows.append(self._row[column])
        return False

    def _flip(self, column: int, row: int, came_from: dict[int, int]) -> None:
        self._free &= ~(1 << column)
        while True:
            before = self.column[row]
            self.column[row], self._row[column] = column, row
            if before < 0:
                return
            column, row = before, came_from[before]
