"""A lowered schedule as text, an operation a line, and back."""

from __future__ import annotations

import re

from weft.pipeline.action import Action
from weft.pipeline.graph import StageGraph
from weft.pipeline.lowered import Lowered, Operation, Receive, Send, Transfer
from weft.pipeline.schedule import Schedule

_HEAD = re.compile(r"lowered (\S+): ([0-9]+) micro-batches, (.*)", re.ASCII)
_PART = re.compile(r"(send|receive) ([0-9]+): (.*)", re.ASCII)


def format_lowered(lowered: Lowered) -> str:
    """A line for each operation; a transfer carries its place in the order of all transfers."""
    place = {transfer: i for i, transfer in enumerate(lowered.transfers)}
    lines = [f"lowered {lowered.schedule.name}: {lowered.schedule.microbatches} micro-batches, {lowered.graph}"]
    for rank, operations in enumerate(lowered.ranks):
        lines.append(f"rank {rank}")
        for operation in operations:
            if isinstance(operation, Action):
                lines.append(f"  {operation}")
            else:
                word = "send" if isinstance(operation, Send) else "receive"
                lines.append(f"  {word} {place[operation.transfer]}: {operation.transfer}")
    return "\n".join(lines)


def parse_lowered(text: str) -> Lowered:
    """The lowered schedule that prints as `text`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    match = _HEAD.fullmatch(lines[0]) if lines else None
    if match is None:
        raise ValueError(
            f"got the lowered schedule {text[:80]!r}; expected 'lowered NAME: 4 micro-batches, 2 stages: 0->1 x' "
            f"and then 'rank 0' and its operations, one a line"
        )
    graph = StageGraph.parse(match[3])
    ranks: list[list[Operation]] = []
    sent: dict[int, Transfer] = {}
    received: dict[int, Transfer] = {}
    for line in lines[1:]:
        part = _PART.fullmatch(line)
        if line == f"rank {len(ranks)}":
            ranks.append([])
        elif not ranks:
            raise ValueError(f"got the line {line!r}; expected 'rank 0' before the first operation")
        elif part is None:
            ranks[-1].append(Action.parse(line))
        else:
            transfer = Transfer.parse(part[3])
            ends, kind = (sent, Send) if part[1] == "send" else (received, Receive)
            if int(part[2]) in ends:
                raise ValueError(f"got {line!r}, but {part[1]} {part[2]} is {ends[int(part[2])]}; expected it once")
            ends[int(part[2])] = transfer
            ranks[-1].append(kind(transfer))
    if sent != received or sorted(sent) != list(range(len(sent))):
        raise ValueError("got sends and receives that do not match; expected one of each for 0, 1, 2 and so on")
    computed = tuple(tuple(o for o in operations if isinstance(o, Action)) for operations in ranks)
    schedule = Schedule(match[1], graph.stages, int(match[2]), computed)
    return Lowered(schedule, graph, tuple(map(tuple, ranks)), tuple(sent[i] for i in range(len(sent))))
