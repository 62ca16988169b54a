"""Schedules, graphs and costs at random, and small checks that do not use the code under test."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.pipeline import SCHEDULES, Action, Costs, Edge, Kind, Schedule, StageGraph, schedule

SIZES = [(stages, microbatches) for stages in range(1, 7) for microbatches in range(1, 13)]


def listed(*texts: str) -> tuple[tuple[Action, ...], ...]:
    """Lists of actions from lines such as "0F0 0B0"."""
    return tuple(tuple(Action.parse(word) for word in text.split()) for text in texts)


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Any schedule whose ranks are each in a possible order; together they may well wait in a circle."""
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    home = [*range(ranks), *(draw(st.integers(0, ranks - 1)) for _ in range(stages - ranks))]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = (Kind.FORWARD, *draw(st.sampled_from([(Kind.BACKWARD,), tuple(Kind)[2:]])))
            at = 0
            for kind in kinds:  # anywhere after the one before
                at = draw(st.integers(at, len(lists[home[stage]])))
                lists[home[stage]].insert(at, Action(stage, kind, microbatch))
                at += 1
    return Schedule("any", stages, microbatches, tuple(map(tuple, lists)))


@st.composite
def generated(draw: st.DrawFn, *, most_stages: int = 6, most_microbatches: int = 6) -> Schedule:
    """A schedule of a generator."""
    name = draw(st.sampled_from(SCHEDULES))
    stages = draw(st.integers(1, most_stages))
    ranks = draw(st.integers(1, stages)) if name == "interleaved-1f1b" else None
    return schedule(name, stages=stages, microbatches=draw(st.integers(1, most_microbatches)), ranks=ranks)


@st.composite
def graphs(draw: st.DrawFn, stages: int) -> StageGraph:
    """A chain (now and then with a gap) with skips, several tensors between two stages, and shared outputs."""
    links = [Edge(s, s + 1) for s in range(stages - 1) if draw(st.integers(0, 9)) > 0]
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    skips = draw(st.lists(st.tuples(st.sampled_from(pairs), st.sampled_from("pqm")), max_size=8)) if pairs else []
    extra = {Edge(a, b, tensor, gradient=tensor != "m") for (a, b), tensor in skips}
    return StageGraph(stages, (*links, *sorted(extra)))


@st.composite
def costs(draw: st.DrawFn, stages: int, graph: StageGraph) -> Costs:
    """Whole and half seconds, so that sums are exact and ties are frequent; hosts may be shared."""
    seconds = st.integers(1, 6).map(lambda n: n / 2)
    f, i, w = (tuple(draw(seconds) for _ in range(stages)) for _ in range(3))
    wires = {edge: draw(st.integers(0, 6)) / 2 for edge in graph.edges}
    back = draw(st.one_of(st.none(), st.just({edge: draw(st.integers(0, 6)) / 2 for edge in graph.edges})))
    shared = draw(st.one_of(st.none(), st.just(tuple((draw(st.integers(0, 3)),) for _ in range(stages)))))
    return Costs(f, tuple(a + b for a, b in zip(i, w, strict=True)), i, w, wires, back, shared)


def needs(schedule: Schedule, graph: StageGraph, action: Action) -> list[Action]:
    """What must have ended before the action, on any rank; written here once more."""
    m = action.microbatch

    def gradient(stage: int) -> Action:
        return Action(stage, Kind.INPUT_GRADIENT if schedule.splits_backward(stage, m) else Kind.BACKWARD, m)

    if action.kind is Kind.FORWARD:
        return [Action(e.source, Kind.FORWARD, m) for e in graph.edges if e.target == action.stage]
    own = Action(action.stage, Kind.FORWARD, m)
    if action.kind is Kind.WEIGHT_GRADIENT:
        return [own, Action(action.stage, Kind.INPUT_GRADIENT, m)]
    return [own, *(gradient(e.target) for e in graph.edges if e.source == action.stage and e.gradient)]
