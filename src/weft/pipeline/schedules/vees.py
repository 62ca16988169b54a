"""Schedules in the shape of a V: each rank holds one stage on the way down and one on the way up.

With R ranks and 2R stages, rank r has stage r (*down*) and stage 2R-1-r (*up*), so that the last rank turns around
without a transfer, and rank 0 has both ends: the first stage and the loss.

zb-v        of "Zero Bubble Pipeline Parallelism": no bubble where F, I and W take equally long, the memory of 1F1B
dualpipe-v  DualPipe cut in half: forwards of one stage beside backwards of the other, W only where it fills bubbles

Both are made for an even number of stages and enough micro-batches, and are then what torch.distributed.pipelining
makes. Other sizes follow by leaving out: micro-batches that are too many, and of an odd number of stages the turn. What
is left of an order without circles has none: needs run through what was left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from weft.pipeline.schedules.graph import Action, Kind
from weft.pipeline.schedules.schedule import Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741


def v_schedule(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule `zb-v` or `dualpipe-v` on half as many ranks as stages, rounded up.

    >>> v_schedule("zb-v", 4, 3).stages_of(0)
    (0, 3)
    """
    ranks = (stages + 1) // 2
    make = V_SCHEDULES[name]
    lists = tuple(make(rank, ranks, microbatches) for rank in range(ranks))

    def kept(action: Action) -> Action | None:
        stage = action.stage
        if stages % 2 and stage == ranks:
            return None
        return Action(stage - (stages % 2 and stage > ranks), action.kind, action.microbatch)

    lists = tuple(tuple(a for a in map(kept, each) if a is not None and a.microbatch < microbatches) for each in lists)
    return Schedule(name, stages, microbatches, lists)


class _List:
    """The list of one rank while it is made; micro-batches of each stage and kind count up."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self._next: dict[tuple[int, Kind], int] = {}
        self._kept_back: deque[Action] = deque()

    def add(self, stage: int, *kinds: Kind) -> None:
        """The stage's next micro-batch of each kind; a W that is not added by name is kept back."""
        for kind in kinds:
            counted = I if kind is B else kind  # a whole backward counts as both of its parts
            microbatch = self._next.get((stage, counted), 0)
            self._next[stage, counted] = microbatch + 1
            self.actions.append(Action(stage, kind, microbatch))
            if kind is I:
                self._kept_back.append(Action(stage, W, microbatch))
            elif kind is W:
                self._kept_back.remove(self.actions[-1])
            elif kind is B:
                self._next[stage, W] = self._next.get((stage, W), 0) + 1

    def add_oldest_weights(self) -> None:
        """The W that was kept back longest, if any was."""
        if self._kept_back:
            action = self._kept_back.popleft()
            self.actions.append(action)
            self._next[action.stage, W] = action.microbatch + 1

    def count(self, stage: int, kind: Kind) -> int:
        return self._next.get((stage, kind), 0)


def _zb_v(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    most = max(2 * ranks - 1, microbatches)
    made = _List(rank, ranks)
    down, up = made.down, made.up
    for _ in range(2 * (ranks - rank) - 1):
        made.add(down, F)
    for _ in range(rank):
        made.add(up, F)
        made.add(down, F)
    for _ in range(ranks - rank):
        made.add(up, F, I, W)
    while made.count(up, F) < made.count(down, F) or made.count(down, F) < most:
        if made.count(down, F) < most:
            made.add(down, F)
        made.add(down, I, W)
        made.add(up, F, I, W)
    for _ in range(rank):
        made.add(down, I)
        made.add(up, I)
    for _ in range(ranks - rank):
        made.add(down, I, W)
    for stage in (up, down):
        while made.count(stage, W) < made.count(stage, I):
            made.add(stage, W)
    return tuple(made.actions)


def _dualpipe_v(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    most = max(2 * ranks, microbatches)
    made = _List(rank, ranks)
    down, up = made.down, made.up
    for _ in range(2 * (ranks - rank - 1)):
        made.add(down, F)
    for _ in range(rank + 1):
        made.add(down, F)
        made.add(up, F)
    for _ in range(ranks - rank - 1):
        made.add(up, I)
        made.add_oldest_weights()
        made.add(up, F)
    for _ in range(most - 2 * ranks + rank + 1):
        for stage, other in ((down, up), (up, down)):
            made.add(stage, F)
            made.add(other, B)
    for _ in range(ranks - rank - 1):
        made.add(up, B, F)
        made.add(down, B)
    half, odd = (rank + 1) // 2, rank % 2
    for i in range(rank + 1):  # from the middle on in two parts: what is kept back fills the bubble at the end
        made.add(up, I if i > half or (i == half and odd) else B)
        made.add(down, I if i >= half else B)
    for _ in range(ranks - rank - 1):
        made.add_oldest_weights()
        made.add(down, I)
    for _ in range(rank + 1):
        made.add_oldest_weights()
    return tuple(made.actions)


V_SCHEDULES: dict[str, Callable[[int, int, int], tuple[Action, ...]]] = {"zb-v": _zb_v, "dualpipe-v": _dualpipe_v}
