"""A random pipeline: what it is made of, and what is done with it. A value that prints; see `pipeline.py`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from weft.pipeline import Action, Edge, Kind, Schedule, StageGraph, chain, schedule
from weft.pipeline.schedules.graph import Dependencies

NAMES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "eager-1f1b+delay",
    "zero-bubble",
    "interleaved-1f1b",
    "zb-v",
    "dualpipe-v",
    "own",
)
_WIDER = {"bfloat16": "float32", "float16": "float32"}
PHASES = ("forward", "backward", "weights", "optimiser", "loss")
BETWEEN = ("sgd", "adamw fused", "adamw foreach", "data", "load", "swap", "nothing", "accumulate")
BEFORE = ("", "", "eval", "refused batch", "inference mode", "bad pipeline", "no_grad", "trace")


@dataclass(frozen=True)
class Part:
    """What one stage is: how its module computes, and how tensors lie on its mesh.

    layout: "r" all on each rank of the mesh, "s0" or "s1" cut along that dim, "p" like "r" with outputs as terms
    """

    dropout: bool
    norm: bool
    counts: bool
    views: bool
    keeps: bool
    frozen: bool
    dtype: str
    layout: str


@dataclass(frozen=True)
class Raise:
    """Where a stage raises: in the last step, in a phase of one micro-batch."""

    stage: int
    phase: str
    microbatch: int


@dataclass(frozen=True)
class Case:
    """One random program. `world` ranks run it; `meshes` has the ranks of each stage."""

    number: int
    made: Schedule
    graph: StageGraph
    meshes: tuple[tuple[int, ...], ...]
    world: int
    parts: tuple[Part, ...]
    rows: tuple[tuple[int, int], ...]  # of each micro-batch: [rows, length, width]
    as_tensor: bool
    checkpoint: tuple[int, ...]
    transfers: str
    strategy: str
    seed: int | None
    scale: float
    before: tuple[str, ...]  # of each step
    between: tuple[str, ...]  # after each step
    raises: Raise | None

    @property
    def is_cut(self) -> bool:
        return any(part.layout != "r" for part in self.parts)

    @property
    def is_exact(self) -> bool:
        """Whether results are those of one process bit by bit: backwards in order, nothing twice, no strides."""
        in_order = self.made.name not in ("own", "interleaved-1f1b", "zb-v", "dualpipe-v")
        return in_order and all(len(mesh) == 1 for mesh in self.meshes) and not any(part.views for part in self.parts)

    def __str__(self) -> str:
        value = replace(self)
        lists = " | ".join(" ".join(map(str, actions)) for actions in self.made.ranks)
        rest = {k: v for k, v in value.__dict__.items() if k not in ("made", "graph", "number")}
        return f"case {self.number}: {self.made.name} [{lists}] {self.graph}; {rest}"


def case_of(number: int, rng: random.Random) -> Case:
    """The case of that number, of its own random numbers."""
    name = rng.choice(NAMES)
    ranks = rng.choice((2, 2, 2, 3, 3, 4))
    turns = 2 if name in ("zb-v", "dualpipe-v") else rng.choice((1, 2)) if name in ("interleaved-1f1b", "own") else 1
    stages = ranks * turns
    microbatches = rng.randint(1, 6 if stages < 4 else 4)
    graph = random_graph(rng, stages)
    made = (
        random_schedule(rng, graph, ranks, microbatches)
        if name == "own"
        else schedule(name, stages=stages, microbatches=microbatches, **({"ranks": ranks} if stages > ranks else {}))
    )
    if not _can_run(made, graph):
        graph = chain(stages)  # the schedule was made for one
    sizes = [1] * ranks
    if ranks < 4 and rng.random() < 0.3:
        sizes[rng.randrange(ranks)] = 2
        if ranks == 2 and rng.random() < 0.5:
            sizes = [2, 2]
    world = min(4, sum(sizes) + (rng.random() < 0.05))
    order = rng.sample(range(world), sum(sizes))
    held = [tuple(order.pop() for _ in range(size)) for size in sizes]
    meshes = tuple(held[made.rank_of(stage)] for stage in range(stages))
    parts = _parts(rng, made, graph, meshes)
    steps = rng.randint(1, 3)
    raises = None
    if rng.random() < 0.15:
        phase = rng.choice(PHASES)
        stage = stages - 1 if phase == "loss" else rng.randrange(stages)
        raises = Raise(stage, phase, rng.randrange(microbatches))
        parts = tuple(replace(p, frozen=False) if i == stage else p for i, p in enumerate(parts))
    even = rng.random() < 0.4
    least = 0 if rng.random() < 0.1 else 1  # some micro-batches have no rows
    shape = (rng.randint(1, 3), rng.randint(1, 4))
    rows = tuple(shape if even else (rng.randint(least, 3), rng.randint(1, 4)) for _ in range(microbatches))
    unsafe = {stage for stage, part in enumerate(parts) if part.counts}  # buffers that change
    kept = tuple(stage for stage in range(stages) if stage not in unsafe and rng.random() < 0.15)
    drops = any(part.dropout for part in parts)
    case = Case(
        number, made, graph, meshes, world, parts, rows, even,
        kept,
        "synchronous" if rng.random() < 0.15 else "overlapped",
        rng.choice(("optimal", "optimal", "send_recv", "all_gather", "broadcast")),
        rng.randrange(1 << 20) if drops or rng.random() < 0.2 else None,
        rng.choice((1.0, 1.0, 0.5, 3.0)),
        tuple(rng.choice(BEFORE) for _ in range(steps)),
        tuple(rng.choice(BETWEEN) for _ in range(steps)),
        raises,
    )  # fmt: skip
    if case.is_exact:
        return case
    # Where results are compared with a tolerance, it should be a small one.
    return replace(case, parts=tuple(replace(p, dtype=_WIDER.get(p.dtype, p.dtype)) for p in case.parts))


def _parts(
    rng: random.Random, made: Schedule, graph: StageGraph, meshes: tuple[tuple[int, ...], ...]
) -> tuple[Part, ...]:
    layout = {}  # of a rank of the schedule: what stays there is handed over as it is
    for rank in range(len(made.ranks)):
        stages = made.stages_of(rank)
        choices = ["r", "r", "s0", "s1"] + (["p"] if len(stages) == 1 else [])
        layout[rank] = rng.choice(choices) if len(meshes[stages[0]]) > 1 else "r"
    kind = rng.choice(("float32", "float32", "float32", "float64", "bfloat16", "float16", "mixed"))
    parts = []
    for stage in range(made.stages):
        lies = layout[made.rank_of(stage)]
        if lies == "p" and graph.into(stage):  # else its module would have to sum the gradients of its inputs
            lies = "r"
        parts.append(
            Part(
                dropout=lies == "r" and rng.random() < 0.2,
                norm=rng.random() < 0.4,
                counts=lies == "r" and rng.random() < 0.15,
                views=rng.random() < 0.2,
                keeps=rng.random() < 0.15,
                frozen=stage < made.stages - 1 and rng.random() < 0.1,
                dtype=rng.choice(("float32", "float64")) if kind == "mixed" else kind,
                layout=lies,
            )
        )
    return tuple(parts)


def random_graph(rng: random.Random, stages: int) -> StageGraph:
    """A chain, with skips, shared outputs and tensors without a gradient here and there."""
    edges = set(chain(stages).edges)
    while rng.random() < 0.4 and stages > 2:
        source = rng.randrange(stages - 2)
        target = rng.randrange(source + 2, stages)
        name = f"skip{source}"
        gradient = next((e.gradient for e in edges if (e.source, e.tensor) == (source, name)), rng.random() < 0.8)
        edges.add(Edge(source, target, name, gradient=gradient))
    return StageGraph(stages, tuple(edges))


def random_schedule(rng: random.Random, graph: StageGraph, ranks: int, microbatches: int) -> Schedule:
    """Any order that can be, with B here and I and W there: ranks do whatever they could do next, by chance."""
    stages = graph.stages
    split = {(s, m) for s in range(stages) for m in range(microbatches) if rng.random() < 0.4}
    todo = set()
    for s in range(stages):
        for m in range(microbatches):
            kinds = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if (s, m) in split else (Kind.BACKWARD,)
            todo |= {Action(s, kind, m) for kind in (Kind.FORWARD, *kinds)}
    # In the order in which they can be: a first schedule, of which only the dependencies are used.
    plain = tuple(
        tuple(sorted((a for a in todo if a.stage % ranks == r), key=lambda a: (a.kind is not Kind.FORWARD, a)))
        for r in range(ranks)
    )
    needs = Dependencies(plain, graph)
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while todo:
        ready = sorted(action for action in todo if all(needed in done for needed in needs.of(action)))
        action = rng.choice(ready)
        lists[action.stage % ranks].append(action)
        done.add(action)
        todo.remove(action)
    return Schedule("own", stages, microbatches, tuple(map(tuple, lists)))


def _can_run(made: Schedule, graph: StageGraph) -> bool:
    from weft.pipeline import validate

    try:
        validate(made, graph)
    except ValueError:
        return False
    return True
