"""Which tensors go from which stage to which: a chain, or a chain with long skips."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

CHAIN_TENSOR = "x"


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
