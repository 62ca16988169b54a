"""Measured speeds that a prediction needs: of the wire, of the matmul, of sums, and of the CPU that messages take."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weft.cluster import Cluster


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
    """

    wire: Curve
    flops: float
    add_bytes: float
    cpu_per_byte: float
    call_overhead: float
    cpu_per_message: float = 0.0
    handover: float = 0.0

    @classmethod
    def of_cluster(cls, cluster: Cluster, *, flops: float, add_bytes: float = 1e10) -> Curves:
        """What is declared instead of measured: the slowest card of the cluster, and the flops a second of one rank.

        Messages take no CPU, and sums run at `add_bytes` bytes a second, about what one core reads from memory.

        >>> Curves.of_cluster(Cluster.uniform(2, gbps=8.0), flops=1e11).wire(1e9) > 1.0
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
    )
