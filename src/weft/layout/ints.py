"""Whole numbers: arrays of them, and lists of them as short text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def format_ints(values: Iterable[int]) -> str:
    """Whole numbers, with runs and repeats written short; `parse_ints` reads it.

    >>> format_ints([0, 1, 2, 3, 7, 7, 7, 5])
    '0-3,7*3,5'
    """
    runs: list[list[int]] = []  # first value, step (0 or 1), count
    for value in values:
        run = runs[-1] if runs else None
        if run and run[2] == 1 and value - run[0] in (0, 1):
            run[1:] = [value - run[0], 2]
        elif run and run[2] > 1 and value == run[0] + run[1] * run[2]:
            run[2] += 1
        else:
            runs.append([value, 1, 1])
    return ",".join(_run_text(*run) for run in runs)


def _run_text(first: int, step: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}" if step else f"{first}*{count}"


def parse_ints(text: str) -> tuple[int, ...]:
    """The numbers that `format_ints` wrote.

    >>> parse_ints("0-3,7*3,5")
    (0, 1, 2, 3, 7, 7, 7, 5)
    """
    values: list[int] = []
    for part in text.split(",") if text else []:
        if "*" in part:
            value, count = part.split("*")
            values += [int(value)] * int(count)
        else:
            first, _, last = part.partition("-")
            values += range(int(first), int(last or first) + 1)
    return tuple(values)
