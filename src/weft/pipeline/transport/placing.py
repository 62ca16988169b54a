"""Where stages live and how tensors lie between them: checks and layouts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from weft.layout import Layout, Mesh, ShardSizes, check_ranks
from weft.pipeline.predict.lowered import Direction
from weft.pipeline.schedules.graph import StageGraph
from weft.pipeline.schedules.schedule import Schedule
from weft.pipeline.transport.channel import Way
from weft.pipeline.transport.routes import Route

Placements = Sequence[Placement | ShardSizes]
StageLayouts = Mapping[int, Placements | Mapping[str, Placements]]


@dataclass(frozen=True)
class Placing:
    """The mesh of each stage, and the layout of what enters and leaves it.

    inputs, outputs: by stage and tensor; replicated where nothing is said
    """

    schedule: Schedule
    graph: StageGraph
    meshes: tuple[Mesh, ...]
    inputs: Mapping[tuple[int, str], Layout]
    outputs: Mapping[tuple[int, str], Layout]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        graph: StageGraph,
        meshes: Sequence[Mesh],
        input_layouts: StageLayouts | None = None,
        output_layouts: StageLayouts | None = None,
    ) -> Placing:
        """Checks all that can be checked before anything runs."""
        check_graph(schedule, graph)
        check_meshes(schedule, meshes)
        into = {(e.target, e.tensor) for e in graph.edges}
        out_of = {(e.source, e.tensor) for e in graph.edges}
        inputs = _layouts("input_layouts", into, meshes, input_layouts or {})
        outputs = _layouts("output_layouts", out_of, meshes, output_layouts or {})
        placing = cls(schedule, graph, tuple(meshes), inputs, outputs)
        placing._check_neighbours()
        return placing

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """The ranks of a stage's mesh."""
        return self.meshes[stage].ranks

    def schedule_rank(self, rank: int) -> int | None:
        """Which of the schedule's lists a rank runs; None for one that is in no mesh."""
        for stage, mesh in enumerate(self.meshes):
            if rank in mesh.ranks:
                return self.schedule.rank_of(stage)
        return None

    def way(self, route: Route) -> Way:
        """How a route's tensors lie before and after."""
        made, used = self.outputs[route.producer, route.tensor], self.inputs[route.user, route.tensor]
        if route.direction is Direction.GRADIENT:
            return Way(f"gradient of {route.tensor}", used, _without_terms(made))
        source = made if route.source == route.producer else self.inputs[route.source, route.tensor]
        return Way(route.tensor, source, used)

    def _check_neighbours(self) -> None:
        """What stays on a rank is handed over as it is."""
        for edge in self.graph.edges:
            there = [self.outputs[edge.source, edge.tensor]] if self._together(edge.source, edge.target) else []
            there += [
                self.inputs[other.target, edge.tensor]
                for other in self.graph.out_of(edge.source)
                if other.tensor == edge.tensor and self._together(other.target, edge.target)
            ]
            here = self.inputs[edge.target, edge.tensor]
            for layout in there:
                if layout != here:
                    raise ValueError(
                        f"edge {edge} ends as {here.placements}, but the tensor lies as {layout.placements} on the "
                        f"same ranks; expected the same placements, as nothing is sent there"
                    )

    def _together(self, a: int, b: int) -> bool:
        return self.schedule.rank_of(a) == self.schedule.rank_of(b)

    def __str__(self) -> str:
        lines = [str(self.schedule), str(self.graph)]
        lines += [f"stage {stage}: {mesh}" for stage, mesh in enumerate(self.meshes)]
        for side, layouts in (("in", self.inputs), ("out", self.outputs)):
            lines += [
                f"{side} {stage} {name}: {layout.placements}" for (stage, name), layout in sorted(layouts.items())
            ]
        return "\n".join(lines)


def as_mesh(given: Any, hosts: Mapping[int, int]) -> Mesh:
    """A mesh from a Mesh, a DeviceMesh, a rank, or nested lists of ranks; `hosts` is where each rank runs."""
    if isinstance(given, Mesh):
        return given
    ranks = given.mesh.tolist() if isinstance(given, DeviceMesh) else [given] if isinstance(given, int) else given
    axes = (given.mesh_dim_names or ()) if isinstance(given, DeviceMesh) else ()
    return Mesh.of(ranks, hosts=_hosts(ranks, hosts), axes=axes)


def _hosts(ranks: Any, hosts: Mapping[int, int]) -> Any:
    if isinstance(ranks, int):
        check_ranks([ranks], hosts)
        return hosts[ranks]
    return [_hosts(each, hosts) for each in ranks]


def check_meshes(schedule: Schedule, meshes: Sequence[Mesh]) -> None:
    """One mesh for each stage: the same for stages of one rank of the schedule, disjoint ones for others."""
    if len(meshes) != schedule.stages:
        raise ValueError(f"got {len(meshes)} meshes, expected one for each of the {schedule.stages} stages")
    for a in range(schedule.stages):
        for b in range(a + 1, schedule.stages):
            shared = sorted(set(meshes[a].ranks) & set(meshes[b].ranks))
            if schedule.rank_of(a) == schedule.rank_of(b):
                if meshes[a] != meshes[b]:
                    raise ValueError(
                        f"stages {a} and {b} are on the same rank of the schedule, but their meshes are {meshes[a]} "
                        f"and {meshes[b]}; expected the same mesh"
                    )
            elif shared:
                raise ValueError(
                    f"stages {a} and {b} are on different ranks of the schedule, but their meshes share the ranks "
                    f"{shared}; expected ranks of their own; use a schedule that puts both on one, such as "
                    f"interleaved-1f1b, or other meshes"
                )


def check_graph(schedule: Schedule, graph: StageGraph) -> None:
    """Every stage is of use, and its inputs can be told apart."""
    if graph.stages != schedule.stages:
        raise ValueError(f"edges are for {graph.stages} stages, the schedule for {schedule.stages}; expected the same")
    for stage in range(graph.stages):
        names = [edge.tensor for edge in graph.into(stage)]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(
                f"stage {stage} gets {doubled[0]!r} from several stages, expected different names, by which its module "
                f"is called; rename the tensor in one of them"
            )
        if stage < graph.stages - 1 and not graph.out_of(stage):
            raise ValueError(
                f"no edge begins at stage {stage}, expected one, since only the last stage has the loss; add an edge, "
                f"or leave the stage out"
            )


def _layouts(
    what: str, wanted: set[tuple[int, str]], meshes: Sequence[Mesh], given: StageLayouts
) -> dict[tuple[int, str], Layout]:
    found = {(stage, name): Layout(meshes[stage], (Replicate(),) * len(meshes[stage].shape)) for stage, name in wanted}
    for stage, placements in given.items():
        names = sorted(name for number, name in wanted if number == stage)
        by_name = placements if isinstance(placements, Mapping) else dict.fromkeys(names, placements)
        for name, each in by_name.items():
            if (stage, name) not in wanted:
                raise ValueError(f"{what} has {name!r} of stage {stage}, expected one of {names}, which its edges name")
            found[stage, name] = Layout(meshes[stage], tuple(each))
    if what == "input_layouts":
        for (stage, name), layout in found.items():
            if layout.partial_axes:
                raise ValueError(
                    f"{what} has {layout.placements} for {name!r} of stage {stage}, expected Shard or Replicate: a "
                    f"tensor can be read from terms, but not be made into them"
                )
    return found


def _without_terms(layout: Layout) -> Layout:
    """The layout of the gradient: every term of a sum has the whole one."""
    placements = [Replicate() if isinstance(p, Partial) else p for p in layout.placements]
    return Layout(layout.mesh, tuple(placements), layout.order)
