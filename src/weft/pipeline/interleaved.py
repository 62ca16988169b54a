"""Interleaved 1F1B: several stages on a rank, so that a bubble is one stage long and not a whole rank.

Stage s is on rank s mod R, so that a micro-batch passes all ranks, then all ranks again. Micro-batches go in
rounds of at least R: a rank takes a round through its first stage, then through its second, and so on; backwards
the same from the last stage down. With v stages on each rank and rounds of g micro-batches, rank r warms up with
`(v-1)·g + 2(R-r)-1` forwards.

That count is exact where rounds are full and ranks hold equally many stages. Elsewhere it may be too small, so that
ranks would wait in a circle; then the rank that holds the next forward gets one more, until none does. It ends, as
all forwards first never waits in a circle: forwards in the order (round, turn, micro-batch, rank) need only earlier
ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weft.pipeline.action import Action, Kind
from weft.pipeline.schedule import Schedule
from weft.pipeline.validate import run_in_steps


def interleaved_1f1b(stages: int, microbatches: int, *, ranks: int) -> Schedule:
    """The schedule for any number of stages and micro-batches on `ranks` <= `stages` ranks."""
    if not 1 <= ranks <= stages:
        raise ValueError(f"got ranks={ranks} for {stages} stages; expected 1 to {stages}, as every rank holds a stage")
    rounds = _rounds(microbatches, ranks)
    forwards = [_in_rounds(rounds, range(rank, stages, ranks), Kind.FORWARD) for rank in range(ranks)]
    backwards = [_in_rounds(rounds, range(rank, stages, ranks)[::-1], Kind.BACKWARD) for rank in range(ranks)]
    order = _global_order(forwards, rounds, ranks)
    warm_up = [
        min(len(forwards[rank]), (_turns(rank, stages, ranks) - 1) * len(rounds[0]) + 2 * (ranks - rank) - 1)
        for rank in range(ranks)
    ]
    while True:
        lists = tuple(
            take_turns(f, [[action] for action in b], warm_up=w)
            for f, b, w in zip(forwards, backwards, warm_up, strict=True)
        )
        made = Schedule("interleaved-1f1b", stages, microbatches, lists)
        steps = run_in_steps(made)
        if not steps.stuck:
            return made
        # All that this forward needs has been done, so its rank is stuck at a backward before it.
        first = next(action for action in order if action not in steps.of)
        warm_up[first.stage % ranks] += 1


def _turns(rank: int, stages: int, ranks: int) -> int:
    return len(range(rank, stages, ranks))


def _rounds(microbatches: int, ranks: int) -> list[range]:
    """Micro-batches in rounds of at least one for each rank, as equal as can be.

    A short last round would leave ranks idle at each of their stages.

    >>> _rounds(7, 3)
    [range(0, 4), range(4, 7)]
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _in_rounds(rounds: Sequence[range], stages: Sequence[int], kind: Kind) -> list[Action]:
    return [Action(stage, kind, m) for each in rounds for stage in stages for m in each]


def _global_order(forwards: Sequence[Sequence[Action]], rounds: Sequence[range], ranks: int) -> list[Action]:
    round_of = {m: i for i, each in enumerate(rounds) for m in each}
    every = [action for actions in forwards for action in actions]
    return sorted(every, key=lambda a: (round_of[a.microbatch], a.stage // ranks, a.microbatch, a.stage % ranks))


def take_turns(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], *, warm_up: int
) -> tuple[Action, ...]:
    """`warm_up` forwards, then a backward (of one or more actions) and a forward in turns, then what is left."""
    merged = list(forwards[:warm_up])
    for i, backward in enumerate(backwards):
        merged += backward
        merged += forwards[warm_up + i : warm_up + i + 1]
    return tuple(merged)
