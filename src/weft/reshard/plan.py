"""The plan of a reshard: a frozen value that prints, parses back, and knows its bound.

    print(plan)             every stream and chunk, as a table
    Plan.parse(str(plan))   the same plan
    plan.lower_bound        seconds of the busiest card under the best choice of senders
    plan.bytes_by_card      what enters and leaves each host
    plan.simulate()         the timeline that the executor is expected to make

In the text `0>8` sends, `0+4` sends to a rank that adds its own term, `2=` shares with the other ranks of the host.
Units and streams follow from the header, so only chunks and hops are read back; streams are printed for the reader.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from weft.layout import Box, DeclaredCluster, Ints, Layout, Mesh, format_ints
from weft.reshard.order import Chunks, Hops
from weft.reshard.senders import lower_bound
from weft.reshard.simulate import simulate
from weft.reshard.spec import STRATEGIES, TensorSpec, hosts_by_rank
from weft.reshard.units import Streams, Units, find_units
from weft.timeline import Timeline
from weft.timeline.text import format_bytes, format_seconds


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave and enter a host's network card."""

    out: int
    into: int


@dataclass(frozen=True, eq=False)
class Plan:
    """How some tensors get from their source layouts to their destination layouts.

    tensors, cluster, strategy: what was asked
    chunk_bytes: the size that no chunk exceeds by more than a rounding
    lower_bound: seconds that no plan can go below
    units, streams: the boxes, and those that go together as bytes
    chunks, hops: what is sent, in order, and from rank to rank
    """

    tensors: tuple[TensorSpec, ...]
    cluster: DeclaredCluster
    strategy: str
    chunk_bytes: int
    lower_bound: float
    units: Units
    streams: Streams
    chunks: Chunks
    hops: Hops

    @cached_property
    def digest(self) -> str:
        """A hash of all that the plan says; ranks with the same digest will do the same."""
        state = hashlib.sha256("\n".join(header(self)).encode())
        hops = self.hops
        for column in (*self.chunks.columns, hops.chunk, hops.sender, hops.receiver, hops.adds):
            state.update(np.ascontiguousarray(column, "<i8").tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """All meshes of the layouts, each once."""
        return tuple(dict.fromkeys(layout.mesh for tensor in self.tensors for layout in (tensor.src, tensor.dst)))

    @cached_property
    def host_of(self) -> dict[int, int]:
        """The host of each rank of the meshes."""
        return hosts_by_rank(self.tensors)

    def boxes_of(self, rank: int, side: str) -> dict[int, Box]:
        """Where a rank's shard of each tensor lies on one side ("src" or "dst"), by index; only those that it has."""
        if (rank, side) not in self._boxes:
            layouts = ((i, spec.shape, getattr(spec, side)) for i, spec in enumerate(self.tensors))
            self._boxes[rank, side] = {i: at.box(shape, rank) for i, shape, at in layouts if rank in at.mesh.ranks}
        return self._boxes[rank, side]

    @cached_property
    def _boxes(self) -> dict[tuple[int, str], dict[int, Box]]:
        return {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the meshes."""
        return tuple(sorted(self.host_of))

    @cached_property
    def hop_hosts(self) -> tuple[Ints, Ints]:
        """The sender's and the receiver's host of each hop."""
        table = np.zeros(max(self.host_of, default=0) + 1, np.int64)
        table[list(self.host_of)] = list(self.host_of.values())
        return table[self.hops.sender], table[self.hops.receiver]

    @cached_property
    def hop_bytes(self) -> Ints:
        """The size of each hop."""
        return (self.chunks.stop - self.chunks.start)[self.hops.chunk]

    @cached_property
    def chunk_rows(self) -> list[tuple[int, int, int]]:
        """(stream, start, stop) of each chunk, as plain numbers."""
        return list(zip(*(column.tolist() for column in self.chunks.columns), strict=True))

    @cached_property
    def bytes_by_card(self) -> dict[int, Traffic]:
        """What each host's card carries; bytes that stay on a host are on none."""
        a, b = self.hop_hosts
        size = np.where(a == b, 0, self.hop_bytes)
        out, into = (np.bincount(hosts, weights=size, minlength=self.cluster.hosts) for hosts in (a, b))
        return {host: Traffic(int(out[host]), int(into[host])) for host in range(self.cluster.hosts)}

    @property
    def nbytes(self) -> int:
        """The size of all tensors on the wire, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def simulate(self) -> Timeline:
        """What the executor is expected to do: a lane for each direction of each card."""
        return simulate(self).timeline(self)

    @cached_property
    def seconds(self) -> float:
        """The predicted time, from the same simulation."""
        return simulate(self).seconds

    def __str__(self) -> str:
        return format_plan(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.strategy}: {len(self.tensors)} tensors, {self.nbytes} bytes, {len(self.chunks)} chunks, "
            f"bound {self.lower_bound:.6g} s, digest {self.digest[:12]}>"
        )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that prints as `text`."""
        return parse_plan(text)


_TENSOR = re.compile(r'tensor (".*") \[([\d,]*)\] (\w+) (\w+):(\S*) -> (\w+):(\S*) as (\w+)')
_CHUNK = re.compile(r"(\d+)(?:-(\d+))? +stream (\d+) +(\d+):(\d+)(?: by (\d+))?((?: +\d+(?:[>+]\d+|=))*)")
_HOP = re.compile(r"(\d+)(?:([>+])(\d+)|=)")


def header(plan: Plan) -> list[str]:
    """What was asked: the lines from which the units follow."""
    names = {mesh: f"M{i}" for i, mesh in enumerate(plan.meshes)}
    lines = [f"reshard plan {plan.strategy}, chunks of {plan.chunk_bytes} bytes", f"cluster {plan.cluster}"]
    lines += [f"mesh {name} {mesh}" for mesh, name in names.items()]
    for tensor in plan.tensors:
        sides = [f"{names[x.mesh]}:{x.notation(len(tensor.shape))}" for x in (tensor.src, tensor.dst)]
        shape = ",".join(map(str, tensor.shape))
        types = [str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, tensor.dst_dtype)]
        what = f"tensor {json.dumps(tensor.name)} [{shape}] {types[0]}"
        lines.append(f"{what} {sides[0]} -> {sides[1]} as {types[1]}")
    return lines


def format_plan(plan: Plan) -> str:
    """The whole plan."""
    streams = [_stream_line(plan.streams, i) for i in range(len(plan.streams))]
    return "\n".join([*header(plan), bound_line(plan), *streams, *_chunk_lines(plan)]) + "\n"


def bound_line(plan: Plan) -> str:
    """What no plan can go below, and what this one loads the busiest cards with."""
    out, into = (max(getattr(t, way) for t in plan.bytes_by_card.values()) for way in ("out", "into"))
    return f"bound {format_seconds(plan.lower_bound)}; busiest card out {format_bytes(out)}, in {format_bytes(into)}"


def _stream_line(streams: Streams, i: int) -> str:
    terms = " + ".join(format_ints(ranks) for ranks in streams.holder_sets[streams.holders[i]])
    takers = format_ints(streams.taker_sets[streams.takers[i]])
    dtype = str(streams.kinds[streams.kind[i]][0]).removeprefix("torch.")
    return f"stream {i}: {streams.nbytes[i]} bytes of {dtype}, from {terms} to {takers}"


def _hop_texts(plan: Plan) -> list[str]:
    """For each chunk its hops."""
    texts = [""] * len(plan.chunks)
    hops = plan.hops
    columns = (x.tolist() for x in (hops.chunk, hops.sender, hops.receiver, hops.adds))
    for chunk, a, b, adds in zip(*columns, strict=True):
        texts[chunk] += f"  {a}=" if a == b else f"  {a}{'+' if adds else '>'}{b}"
    return texts


def _chunk_lines(plan: Plan) -> Iterator[str]:
    """One line for each run of chunks that go the same way and lie end to end."""
    texts = _hop_texts(plan)
    rows = plan.chunk_rows
    i = 0
    while i < len(rows):
        stream, start, stop = rows[i]
        size, j = stop - start, i + 1
        while j < len(rows) and rows[j][:2] == (stream, stop) and texts[j] == texts[i] and rows[j][2] - stop <= size:
            stop = rows[j][2]
            j += 1
            if rows[j - 1][2] - rows[j - 1][1] < size:
                break
        number = f"{i}-{j - 1}" if j > i + 1 else str(i)
        step = f" by {size}" if j > i + 1 else ""
        yield f"{number:<9} stream {stream:<5} {start}:{stop}{step}{texts[i]}"
        i = j


def parse_plan(text: str) -> Plan:
    """The plan that `format_plan` wrote."""
    lines = text.splitlines()
    found = re.fullmatch(r"reshard plan (\w+), chunks of (\d+) bytes", lines[0] if lines else "")
    if not found or found[1] not in STRATEGIES or len(lines) < 2:
        raise _bad(1, lines[0] if lines else "", "reshard plan optimal, chunks of 65536 bytes")
    if not lines[1].startswith("cluster "):
        raise _bad(2, lines[1], f"cluster {DeclaredCluster((1.0, 1.0))}")
    cluster = DeclaredCluster.parse(lines[1].removeprefix("cluster "))
    meshes: dict[str, Mesh] = {}
    tensors: list[TensorSpec] = []
    rows: list[tuple[int, int, int]] = []
    hops: list[tuple[int, int, int, bool]] = []
    for number, line in enumerate(lines[2:], start=3):
        if line.startswith("mesh "):
            _, name, mesh = line.split(" ", 2)
            meshes[name] = Mesh.parse(mesh)
        elif line.startswith("tensor "):
            tensors.append(_parse_tensor(number, line, meshes))
        elif not line.startswith(("stream ", "bound ")):
            _parse_chunks(number, line, rows, hops)
    units, streams = find_units(tensors, each_taker=STRATEGIES[found[1]].each_taker)
    chunks = Chunks(*np.array(rows, np.int64).reshape(-1, 3).T)
    chunk, sender, receiver, adds = np.array(hops, np.int64).reshape(-1, 4).T
    bound, ways = lower_bound(tensors, cluster), Hops(chunk, sender, receiver, adds.astype(bool))
    return Plan(tuple(tensors), cluster, found[1], int(found[2]), bound, units, streams, chunks, ways)


def _parse_tensor(number: int, line: str, meshes: dict[str, Mesh]) -> TensorSpec:
    found = _TENSOR.fullmatch(line)
    if not found or found[4] not in meshes or found[6] not in meshes:
        raise _bad(number, line, 'tensor "w" [1024,64] float32 M0:S0R -> M1:RS0 as float32')
    name, shape, dtype, src_mesh, src, dst_mesh, dst, dst_dtype = found.groups()
    sizes = tuple(int(size) for size in shape.split(",")) if shape else ()
    before, after = Layout.parse(meshes[src_mesh], src), Layout.parse(meshes[dst_mesh], dst)
    return TensorSpec(json.loads(name), sizes, getattr(torch, dtype), before, after, getattr(torch, dst_dtype))


def _parse_chunks(
    number: int, line: str, rows: list[tuple[int, int, int]], hops: list[tuple[int, int, int, bool]]
) -> None:
    found = _CHUNK.fullmatch(line)
    if not found or int(found[1]) != len(rows):
        raise _bad(number, line, f"chunk {len(rows)}, such as '{len(rows)} stream 0 0:4096  0>8  8>12'")
    stream, start, stop = (int(found[k]) for k in (3, 4, 5))
    step = int(found[6] or stop - start)
    way = [(int(a), int(b or a), mark == "+") for a, mark, b in _HOP.findall(found[7])]
    for low in range(start, stop, step) if step else [start]:
        hops.extend((len(rows), *hop) for hop in way)
        rows.append((stream, low, min(low + step, stop)))


def _bad(number: int, line: str, expected: str) -> ValueError:
    return ValueError(f"line {number} of the plan is {line!r}, expected {expected}")
