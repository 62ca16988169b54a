"""What the models share: cutting a row of layers into stages, and weights that do not depend on the cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from torch import nn

from weft.pipeline.seeds import seed_of, seeded

M = TypeVar("M", bound=nn.Module)


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Consecutive layers for each stage, such that the most expensive stage is as cheap as can be.

    >>> cut([1, 1, 4, 1, 1], 3)
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"got {stages} stages for {count} layers; expected 1 to {count}")
    # best[s][i]: the cheapest way to put the first i layers into s stages, and where its last stage begins.
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best = [[(0.0 if i == 0 else float("inf"), 0) for i in range(count + 1)]]
    for _ in range(stages):
        row = [(float("inf"), 0)]
        for i in range(1, count + 1):
            row.append(min((max(best[-1][j][0], before[i] - before[j]), j) for j in range(i)))
        best.append(row)
    ends = [count]
    for stage in range(stages, 0, -1):
        ends.append(best[stage][ends[-1]][1])
    ends.reverse()
    return [range(a, b) for a, b in pairwise(ends)]


def made_with(seed: int, number: int, make: Callable[[], M]) -> M:
    """A layer whose first weights depend on its number in the model alone, not on the layers made before it."""
    with seeded(seed_of(seed, 0, number, 0)):
        return make()
