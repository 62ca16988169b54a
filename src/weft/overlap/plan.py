"""What an overlapped matmul will do, as a value that prints and parses back.

matmul_reduce_scatter m=2048 n=3072 k=768 dtype=float32 hosts=0,1 transport=windows axis=rows tile=48x512 groups=4,9,8
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

from weft.kernels.tiles import Tiling
from weft.overlap.blocks import Axis, Cut, Topology, chunk_bounds, cut_cols, cut_rows, rows_by_destination

if TYPE_CHECKING:
    from weft.overlap.speeds import Curves
    from weft.timeline import Timeline


class Op(str, Enum):
    """The four ops, and the gather that is the backward pass of the fourth."""

    ALL_GATHER = "all_gather_matmul"
    REDUCE_SCATTER = "matmul_reduce_scatter"
    ALL_REDUCE = "matmul_all_reduce"
    ALL_TO_ALL = "matmul_all_to_all"
    GATHER_BACK = "all_to_all_matmul"

    @property
    def gathers(self) -> bool:
        """Whether the matmul's input travels; else its output does."""
        return self in (Op.ALL_GATHER, Op.GATHER_BACK)


class Transport(str, Enum):
    """Windows between the ranks of one host and messages between hosts; or messages everywhere."""

    WINDOWS = "windows"
    MESSAGES = "messages"


# The dimensions in which ranks may differ: columns of w where those are sharded, summed columns where those are.
_OWN_DIMS = {
    Op.ALL_GATHER: ("n",),
    Op.REDUCE_SCATTER: ("k",),
    Op.ALL_REDUCE: ("k",),
    Op.ALL_TO_ALL: ("m", "k"),
    Op.GATHER_BACK: ("m", "n"),
}


def shared_dims(op: Op, *, m: int, n: int, k: int) -> tuple[int, ...]:
    """(m, n, k) with 0 for those in which ranks may differ."""
    return tuple(0 if name in _OWN_DIMS[op] else size for name, size in (("m", m), ("n", n), ("k", k)))


_SYNTAX = re.compile(
    r"(?P<op>\w+) m=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) dtype=(?P<dtype>\w+) hosts=(?P<hosts>[\d,]+) "
    r"transport=(?P<transport>\w+) axis=(?P<axis>\w+) tile=(?P<tile_m>\d+)x(?P<tile_n>\d+) "
    r"groups=(?P<groups>[\d,]+|sequential)(?: predicted=(?P<predicted>[\d.e+-]+))?(?: # (?P<reason>.*))?"
)


@dataclass(frozen=True)
class OverlapPlan:
    """How one op computes [m, k] x [n, k]^T and communicates meanwhile.

    `groups` are relative sizes: of the blocks of the output, in the order of computing, where that travels; of the
    chunks of each shard where the input travels. No groups is the sequential plan: everything is computed, then sent
    (or received, then computed). `hosts` fixes the order of sums: ranks in order inside a host, then hosts in order,
    whatever the other fields say, so that every plan gives the same bits. `reason` and `predicted`, seconds, are
    for people: plans that differ only there are equal.

    >>> plan = OverlapPlan(Op.ALL_REDUCE, m=64, n=96, k=8, dtype="float32", hosts=(0, 1), axis=Axis.COLS,
    ...                    tile_m=64, tile_n=32, groups=(1, 2))
    >>> OverlapPlan.parse(str(plan)) == plan
    True
    """

    op: Op
    m: int
    n: int
    k: int
    dtype: str
    hosts: tuple[int, ...]
    transport: Transport = Transport.WINDOWS
    axis: Axis = Axis.ROWS
    tile_m: int = 48
    tile_n: int = 512
    groups: tuple[int, ...] = ()
    reason: str = field(default="", compare=False)
    predicted: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        Topology(self.hosts)
        if any(g < 1 for g in self.groups):
            raise ValueError(f"groups are {self.groups}, expected sizes of at least 1; () is the sequential plan")
        if self.op.gathers and self.axis is not Axis.ROWS:
            raise ValueError(f"{self.op.value} receives rows, got axis={self.axis.value}; use axis=rows")
        Tiling(self.m, self.n, self.tile_m, self.tile_n)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def sequential(self) -> bool:
        """Whether everything is computed before anything is sent, or received before anything is computed."""
        return not self.groups

    @property
    def weights(self) -> tuple[int, ...]:
        """The groups; the sequential plan has one."""
        return self.groups or (1,)

    @property
    def topology(self) -> Topology:
        """Who reaches whom through a window."""
        return _topology(self.hosts, self.transport)

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.m, self.n, self.tile_m, self.tile_n)

    @property
    def shard_bounds(self) -> tuple[int, ...]:
        """The rows of each rank, after torch.chunk."""
        return chunk_bounds(self.m, self.size)

    def cut(self, host: int, bounds: tuple[int, ...]) -> Cut:
        """The blocks of the output on every rank of `host`, when rows [bounds[d], bounds[d + 1]) go to rank d.

        All-reduce cuts each group further, so that all who add up have an equal share of it.
        """
        return _cut(self, host, bounds)

    def fit(self, *, m: int, n: int, k: int) -> OverlapPlan:
        """The same plan for a matmul of another size: a rank's own, where shards are uneven."""
        return replace(self, m=m, n=n, k=k)

    def simulate(self, curves: Curves) -> Timeline:
        """What will happen when, on every rank."""
        from weft.overlap.simulate import simulate  # which is built on plans

        return simulate(self, curves)

    def shared_text(self) -> str:
        """What all ranks must say alike: everything but the dimensions that may differ between them."""
        m, n, k = shared_dims(self.op, m=self.m, n=self.n, k=self.k)
        return str(replace(self, m=m, n=n, k=k, reason="", predicted=None))

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name the plan in traces and files."""
        return hashlib.sha256(str(replace(self, reason="", predicted=None)).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        text = (
            f"{self.op.value} m={self.m} n={self.n} k={self.k} dtype={self.dtype} hosts={_list(self.hosts)} "
            f"transport={self.transport.value} axis={self.axis.value} tile={self.tile_m}x{self.tile_n} "
            f"groups={_list(self.groups) or 'sequential'}"
        )
        text += "" if self.predicted is None else f" predicted={self.predicted!r}"
        return text + (f" # {self.reason}" if self.reason else "")

    @classmethod
    def parse(cls, text: str) -> OverlapPlan:
        """The plan that prints as `text`."""
        match = _SYNTAX.fullmatch(text.strip())
        if match is None:
            names = " ".join(f"{f.name}=..." for f in fields(cls) if f.name not in ("op", "tile_m", "tile_n", "reason"))
            raise ValueError(f"{text!r} is not a plan; expected `OP {names}`, as str(plan) prints it")
        got = match.groupdict()
        return cls(
            Op(got["op"]),
            m=int(got["m"]),
            n=int(got["n"]),
            k=int(got["k"]),
            dtype=got["dtype"],
            hosts=_numbers(got["hosts"]),
            transport=Transport(got["transport"]),
            axis=Axis(got["axis"]),
            tile_m=int(got["tile_m"]),
            tile_n=int(got["tile_n"]),
            groups=() if got["groups"] == "sequential" else _numbers(got["groups"]),
            reason=got["reason"] or "",
            predicted=None if got["predicted"] is None else float(got["predicted"]),
        )


@lru_cache(maxsize=256)
def _topology(hosts: tuple[int, ...], transport: Transport) -> Topology:
    return Topology(hosts) if transport is Transport.WINDOWS else Topology.apart(len(hosts))


@lru_cache(maxsize=256)
def _cut(plan: OverlapPlan, host: int, bounds: tuple[int, ...]) -> Cut:
    weights, order = plan.weights, plan.topology.destinations(host)
    if plan.op is Op.ALL_REDUCE:
        order = tuple(range(plan.size))
        shares = plan.size if plan.topology.count > 2 else len(plan.topology.local(0))
        weights = tuple(weight for weight in weights for _ in range(shares))
    if plan.axis is Axis.COLS:
        return cut_cols(plan.tiling, weights)
    return cut_rows(plan.tiling, weights, rows_by_destination(plan.tiling, bounds, order))


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
