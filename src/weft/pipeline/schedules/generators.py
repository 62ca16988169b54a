"""The generators: from a name and sizes to a schedule. None of them knows of transfers or of time.

Stage i of n with m micro-batches; *warm-up* counts the forwards before the first backward.

| name               | warm-up                                | then                                               |
|--------------------|----------------------------------------|----------------------------------------------------|
| gpipe              | m                                      | all backwards                                      |
| 1f1b               | min(m, n-i)                            | B and F in turns                                   |
| eager-1f1b         | min(m, 2(n-i)-1)                       | B and F in turns                                   |
| eager-1f1b+delay   | min(m, 2(n-i)-1)                       | I, W and F in turns: the gradient leaves before W  |
| zero-bubble        | min(m, n-i)                            | I, W of i micro-batches ago, F in turns (ZB-H1)    |
| interleaved-1f1b   | see `interleaved_1f1b`                 | B and F in turns over the rank's stages            |
| search             | see `search.py`: the shortest step that is found within a memory limit                      |
| zb-v, dualpipe-v   | see `vees.py`: two stages on each rank, in the shape of a V                                 |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from weft.pipeline.schedules.costs import Costs
from weft.pipeline.schedules.graph import Action, Kind
from weft.pipeline.schedules.schedule import Schedule
from weft.pipeline.schedules.search import search
from weft.pipeline.schedules.vees import V_SCHEDULES, v_schedule

Actions = tuple[Action, ...]


def schedule(
    name: str,
    *,
    stages: int,
    microbatches: int,
    ranks: int | None = None,
    memory: int | Sequence[int] | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule of that name for any number of stages and micro-batches.

    `ranks` may be any number up to `stages` for `interleaved-1f1b` (the default is half of them, rounded up): stage s
    is then on rank s mod ranks. `zb-v` and `dualpipe-v` have half as many ranks as stages, rounded up: stage s and its
    mirror image from the end are on one rank. Every other schedule has a rank for each stage.

    `search` looks for the shortest step with these `costs` in which no rank keeps activations of more micro-batches
    than `memory` says (one number, or one for each rank); other schedules take neither.

    >>> schedule("eager-1f1b", stages=3, microbatches=5).ranks[1]
    (1F0, 1F1, 1F2, 1B0, 1F3, 1B1, 1F4, 1B2, 1B3, 1B4)
    """
    if name not in (*SCHEDULES, SEARCH):
        raise ValueError(f"got the schedule {name!r}; expected one of: {', '.join(SCHEDULES)}, {SEARCH}")
    if stages < 1 or microbatches < 1:
        raise ValueError(f"got {stages} stages and {microbatches} micro-batches; expected at least 1 of each")
    if name != SEARCH and (memory is not None or costs is not None):
        raise ValueError(f"got memory or costs for the schedule {name}; expected them for {SEARCH!r} only")
    if name in V_SCHEDULES:
        if ranks not in (None, (stages + 1) // 2):
            raise ValueError(
                f"got ranks={ranks} for {stages} stages of {name}; expected {(stages + 1) // 2}, two a rank"
            )
        return v_schedule(name, stages, microbatches)
    if name == SEARCH and ranks in (None, stages):
        return search(stages, microbatches, memory=memory, costs=costs)
    if name == INTERLEAVED:
        return interleaved_1f1b(stages, microbatches, ranks=(stages + 1) // 2 if ranks is None else ranks)
    if ranks not in (None, stages):
        raise ValueError(
            f"got ranks={ranks} for {stages} stages of {name}; expected a rank for each stage; "
            f"{INTERLEAVED}, {' and '.join(V_SCHEDULES)} put several stages on a rank"
        )
    one = _GENERATORS[name]
    return Schedule(name, stages, microbatches, tuple(one(stage, stages, microbatches) for stage in range(stages)))


def _gpipe(stage: int, stages: int, microbatches: int) -> Actions:
    return _in_turns(stage, microbatches, warm_up=microbatches)


def _1f1b(stage: int, stages: int, microbatches: int) -> Actions:
    return _in_turns(stage, microbatches, warm_up=stages - stage)


def _eager_1f1b(stage: int, stages: int, microbatches: int) -> Actions:
    return _in_turns(stage, microbatches, warm_up=2 * (stages - stage) - 1)


def _eager_1f1b_delay(stage: int, stages: int, microbatches: int) -> Actions:
    return _in_turns(stage, microbatches, warm_up=2 * (stages - stage) - 1, weight_delay=0)


def _zero_bubble(stage: int, stages: int, microbatches: int) -> Actions:
    # A stage further down may keep as many W back as it has fewer micro-batches in flight, so every stage holds
    # at most n of them, as stage 0 of 1F1B does. What is kept back fills the bubble at the end.
    return _in_turns(stage, microbatches, warm_up=stages - stage, weight_delay=stage)


def _in_turns(stage: int, microbatches: int, *, warm_up: int, weight_delay: int | None = None) -> Actions:
    """The stage's forwards and backwards in turns; W, where there is one, comes `weight_delay` backwards later."""

    def act(kind: Kind, microbatch: int) -> Action:
        return Action(stage, kind, microbatch)

    every = range(microbatches)
    forwards = [act(Kind.FORWARD, microbatch) for microbatch in every]
    if weight_delay is None:
        return _take_turns(forwards, [[act(Kind.BACKWARD, microbatch)] for microbatch in every], warm_up=warm_up)
    backwards = [[act(Kind.INPUT_GRADIENT, microbatch)] for microbatch in every]
    for microbatch in every:  # those that would come after the last I come right after it
        backwards[min(microbatch + weight_delay, microbatches - 1)].append(act(Kind.WEIGHT_GRADIENT, microbatch))
    return _take_turns(forwards, backwards, warm_up=warm_up)


def _take_turns(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], *, warm_up: int
) -> tuple[Action, ...]:
    """`warm_up` forwards, then a backward (of one or more actions) and a forward in turns, then what is left."""
    merged = list(forwards[:warm_up])
    for i, backward in enumerate(backwards):
        merged += backward
        merged += forwards[warm_up + i : warm_up + i + 1]
    return tuple(merged)


def interleaved_1f1b(stages: int, microbatches: int, *, ranks: int) -> Schedule:
    """Several stages on a rank, so that a bubble is one stage long and not a whole rank; `ranks` <= `stages`.

    Stage s is on rank s mod R, so that a micro-batch passes all ranks, then all ranks again. Micro-batches go in
    rounds of at least R: a rank takes a round through its first stage, then through its second, and so on; backwards
    the same from the last stage down. With v stages on each rank and rounds of g micro-batches, rank r warms up with
    `(v-1)·g + 2(R-r)-1` forwards.

    That count is exact where rounds are full and ranks hold equally many stages. Elsewhere it may be too small, so
    that ranks would wait in a circle; then the rank that holds the next forward gets one more, until none does. It
    ends, as all forwards first never waits in a circle: forwards in the order (round, turn, micro-batch, rank) need
    only earlier ones.
    """
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
            _take_turns(f, [[action] for action in b], warm_up=w)
            for f, b, w in zip(forwards, backwards, warm_up, strict=True)
        )
        made = Schedule("interleaved-1f1b", stages, microbatches, lists)
        steps = made.steps()
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


INTERLEAVED = "interleaved-1f1b"
SEARCH = "search"  # not in SCHEDULES: it takes seconds, and has no order of its own
# What makes the list of one stage on a rank of its own.
_GENERATORS: dict[str, Callable[[int, int, int], Actions]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "eager-1f1b": _eager_1f1b,
    "eager-1f1b+delay": _eager_1f1b_delay,
    "zero-bubble": _zero_bubble,
}
SEVERAL_STAGES = (INTERLEAVED, *V_SCHEDULES)  # of which a rank holds two, unless told otherwise
SCHEDULES: tuple[str, ...] = (*_GENERATORS, *SEVERAL_STAGES)
