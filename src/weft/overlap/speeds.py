"""What a group of ranks can do, and what a plan asks of it: seconds and bytes. Pure values.

`Curves` are speeds, measured on a group or declared: of the wire, of the matmul, of sums, and of the CPU that messages
take. `work_of` turns a plan and curves into `Work`: units of computing in order, and the bytes that a host's card must
carry for each. Search and simulation both start from here.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from weft.layout import DeclaredCluster
from weft.overlap.blocks import Axis, Topology, cut_points, rows_by_destination
from weft.overlap.plan import Op, OverlapPlan, Transport

MAX_UNITS = 48
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Of the types that the CPU's ops take."""
# Each pass over the packed weight fetches it once, which costs about as much as computing this many more rows.
_PASS_ROWS = 1.5


@dataclass(frozen=True)
class Curve:
    """Seconds against bytes: straight lines between measured points, the last one continued; 0 bytes take none.

    >>> curve = Curve(((1000, 0.1), (3000, 0.2)))
    >>> curve(0), curve(10), round(curve(2000), 3), round(curve(5000), 3)
    (0.0, 0.1, 0.15, 0.3)
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if len(sizes) < 2 or sorted(set(sizes)) != sizes or any(seconds < 0 for _, seconds in self.points):
            raise ValueError(
                f"points of a curve are {self.points}, expected two or more (bytes, seconds) with growing bytes"
            )

    def __call__(self, nbytes: float) -> float:
        if nbytes <= 0:
            return 0.0
        first_bytes, first = self.points[0]
        if nbytes <= first_bytes:
            return first
        right = min(bisect_right(self.points, nbytes, key=lambda p: p[0]), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)

    @classmethod
    def of_link(cls, *, bytes_per_second: float, latency: float) -> Curve:
        """A link that is declared, not measured."""
        return cls(((1.0, latency), (1e9, latency + 1e9 / bytes_per_second)))


@dataclass(frozen=True)
class Curves:
    """What a group of ranks can do, measured on all of them at once; the slowest rank counts.

    wire:           bytes that leave a host's card at once -> seconds until they are on another host
    flops:          flops a second of one rank's matmul
    add_bytes:      bytes a second of partial results that a rank adds up, or copies
    cpu_per_byte:   CPU seconds that a message takes from the matmul, for each byte sent and as much received
    call_overhead:  seconds from the call to the first tile, and after the last
    cpu_per_message:  CPU seconds that a message takes from the matmul, however small it is
    handover:       seconds that it takes to give work to another thread and to hear that it is done
    held:           the part of a device that a message holds from its start to its end, such as a collective's kernel
    uncertainty:    how far repeated measurements of these lay apart, as a part of themselves; 0 for what is declared
    """

    wire: Curve
    flops: float
    add_bytes: float
    cpu_per_byte: float
    call_overhead: float
    cpu_per_message: float = 0.0
    handover: float = 0.0
    held: float = 0.0
    uncertainty: float = 0.0

    @classmethod
    def of_cluster(cls, cluster: DeclaredCluster, *, flops: float, add_bytes: float = 1e10) -> Curves:
        """What is declared instead of measured: the slowest card of the cluster, and the flops a second of one rank.

        Messages take no CPU, and sums run at `add_bytes` bytes a second, about what one core reads from memory.

        >>> Curves.of_cluster(DeclaredCluster.uniform(2, gbps=8.0), flops=1e11).wire(1e9) > 1.0
        True
        """
        wire = Curve.of_link(bytes_per_second=float(min(cluster.rates)), latency=cluster.latency)
        return cls(wire, flops, add_bytes, cpu_per_byte=0.0, call_overhead=cluster.latency)

    def to_json(self) -> str:
        """One line; `from_json` gives back an equal value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Curves:
        """What `to_json` wrote."""
        fields = json.loads(text)
        points = tuple((float(size), float(seconds)) for size, seconds in fields.pop("wire")["points"])
        return cls(wire=Curve(points), **{name: float(value) for name, value in fields.items()})


def subadditive(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points, raised where a small message is faster a byte than a larger one: cutting must not pay by itself.

    A token bucket lets short bursts through at full speed; a stream of them is no faster than one large message.

    >>> subadditive([(10.0, 1.0), (100.0, 20.0)])
    ((10.0, 2.0), (100.0, 20.0))
    """
    raised = []
    for i, (size, seconds) in enumerate(points):
        slowest_rate = max(other / larger for larger, other in points[i:])
        raised.append((size, max(seconds, slowest_rate * size)))
    return tuple(raised)


def slowest(curves: Sequence[Curves]) -> Curves:
    """The group's curves from those that each rank has measured, all at the same sizes."""
    by_size = zip(*(c.wire.points for c in curves), strict=True)
    points = tuple((same[0][0], max(seconds for _, seconds in same)) for same in by_size)
    return Curves(
        wire=Curve(points),
        flops=min(c.flops for c in curves),
        add_bytes=min(c.add_bytes for c in curves),
        cpu_per_byte=max(c.cpu_per_byte for c in curves),
        call_overhead=max(c.call_overhead for c in curves),
        cpu_per_message=max(c.cpu_per_message for c in curves),
        handover=max(c.handover for c in curves),
        held=max(c.held for c in curves),
        uncertainty=max(c.uncertainty for c in curves),
    )


@dataclass(frozen=True)
class Work:
    """Units in the order of computing: seconds and wire bytes of each.

    before:  seconds of computing that need no message (the rows that are there), before the first unit
    after:   seconds that follow, whatever happens: sums, and leaving the call
    last:    the part of `after` that can start only when the last message is through
    """

    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]
    before: float = 0.0
    after: float = 0.0
    last: float = 0.0
    backwards: bool = False

    @property
    def units(self) -> int:
        return len(self.seconds)

    @property
    def compute(self) -> float:
        """Seconds of all computing."""
        return self.before + sum(self.seconds)


def work_in_waves(
    op: Op, *, ranks: int, tiles: int, at_once: int, seconds: float, nbytes: float, units: int, after: float = 0.0
) -> Work:
    """The work of a device that computes `at_once` tiles at a time: they end together, so nothing finer can be sent.

    `seconds` and `nbytes` are those of the whole matmul and of all that a rank sends, `units` the most to cut it into,
    `after` the seconds of sums. Where the input travels, the rows that are there fill the first waves.

    >>> work = work_in_waves(Op.ALL_REDUCE, ranks=2, tiles=10, at_once=4, seconds=3.0, nbytes=100.0, units=96)
    >>> work.seconds, work.nbytes
    ((1.0, 1.0, 1.0), (40.0, 40.0, 20.0))
    """
    waves = -(-tiles // at_once)
    ahead = waves // ranks if op.gathers else 0
    cuts = wave_cuts(waves - ahead, units)
    each = tuple(seconds / waves * (b - a) for a, b in pairwise(cuts))
    if op.gathers:
        shares = tuple(nbytes * (b - a) / (waves - ahead) for a, b in pairwise(cuts))
        return Work(each, shares, before=seconds / waves * ahead, backwards=True)
    done = [min(at_once * cut, tiles) for cut in cuts]  # the last wave has only the tiles that are left over
    return Work(each, tuple(nbytes * (b - a) / tiles for a, b in pairwise(done)), after=after, last=after / len(each))


def wave_cuts(waves: int, units: int) -> tuple[int, ...]:
    """Where each of so many units begins, in waves, and the end."""
    return cut_points(waves, [1] * min(waves, units))


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype that weft computes in."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype is {dtype}, expected one of {', '.join(ITEM_BYTES)}; convert the tensors first")
    return ITEM_BYTES[dtype]


def work_of(plan: OverlapPlan, curves: Curves) -> Work:
    """The work of the busiest host's ranks; the sizes of the plan's groups do not matter here."""
    return _gathering(plan, curves) if plan.op.gathers else _scattering(plan, curves)


def row_seconds(plan: OverlapPlan, curves: Curves) -> float:
    """Seconds of one row of the product."""
    return 2.0 * plan.n * plan.k / curves.flops * (1 + _PASS_ROWS / plan.tile_m)


def _sending(plan: OverlapPlan, devices: int) -> int:
    """How many ranks of a host send the same rows: one for all where they add up, or hold, them together."""
    together = plan.transport is Transport.WINDOWS and plan.op is not Op.ALL_TO_ALL
    return 1 if together else devices


def _scattering(plan: OverlapPlan, curves: Curves) -> Work:
    hosts = Topology(plan.hosts)
    devices = max(len(hosts.ranks_of(h)) for h in range(hosts.count))
    local = len(hosts.ranks_of(0))
    crossing = 2 * (hosts.count - 1) / hosts.count if hosts.count > 2 else hosts.count - 1
    item = item_bytes(plan.dtype) * _sending(plan, devices)
    tiling, bounds = plan.tiling, plan.shard_bounds
    seconds, nbytes = [], []
    if plan.axis is Axis.COLS:
        remote = plan.m * crossing if plan.op is Op.ALL_REDUCE else plan.m - bounds[local]
        for start, end in pairwise(cut_points(tiling.cols, [1] * min(tiling.cols, MAX_UNITS))):
            cols = min(end * tiling.tile_n, plan.n) - start * tiling.tile_n
            seconds.append(row_seconds(plan, curves) * plan.m * cols / plan.n)
            nbytes.append(remote * cols * item)
    else:
        order = rows_by_destination(tiling, bounds, hosts.destinations(0) if plan.op is not Op.ALL_REDUCE else
                                    range(plan.size))  # fmt: skip
        for start, end in pairwise(cut_points(len(order), [1] * min(len(order), MAX_UNITS))):
            rows = [(r * tiling.tile_m, min((r + 1) * tiling.tile_m, plan.m)) for r in order[start:end]]
            remote = sum((b - a) * crossing if plan.op is Op.ALL_REDUCE else b - max(a, bounds[local])
                         for a, b in rows if plan.op is Op.ALL_REDUCE or b > bounds[local])  # fmt: skip
            seconds.append(row_seconds(plan, curves) * sum(b - a for a, b in rows))
            nbytes.append(remote * plan.n * item)
    own = plan.m if plan.op is Op.ALL_REDUCE else bounds[1]
    finish = own * plan.n * item_bytes(plan.dtype) * max(1, min(plan.size, hosts.count)) / curves.add_bytes
    messages = sum(1 for b in nbytes if b)
    return Work(tuple(seconds), tuple(nbytes), after=finish, last=finish / max(1, messages))


def _gathering(plan: OverlapPlan, curves: Curves) -> Work:
    hosts = Topology(plan.hosts)
    local = len(hosts.ranks_of(0))
    remote_ranks = plan.size - local
    shard = plan.shard_bounds[1]
    readers = hosts.count - 1 if plan.transport is Transport.WINDOWS else remote_ranks
    copies = local * (readers if plan.op is Op.ALL_GATHER else remote_ranks)
    row = row_seconds(plan, curves)
    item = item_bytes(plan.dtype)
    units = min(-(-shard // plan.tile_m), MAX_UNITS)
    seconds, nbytes = [], []
    for start, end in pairwise(cut_points(shard, [1] * units) if units else (0,)):
        seconds.append(row * (end - start) * remote_ranks)
        nbytes.append((end - start) * plan.k * item * copies)
    return Work(tuple(seconds), tuple(nbytes), before=row * shard * local, backwards=True)
