"""The plan of a reshard: a frozen value that prints, parses back, and knows its bound.

print(plan)             every stream and chunk, as a table
Plan.parse(str(plan))   the same plan
plan.lower_bound        seconds of the busiest card under the best choice of senders
plan.bytes_by_card      what enters and leaves each host
plan.simulate()         the timeline that the executor is expected to make
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.cluster import Cluster
from weft.layout import Box, Ints, Mesh
from weft.reshard.chunks import Chunks, Hops
from weft.reshard.units import Streams, TensorSpec, Units
from weft.timeline import Timeline


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
    cluster: Cluster
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
        from weft.reshard.text import header

        state = hashlib.sha256("\n".join(header(self)).encode())
        for column in (*self._columns(), self.hops.adds.astype(np.int64)):
            state.update(np.ascontiguousarray(column, "<i8").tobytes())
        return state.hexdigest()

    def _columns(self) -> tuple[Ints, ...]:
        c, h = self.chunks, self.hops
        return (c.stream, c.start, c.stop, h.chunk, h.sender, h.receiver)

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
        return {rank: host for mesh in self.meshes for rank, host in zip(mesh.ranks, mesh.hosts, strict=True)}

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
        columns = (column.tolist() for column in (self.chunks.stream, self.chunks.start, self.chunks.stop))
        return list(zip(*columns, strict=True))

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
        from weft.reshard.simulate import simulate

        return simulate(self).timeline(self)

    @cached_property
    def seconds(self) -> float:
        """The predicted time, from the same simulation."""
        from weft.reshard.simulate import simulate

        return simulate(self).seconds

    def __str__(self) -> str:
        from weft.reshard.text import format_plan

        return format_plan(self)

    def __repr__(self) -> str:
        return (
            f"<Plan {self.strategy}: {len(self.tensors)} tensors, {self.nbytes} bytes, {len(self.chunks)} chunks, "
            f"bound {self.lower_bound:.6g} s, digest {self.digest[:12]}>"
        )

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that prints as `text`."""
        from weft.reshard.text import parse_plan

        return parse_plan(text)
