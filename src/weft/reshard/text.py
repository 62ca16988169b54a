"""A plan as text that a person reads and `parse_plan` reads back.

Units and streams follow from the header, so only chunks and hops are read; streams are printed for the reader.
`0>8` sends, `0+4` sends to a rank that adds its own term, `2=` shares with the other ranks of the host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.cluster import Cluster
from weft.layout import Layout, Mesh, format_ints
from weft.reshard.chunks import Chunks, Hops
from weft.reshard.units import Streams, TensorSpec, find_units
from weft.timeline.text import format_bytes, format_seconds

if TYPE_CHECKING:
    from weft.reshard.plan import Plan

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
    out, into = (max(getattr(t, way) for t in plan.bytes_by_card.values()) for way in ("out", "into"))
    bound = f"bound {format_seconds(plan.lower_bound)}; busiest card out {format_bytes(out)}, in {format_bytes(into)}"
    streams = [_stream_line(plan.streams, i) for i in range(len(plan.streams))]
    return "\n".join([*header(plan), bound, *streams, *_chunk_lines(plan)]) + "\n"


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
    rows = list(zip(*(x.tolist() for x in (plan.chunks.stream, plan.chunks.start, plan.chunks.stop)), strict=True))
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
    from weft.reshard.plan import Plan
    from weft.reshard.planner import STRATEGIES, lower_bound

    lines = text.splitlines()
    found = re.fullmatch(r"reshard plan (\w+), chunks of (\d+) bytes", lines[0] if lines else "")
    if not found or found[1] not in STRATEGIES or len(lines) < 2:
        raise _bad(1, lines[0] if lines else "", "reshard plan optimal, chunks of 65536 bytes")
    if not lines[1].startswith("cluster "):
        raise _bad(2, lines[1], f"cluster {Cluster((1.0, 1.0))}")
    cluster = Cluster.parse(lines[1].removeprefix("cluster "))
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
    chunk_columns = np.array(rows, np.int64).reshape(-1, 3).T
    hop_columns = np.array(hops, np.int64).reshape(-1, 4).T
    chunks = Chunks(*chunk_columns)
    hop_table = Hops(hop_columns[0], hop_columns[1], hop_columns[2], hop_columns[3].astype(bool))
    bound = lower_bound(tensors, cluster)
    return Plan(tuple(tensors), cluster, found[1], int(found[2]), bound, units, streams, chunks, hop_table)


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
