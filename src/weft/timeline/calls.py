"""The calls of a trace: each with its own timeline, and all of one kind as one row of figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.timeline.metrics import Baseline, Judged
from weft.timeline.summary import CallFigures
from weft.timeline.value import Timeline


@dataclass(frozen=True)
class TracedCall(Judged):
    """One call of an op: what it was, how long it took here, what it is judged by, and what happened in it.

    what:       the op and its shape; calls of one kind have the same
    plan:       the text of the plan that it followed
    predicted:  draws what the plan promised, for all ranks; None where nothing was predicted
    """

    what: str
    plan: str
    seconds: float
    timeline: Timeline
    baseline: Baseline | None = None
    predicted: Callable[[], Timeline] | None = field(default=None, compare=False)


def figures(calls: Iterable[TracedCall]) -> tuple[CallFigures, ...]:
    """One row for each kind of call, in the order of the first of each.

    >>> matmul = Timeline([])
    >>> both = [TracedCall("matmul 8x8", "", seconds, matmul, Baseline(1.0, 3.0)) for seconds in (1.5, 2.5)]
    >>> [(row.what, row.count, row.seconds, row.e_overlap) for row in figures(both)]
    [('matmul 8x8', 2, 2.0, 0.5)]
    """
    kinds: dict[str, list[TracedCall]] = {}
    for call in calls:
        kinds.setdefault(call.what, []).append(call)
    return tuple(_figures(what, same) for what, same in kinds.items())


def _figures(what: str, same: Sequence[TracedCall]) -> CallFigures:
    hidden = [h for call in same if (h := call.timeline.summary().hidden_fraction) is not None]
    baseline = next((call.baseline for call in reversed(same) if call.baseline is not None), None)
    return CallFigures(
        what,
        count=len(same),
        seconds=statistics.median(call.seconds for call in same),
        hidden_fraction=statistics.median(hidden) if hidden else None,
        baseline=baseline,
    )
