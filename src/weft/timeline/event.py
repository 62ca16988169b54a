"""One thing that happened, or will happen, on one lane."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["compute", "send", "recv", "wait", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Event:
    """What ran from `start` to `end` (seconds, on any one clock) on a lane.

    A lane is one thing that can be busy: a thread, a link's direction, a stage. `"rank 0/comm"` is the lane
    `comm` of the *place* `rank 0`. Overlap is what happens inside a place: rank 1's communication does not
    hide behind rank 0's computation. A lane without a slash belongs to the one place that has no name, which
    suits a trace of one process.

    >>> Event("rank 0/comm", "send", "group 3", 1.0, 1.5, bytes=1 << 20).seconds
    0.5
    """

    lane: str
    kind: Kind
    name: str
    start: float
    end: float
    bytes: int | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"event {self.name!r} has kind {self.kind!r}; expected one of {', '.join(KINDS)}; "
                f"use 'other' for work that neither computes nor communicates"
            )
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise ValueError(
                f"event {self.name!r} on lane {self.lane!r} runs from {self.start} to {self.end}; "
                f"expected finite seconds with start <= end; take both from the same clock"
            )
        for unit, amount in (("bytes", self.bytes), ("flops", self.flops)):
            if amount is not None and not 0 <= amount < math.inf:
                raise ValueError(
                    f"event {self.name!r} has {unit}={amount}; expected a finite number >= 0; "
                    f"leave {unit} out where it is not known"
                )

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def place(self) -> str:
        """The part of the lane before its last slash: what overlap is measured in."""
        return self.lane.rpartition("/")[0]
