"""Which routes tensors take between stages, where the stages live, and how tensors lie at both ends. Pure.

route     from a stage to a stage, for one tensor or its gradient
channel   a route has several; each carries one tensor at a time
message   one tensor of one micro-batch: the n-th on its route, on one of the route's channels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from weft.layout import Layout, Mesh, ShardSizes, check_ranks
from weft.pipeline.schedules.graph import Action, Kind, StageGraph
from weft.pipeline.schedules.lowered import Direction, Lowered, TensorTransfer
from weft.pipeline.schedules.schedule import Schedule

Placements = Sequence[Placement | ShardSizes]
StageLayouts = Mapping[int, Placements | Mapping[str, Placements]]


@dataclass(frozen=True, order=True)
class Route:
    """All transfers of one tensor, or of its gradient, from one stage to another.

    >>> print(Route(0, "skip", 1, 2))
    0.skip 1->2
    """

    producer: int
    tensor: str
    source: int
    target: int

    @classmethod
    def of(cls, transfer: TensorTransfer) -> Route:
        """The route that a transfer takes."""
        return cls(transfer.producer, transfer.tensor, transfer.source, transfer.target)

    @property
    def direction(self) -> Direction:
        """Forwards to a later stage, gradients to an earlier one."""
        return Direction.FORWARD if self.source < self.target else Direction.GRADIENT

    @property
    def user(self) -> int:
        """The stage that uses the tensor: where the gradient comes from."""
        return self.target if self.direction is Direction.FORWARD else self.source

    def __str__(self) -> str:
        return f"{self.producer}.{self.tensor} {self.source}->{self.target}"


@dataclass(frozen=True)
class Message:
    """One transfer's place: the n-th on its route, on which of the route's channels, and how urgent."""

    transfer: TensorTransfer
    route: Route
    number: int
    channel: int
    urgency: int


class Routes:
    """The routes of a lowered schedule, and the place of every transfer.

    A route has as many *channels* as its producer keeps micro-batches at once: so many tensors can exist that were
    sent and are not used yet. Transfer n takes channel n modulo that, and a receiver opens the channel again once the
    tensor is used. So a sender never waits for room unless the schedule itself is ahead of what it keeps.

    >>> from weft.pipeline import schedule
    >>> from weft.pipeline.schedules.lower import lower
    >>> routes = Routes(lower(schedule("1f1b", stages=2, microbatches=4)))
    >>> {str(route): count for route, count in routes.channels.items()}
    {'0.x 0->1': 2, '0.x 1->0': 2}
    """

    def __init__(self, lowered: Lowered, channels: Mapping[Route, int] | None = None) -> None:
        """`channels` are those of several schedules that run in turn, as `join` makes them; else as many as needed."""
        self.lowered = lowered
        by_route: dict[Route, list[TensorTransfer]] = {}
        for transfer in lowered.transfers:
            by_route.setdefault(Route.of(transfer), []).append(transfer)
        urgency = {transfer: i for i, transfer in enumerate(lowered.transfers)}
        place = {a: i for actions in lowered.schedule.ranks for i, a in enumerate(actions)}
        self.channels: dict[Route, int] = {}
        self.messages: dict[TensorTransfer, Message] = {}
        self.of: dict[Route, list[Message]] = {}
        for route, transfers in sorted(by_route.items()):
            # In the order in which the sender makes them: it is the same on both sides, whatever is used first.
            transfers.sort(key=lambda t: place[self.maker(t)])
            used = [place[self.first_user(t)] for t in transfers]
            keeps = lowered.schedule.peak_activations[route.producer]
            wanted = max(2, keeps) if used == sorted(used) else len(transfers)
            self.channels[route] = count = min(len(transfers), wanted) if channels is None else channels[route]
            self.of[route] = [Message(t, route, n, n % count, urgency[t]) for n, t in enumerate(transfers)]
            self.messages |= {message.transfer: message for message in self.of[route]}
        if channels is not None:
            self.channels = dict(channels)

    @cached_property
    def first_channel(self) -> dict[Route, int]:
        """Channels of all routes in one row: where each route's begin."""
        first, total = {}, 0
        for route, count in self.channels.items():
            first[route], total = total, total + count
        return first

    def channel_of(self, message: Message) -> int:
        """The number of a message's channel among those of all routes."""
        return self.first_channel[message.route] + message.channel

    def after(self, message: Message) -> Message | None:
        """The next message on the same channel, if there is one."""
        later = self.of[message.route][message.number + self.channels[message.route] :]
        return later[0] if later else None

    @cached_property
    def passed_on(self) -> dict[TensorTransfer, list[Message]]:
        """For each transfer those that its receiver makes of it: it sends the tensor on as soon as it has it."""
        found: dict[TensorTransfer, list[Message]] = {}
        arriving = {(t.producer, t.tensor, t.microbatch, t.target): t for t in self.messages if t.source < t.target}
        for message in self.messages.values():
            t = message.transfer
            brought = arriving.get((t.producer, t.tensor, t.microbatch, t.source))
            if t.direction is Direction.FORWARD and brought is not None:
                found.setdefault(brought, []).append(message)
        return found

    @property
    def total(self) -> int:
        """How many channels there are."""
        return sum(self.channels.values())

    def maker(self, transfer: TensorTransfer) -> Action:
        """The action of the sending stage after which it has the tensor, or the gradient."""
        if transfer.direction is Direction.FORWARD:
            return Action(transfer.source, Kind.FORWARD, transfer.microbatch)
        return self.lowered.schedule.gradient(transfer.source, transfer.microbatch)

    def first_user(self, transfer: TensorTransfer) -> Action:
        """The action of the receiving stage that needs it."""
        if transfer.direction is Direction.FORWARD:
            return Action(transfer.target, Kind.FORWARD, transfer.microbatch)
        return self.lowered.schedule.gradient(transfer.target, transfer.microbatch)


def join(*lowered: Lowered) -> list[Routes]:
    """The routes of several schedules that run in turn, such as training and evaluation: with channels in common."""
    channels: dict[Route, int] = {}
    for routes in map(Routes, lowered):
        for route, count in routes.channels.items():
            channels[route] = max(count, channels.get(route, 0))
    channels = dict(sorted(channels.items()))
    return [Routes(each, channels) for each in lowered]


@dataclass(frozen=True)
class RouteLayouts:
    """How a route's tensors lie where they are sent and where they are used; the name is for errors."""

    name: str
    src: Layout
    dst: Layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both sides."""
        return (*self.src.mesh.ranks, *self.dst.mesh.ranks)

    @property
    def shares_memory(self) -> bool:
        """Whether a plan may let a rank copy from the memory of another one on its host."""
        hosts = dict(zip(self.ranks, (*self.src.mesh.hosts, *self.dst.mesh.hosts), strict=True))
        places = list(hosts.values())
        return any(places.count(host) > 1 for host in self.dst.mesh.hosts)

    def announcer(self, rank: int) -> int:
        """The rank of the source that announces tensors to a rank of the destination."""
        return self.src.mesh.ranks[self.dst.mesh.ranks.index(rank) % self.src.mesh.size]

    def listeners(self, rank: int) -> tuple[int, ...]:
        """The ranks of the destination to which a rank of the source announces tensors."""
        return self.dst.mesh.ranks[self.src.mesh.ranks.index(rank) :: self.src.mesh.size]


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

    @cached_property
    def ranks_by_end(self) -> tuple[int, ...]:
        """All ranks that have a stage, those that should be through with a step last before those that end early."""
        steps = self.schedule.steps(self.graph).of
        last = [max(steps[action] for action in actions) for actions in self.schedule.ranks]
        ends = {rank: last[self.schedule.rank_of(s)] for s, mesh in enumerate(self.meshes) for rank in mesh.ranks}
        return tuple(sorted(ends, key=lambda rank: (-ends[rank], rank)))

    def layouts(self, route: Route) -> RouteLayouts:
        """How a route's tensors lie before and after."""
        made, used = self.outputs[route.producer, route.tensor], self.inputs[route.user, route.tensor]
        if route.direction is Direction.GRADIENT:
            return RouteLayouts(f"gradient of {route.tensor}", used, _without_terms(made))
        source = made if route.source == route.producer else self.inputs[route.source, route.tensor]
        return RouteLayouts(route.tensor, source, used)

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
