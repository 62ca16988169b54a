"""Seconds against bytes between the GPUs of a host: collectives in rings, and writes into peers' memory.

A ring of P GPUs takes P - 1 steps, twice that for an all-reduce. Latencies and the share of the bandwidth that each
protocol reaches are those of NCCL's own cost model (src/graph/tuning.cc); the curve is the best of its protocols.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.overlap.curves import Curve, Curves
from weft.overlap.plan import Op, Transport
from weft.scale.gpus import LAUNCH_SECONDS, Gpu, Wire

# (base latency, latency of a step, share of the bandwidth): low latency, 128-byte lines, plain.
_PROTOCOLS = {
    Wire.NVLINK: ((3.6e-6, 0.47e-6, 1 / 4), (10.0e-6, 1.9e-6, 0.92), (8.4e-6, 3.4e-6, 1.0)),
    Wire.PCIE: ((3.6e-6, 1.0e-6, 1 / 4), (8.4e-6, 5.7e-6, 1.0)),  # 128-byte lines are for NVLink only
}
_WRITE_LATENCY = {Wire.NVLINK: 3.4e-6, Wire.PCIE: 5.7e-6}  # one step of the plain protocol


def steps(op: Op, size: int) -> int:
    """Steps of the collective that belongs to an op."""
    return (size - 1) * (2 if op is Op.ALL_REDUCE else 1)


def wire_bytes(op: Op, *, m: int, n: int, k: int, item: int, size: int) -> float:
    """Bytes that each GPU sends, and receives: of the rows of x where the input travels, else of the product."""
    travels = m * (k if op.gathers else n) * item
    return travels * steps(op, size) / size


def ring_rate(gpu: Gpu, size: int) -> float:
    """Bytes a second along a ring; one hop of it crosses the sockets where GPUs of both take part."""
    return min(gpu.link, gpu.socket) if size > gpu.devices // 2 else gpu.link


def write_rate(gpu: Gpu, size: int) -> float:
    """Bytes a second of each GPU when everybody writes to everybody: what crosses the sockets shares their link."""
    half = gpu.devices // 2
    if size <= half:
        return gpu.link
    crossing = half * (size - half) / (size - 1)  # for each byte that one GPU sends
    return min(gpu.link, gpu.socket / crossing)


def envelope(lines: Sequence[tuple[float, float]], *, most: float = 1e12) -> Curve:
    """The lowest of lines (seconds of no bytes, bytes a second) as a curve.

    >>> curve = envelope([(1.0, 1.0), (3.0, 2.0)])
    >>> curve(2), curve(4), curve(10)
    (3.0, 5.0, 8.0)
    """
    edges = {1.0, most}
    for i, (a0, r0) in enumerate(lines):
        for a1, r1 in lines[i + 1 :]:
            if r0 != r1:
                crossing = (a1 - a0) / (1 / r0 - 1 / r1)
                edges |= {crossing} if 1.0 < crossing < most else set()
    return Curve(tuple((x, min(a + x / rate for a, rate in lines)) for x in sorted(edges)))


def declared_curves(gpu: Gpu, op: Op, size: int, transport: Transport, *, dtype: str) -> Curves:
    """What the overlap predictor needs, declared instead of measured.

    Messages are collectives on a group's slice, each a kernel that takes multiprocessors from the matmul while it
    runs. Windows are peers' memory: tiles store there, or copy engines read, and no multiprocessor is lost; whoever
    owns the rows adds them up afterwards.
    """
    if transport is Transport.MESSAGES:
        rate, count = ring_rate(gpu, size), steps(op, size)
        wire = envelope([(base + count * step, rate * share) for base, step, share in _PROTOCOLS[gpu.wire]])
        lost = gpu.channels / gpu.processors / rate
    else:
        trips = 2 if op is Op.ALL_REDUCE else 1
        wire = envelope([(trips * _WRITE_LATENCY[gpu.wire], write_rate(gpu, size))])
        lost = 0.0
    return Curves(
        wire=wire,
        flops=gpu.flops(dtype),
        add_bytes=gpu.copy_rate,
        cpu_per_byte=lost,
        call_overhead=LAUNCH_SECONDS,
        cpu_per_message=LAUNCH_SECONDS,
    )
