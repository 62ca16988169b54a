"""What stages do, which tensors go from one to another, and what must therefore come before what.

An *action* is one thing that a stage does with one micro-batch. A *graph* of stages is a chain, or a chain with long
skips. Together they say which action needs which, and so how far lists of actions get.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

CHAIN_TENSOR = "x"
_TEXT = re.compile(r"([0-9]+)([FBIW])([0-9]+)", re.ASCII)


@functools.total_ordering
class Kind(enum.Enum):
    """What is computed; sorts in the order in which a micro-batch needs it."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    __hash__ = object.__hash__  # by identity: members are single, and Enum's own hash is slow

    def __lt__(self, other: Kind) -> bool:
        return _RANKING[self] < _RANKING[other]

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the micro-batch is kept on the stage once this is done."""
        return self in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


_RANKING = {kind: i for i, kind in enumerate(Kind)}
_DOES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "gradient of the input",
    Kind.WEIGHT_GRADIENT: "gradient of the weights",
}


@dataclass(frozen=True, order=True)
class Action:
    """Stage, kind and micro-batch; prints as `2F0` and parses back.

    >>> Action(2, Kind.FORWARD, 0)
    2F0
    >>> Action.parse("3B11").microbatch
    11
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0:
            raise ValueError(f"got stage {self.stage} and micro-batch {self.microbatch}; expected both to be 0 or more")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    def in_words(self) -> str:
        """For errors.

        >>> Action(2, Kind.FORWARD, 0).in_words()
        '2F0 (stage 2, forward, micro-batch 0)'
        """
        return f"{self} (stage {self.stage}, {_DOES[self.kind]}, micro-batch {self.microbatch})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"got the action {text!r}; expected stage, F, B, I or W, and micro-batch, such as 2F0: "
                f"forward, full backward, gradient of the input, gradient of the weights"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, order=True)
class Edge:
    """A tensor that one stage makes and a later one uses.

    Edges of the same source and tensor carry the same output to several stages. `gradient` is False for what
    has none, such as a mask or token ids: nothing comes back then.

    >>> print(Edge(0, 2, "skip"))
    0->2 skip
    """

    source: int
    target: int
    tensor: str = CHAIN_TENSOR
    gradient: bool = True

    def __post_init__(self) -> None:
        if self.source < 0 or self.source >= self.target:
            raise ValueError(
                f"got an edge from stage {self.source} to stage {self.target}; expected an earlier stage (0 or "
                f"more) first; number the stages in the order in which a micro-batch passes them"
            )
        if not re.fullmatch(r"[\w.-]+", self.tensor):
            raise ValueError(f"got the tensor {self.tensor!r}; expected one word of letters, digits and . - _")

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {self.tensor}" + ("" if self.gradient else " no-gradient")

    @classmethod
    def parse(cls, text: str) -> Edge:
        """The edge that prints as `text`."""
        match = re.fullmatch(r"(\d+)->(\d+) (\S+?)( no-gradient)?", text.strip(), re.ASCII)
        if match is None:
            raise ValueError(f"got the edge {text!r}; expected one such as '0->2 skip' or '0->2 mask no-gradient'")
        return cls(int(match[1]), int(match[2]), match[3], gradient=match[4] is None)


@dataclass(frozen=True)
class StageGraph:
    """Stages 0 to `stages - 1` and the edges between them, in any number: skips, several tensors, shared outputs.

    >>> StageGraph(3, (Edge(0, 1), Edge(1, 2), Edge(0, 2, "skip"))).into(2)
    (Edge(source=0, target=2, tensor='skip', gradient=True), Edge(source=1, target=2, tensor='x', gradient=True))
    """

    stages: int
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        edges = tuple(sorted(self.edges))
        object.__setattr__(self, "edges", edges)
        if self.stages < 1:
            raise ValueError(f"got {self.stages} stages; expected at least 1")
        seen: dict[tuple[int, int, str], Edge] = {}
        with_gradient: dict[tuple[int, str], bool] = {}
        for edge in edges:
            if edge.target >= self.stages:
                raise ValueError(f"got the edge {edge}; expected stages 0 to {self.stages - 1}")
            if (edge.source, edge.target, edge.tensor) in seen:
                raise ValueError(f"got the edge {edge} twice; expected each tensor once between two stages")
            seen[edge.source, edge.target, edge.tensor] = edge
            if with_gradient.setdefault((edge.source, edge.tensor), edge.gradient) != edge.gradient:
                raise ValueError(
                    f"got {edge.tensor} of stage {edge.source} once with and once without a gradient; "
                    f"expected the same for all its users"
                )

    def into(self, stage: int) -> tuple[Edge, ...]:
        """The edges that end at the stage."""
        return self._into.get(stage, ())

    def out_of(self, stage: int) -> tuple[Edge, ...]:
        """The edges that begin at the stage."""
        return self._out_of.get(stage, ())

    @cached_property
    def _into(self) -> dict[int, tuple[Edge, ...]]:
        return {s: tuple(e for e in self.edges if e.target == s) for s in range(self.stages)}

    @cached_property
    def _out_of(self) -> dict[int, tuple[Edge, ...]]:
        return {s: tuple(e for e in self.edges if e.source == s) for s in range(self.stages)}

    def __str__(self) -> str:
        return f"{self.stages} stages: " + (", ".join(map(str, self.edges)) or "no edges")

    @classmethod
    def parse(cls, text: str) -> StageGraph:
        """The graph that prints as `text`.

        >>> graph = StageGraph.parse("3 stages: 0->1 x, 0->2 skip, 1->2 x")
        >>> StageGraph.parse(str(graph)) == graph
        True
        """
        head, colon, body = text.partition(" stages: ")
        if not (colon and head.strip().isdigit()):
            raise ValueError(f"got the graph {text!r}; expected one such as '2 stages: 0->1 x'")
        edges = () if body.strip() == "no edges" else tuple(Edge.parse(edge) for edge in body.split(","))
        return cls(int(head), edges)


def chain(stages: int) -> StageGraph:
    """Each stage gives one tensor to the next.

    >>> print(chain(3))
    3 stages: 0->1 x, 1->2 x
    """
    return StageGraph(stages, tuple(Edge(stage, stage + 1) for stage in range(stages - 1)))


@dataclass(frozen=True)
class Steps:
    """When each action runs if each takes one step and transfers take none.

    of:    the step of each action that can run
    stuck: for each rank that cannot finish, the action that it is stuck at
    """

    of: dict[Action, int]
    stuck: dict[int, Action]

    @cached_property
    def count(self) -> int:
        """How many steps there are."""
        return max(self.of.values(), default=-1) + 1


class Dependencies:
    """What must have been done before an action, by the lists of the ranks and the stage graph."""

    def __init__(self, ranks: Sequence[Sequence[Action]], graph: StageGraph) -> None:
        actions = (action for rank in ranks for action in rank)
        self._split = {(a.stage, a.microbatch) for a in actions if a.kind is Kind.INPUT_GRADIENT}
        self._sources = {s: sorted({e.source for e in graph.into(s)}) for s in range(graph.stages)}
        self._users = {s: sorted({e.target for e in graph.out_of(s) if e.gradient}) for s in range(graph.stages)}

    def of(self, action: Action) -> list[Action]:
        """The actions that this one needs: of its own stage and of its neighbours in the graph."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return [Action(source, Kind.FORWARD, microbatch) for source in self._sources[stage]]
        if action.kind is Kind.WEIGHT_GRADIENT:
            return [Action(stage, Kind.INPUT_GRADIENT, microbatch)]
        return [
            Action(stage, Kind.FORWARD, microbatch),
            *(self._gradient(user, microbatch) for user in self._users[stage]),
        ]

    def _gradient(self, stage: int, microbatch: int) -> Action:
        """The action of the stage that makes the gradient of its input."""
        return Action(stage, Kind.INPUT_GRADIENT if (stage, microbatch) in self._split else Kind.BACKWARD, microbatch)


def run_in_steps(ranks: Sequence[Sequence[Action]], graph: StageGraph) -> Steps:
    """Runs the lists of the ranks in equal steps, as far as they go."""
    dependencies = Dependencies(ranks, graph)
    done: dict[Action, int] = {}
    next_of = [0] * len(ranks)
    step = 0
    while True:
        ran = []
        for rank, actions in enumerate(ranks):
            if next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                if all(needed in done for needed in dependencies.of(action)):
                    ran.append((rank, action))
        if not ran:
            break
        for rank, action in ran:  # after the loop above, so that a step sees only what earlier steps have done
            done[action] = step
            next_of[rank] += 1
        step += 1
    stuck = {r: a[next_of[r]] for r, a in enumerate(ranks) if next_of[r] < len(a)}
    return Steps(done, stuck)
