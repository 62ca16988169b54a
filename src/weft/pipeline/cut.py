"""Which layers go to which stage, by what they cost: `weft.cut`. Pure.

Equal counts of layers are unequal work where a vocabulary is large: the head of a model with 128,000 words and a width
of 2,048 costs as much as five layers. The slowest stage is what a pipeline runs at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from weft.models.families import family_of
from weft.models.family import StageNames


def cut_layers(costs: Sequence[float], stages: int, *, speeds: Sequence[float] | None = None) -> list[range]:
    """Consecutive layers for each stage, such that the slowest stage is as fast as can be.

    `speeds` are those of the hosts of the stages, in any unit: equal by default.

    >>> cut_layers([1, 1, 4, 1, 1], 3)
    [range(0, 2), range(2, 3), range(3, 5)]
    >>> cut_layers([1, 1, 1, 1, 1, 1], 2, speeds=[2.0, 1.0])
    [range(0, 4), range(4, 6)]
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(f"got {stages} stages for {count} layers; expected 1 to {count}")
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"got the costs {list(costs)}; expected finite numbers, 0 or more")
    rates = [1.0] * stages if speeds is None else [float(speed) for speed in speeds]
    if len(rates) != stages or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"got the speeds {speeds}; expected one above 0 for each of the {stages} stages")
    # best[s][i]: the fastest way to put the first i layers into s stages, and where its last stage begins.
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best = [[(0.0 if i == 0 else float("inf"), 0) for i in range(count + 1)]]
    for rate in rates:
        row = [(float("inf"), 0)]
        for i in range(1, count + 1):
            row.append(min((max(best[-1][j][0], (before[i] - before[j]) / rate), j) for j in range(i)))
        best.append(row)
    ends = [count]
    for stage in range(stages, 0, -1):
        ends.append(best[stage][ends[-1]][1])
    ends.reverse()
    return [range(a, b) for a, b in pairwise(ends)]


def cut(
    model: nn.Module, stages: int, costs: Sequence[float] | None = None, *, speeds: Sequence[float] | None = None
) -> list[range]:
    """Which layers of a model go to which stage, such that the slowest stage is as fast as can be.

    model:  an `nn.Sequential`, or a language model of Hugging Face that `model_stage` takes; its weights are not read,
            so that it may be on the meta device
    costs:  of each layer, in any unit; for a language model also those of what comes before the first layer and after
            the last one (embedding; norm and head) at both ends: layers + 2 numbers. By default what a token's matmuls
            cost: the sizes of the weights
    speeds: of each stage's host, in any unit, where hosts are unequal

    Returns a range of layers for each stage, for `model_stage(..., layers=)` and `nn.Sequential`'s slices.

    >>> model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 32))
    >>> cut(model, 2)
    [range(0, 5), range(5, 7)]
    """
    names, layers = _layers(model)
    extra = 0 if names is None else 2
    if costs is None:
        costs = [_matmul_size(layer) for layer in layers]
        if names is not None:
            costs = [0.0, *costs, _matmul_size(getattr(model, names.head))]
    if len(costs) != len(layers) + extra:
        what = f"{len(layers)} layers" + (", of what comes before and of what comes after them" if extra else "")
        raise ValueError(f"got {len(costs)} costs; expected those of {what}: {len(layers) + extra} numbers")
    merged = [float(cost) for cost in costs]
    if extra:
        first, *merged, last = merged
        merged[0] += first
        merged[-1] += last
    return cut_layers(merged, stages, speeds=speeds)


def _layers(model: Any) -> tuple[StageNames | None, list[nn.Module]]:
    if isinstance(model, nn.Sequential):
        return None, list(model)
    family = family_of(model)
    if family is None or family.stages is None or not hasattr(model, family.stages.head):
        raise ValueError(
            f"got a {type(model).__name__}; expected an nn.Sequential, or a language model that model_stage takes"
        )
    return family.stages, list(getattr(getattr(model, family.stages.base), family.stages.layers))


def _matmul_size(module: nn.Module) -> float:
    """The multiplications of one row: the sizes of all matrices that are not only looked up."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    return float(sum(p.numel() for p in module.parameters() if p.dim() > 1 and id(p) not in tables))
