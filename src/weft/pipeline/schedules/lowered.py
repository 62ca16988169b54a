"""A schedule with its sends and receives: what every rank does, in order. A value that prints and parses back."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property

from weft.pipeline.schedules.graph import Action, Edge, StageGraph
from weft.pipeline.schedules.schedule import Schedule

_HEAD = re.compile(r"lowered (\S+): ([0-9]+) micro-batches, (.*)", re.ASCII)
_PART = re.compile(r"(send|receive) ([0-9]+): (.*)", re.ASCII)
_TRANSFER = re.compile(r"([0-9]+)\.([\w.-]+)#([0-9]+) ([0-9]+)->([0-9]+)", re.ASCII)


class Direction(enum.Enum):
    """What a transfer carries."""

    FORWARD = "forward"  # the tensor
    GRADIENT = "gradient"  # its gradient, back to the stage that made the tensor


@dataclass(frozen=True, order=True)
class TensorTransfer:
    """One tensor of one micro-batch, or its gradient, from a stage to another one.

    The tensor `skip` of stage 0 and micro-batch 3, sent on to stage 2 by stage 1, which had it already, and the
    gradient that comes back:

    >>> print(TensorTransfer(0, "skip", 3, 1, 2), "|", TensorTransfer(0, "skip", 3, 2, 0))
    0.skip#3 1->2 | 0.skip#3 2->0
    >>> TensorTransfer.parse("0.skip#3 2->0").direction
    <Direction.GRADIENT: 'gradient'>

    producer:   the stage that made the tensor
    tensor:     its name there
    microbatch: of which micro-batch
    source:     the stage that sends: forwards the producer or an earlier user; for a gradient the user
    target:     the stage that receives: a user; for a gradient the producer
    """

    producer: int
    tensor: str
    microbatch: int
    source: int
    target: int

    @property
    def direction(self) -> Direction:
        """Forwards to a later stage, gradients to an earlier one."""
        return Direction.FORWARD if self.source < self.target else Direction.GRADIENT

    def __str__(self) -> str:
        return f"{self.producer}.{self.tensor}#{self.microbatch} {self.source}->{self.target}"

    @classmethod
    def parse(cls, text: str) -> TensorTransfer:
        """The transfer that prints as `text`."""
        match = _TRANSFER.fullmatch(text)
        if match is None:
            raise ValueError(f"got the transfer {text!r}; expected PRODUCER.TENSOR#MICROBATCH FROM->TO, as 0.x#3 0->1")
        return cls(int(match[1]), match[2], int(match[3]), int(match[4]), int(match[5]))


@dataclass(frozen=True)
class Send:
    """The rank's part of a transfer from one of its stages; it may begin as soon as the tensor exists."""

    transfer: TensorTransfer


@dataclass(frozen=True)
class Receive:
    """The rank's part of a transfer to one of its stages; it is posted here, and waited for where it is needed."""

    transfer: TensorTransfer


Operation = Action | Send | Receive


@dataclass(frozen=True)
class Lowered:
    """What each rank does, with the transfers in the order in which cards should take them.

    Two ways to run it cannot hang: each rank does its list in order and waits for every transfer before its next
    action; or actions run in order, and transfers beside them, those of a rank in the order of `transfers`. Any
    order in which a rank takes the first of `transfers` that is ready is as good.

    schedule, graph: what was lowered
    ranks:           the actions of the schedule with sends and receives between them
    transfers:       all of them, in order
    """

    schedule: Schedule
    graph: StageGraph
    ranks: tuple[tuple[Operation, ...], ...]
    transfers: tuple[TensorTransfer, ...]

    def supplier(self, edge: Edge, microbatch: int) -> int:
        """The stage that hands the tensor to the edge's target.

        It is on the target's own rank if that has the tensor anyway, as its producer or for another of its
        stages: nothing is sent then.
        """
        transfer = self._into.get((edge.source, edge.tensor, microbatch, edge.target))
        return self._on_same_rank(edge, microbatch) if transfer is None else transfer.source

    @cached_property
    def _into(self) -> dict[tuple[int, str, int, int], TensorTransfer]:
        forwards = (t for t in self.transfers if t.direction is Direction.FORWARD)
        return {(t.producer, t.tensor, t.microbatch, t.target): t for t in forwards}

    def _on_same_rank(self, edge: Edge, microbatch: int) -> int:
        rank = self.schedule.rank_of(edge.target)
        if self.schedule.rank_of(edge.source) == rank:
            return edge.source
        return next(
            stage
            for stage in self.schedule.stages_of(rank)
            if (edge.source, edge.tensor, microbatch, stage) in self._into
        )

    def __str__(self) -> str:
        """A line for each operation; a transfer carries its place in the order of all transfers."""
        place = {transfer: i for i, transfer in enumerate(self.transfers)}
        lines = [f"lowered {self.schedule.name}: {self.schedule.microbatches} micro-batches, {self.graph}"]
        for rank, operations in enumerate(self.ranks):
            lines.append(f"rank {rank}")
            for operation in operations:
                if isinstance(operation, Action):
                    lines.append(f"  {operation}")
                else:
                    word = "send" if isinstance(operation, Send) else "receive"
                    lines.append(f"  {word} {place[operation.transfer]}: {operation.transfer}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Lowered {self.schedule.name}: {len(self.ranks)} ranks, {len(self.transfers)} transfers>"

    @classmethod
    def parse(cls, text: str) -> Lowered:
        """What prints as `text`."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        match = _HEAD.fullmatch(lines[0]) if lines else None
        if match is None:
            raise ValueError(
                f"got the lowered schedule {text[:80]!r}; expected 'lowered NAME: 4 micro-batches, 2 stages: 0->1 x' "
                f"and then 'rank 0' and its operations, one a line"
            )
        graph = StageGraph.parse(match[3])
        ranks: list[list[Operation]] = []
        sent: dict[int, TensorTransfer] = {}
        received: dict[int, TensorTransfer] = {}
        for line in lines[1:]:
            part = _PART.fullmatch(line)
            if line == f"rank {len(ranks)}":
                ranks.append([])
            elif not ranks:
                raise ValueError(f"got the line {line!r}; expected 'rank 0' before the first operation")
            elif part is None:
                ranks[-1].append(Action.parse(line))
            else:
                transfer = TensorTransfer.parse(part[3])
                ends, kind = (sent, Send) if part[1] == "send" else (received, Receive)
                if int(part[2]) in ends:
                    raise ValueError(f"got {line!r}, but {part[1]} {part[2]} is {ends[int(part[2])]}; expected it once")
                ends[int(part[2])] = transfer
                ranks[-1].append(kind(transfer))
        if sent != received or sorted(sent) != list(range(len(sent))):
            raise ValueError("got sends and receives that do not match; expected one of each for 0, 1, 2 and so on")
        computed = tuple(tuple(o for o in operations if isinstance(o, Action)) for operations in ranks)
        schedule = Schedule(match[1], graph.stages, int(match[2]), computed)
        return cls(schedule, graph, tuple(map(tuple, ranks)), tuple(sent[i] for i in range(len(sent))))
