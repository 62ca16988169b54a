"""Declared GPUs: seconds of matmuls and of bytes, from data sheets and public measurements, fitted to no result.

Sources, for all entries:
  peak, memory, bandwidth, multiprocessors, NVLink   NVIDIA's data sheets and white papers; dense, without sparsity
  matmul_fraction   "maximum achievable matmul FLOPS" of the ML Engineering book (S. Bekman), bfloat16: 267.9 of 312
                    (A100 SXM), 256.4 (A100 PCIe), 792.1 of 989 (H100); none is published there for the H800, which
                    gets the H100's, nor for the RTX 4090, which gets the A100 PCIe's
  link rates        what NCCL's topology search counts on (src/graph/topo.h): 20 GB/s for an NVLink of the A100, 20.6
                    of the H100; 24 GB/s for PCIe 4 x16; between two sockets 16 GB/s (AMD Zen 2, the A100 PCIe's
                    contemporary) or 24 GB/s (Zen 3 and 4, the RTX 4090's)
  channels          NCCL's logs of eight GPUs: two for each NVLink up to 24, two on PCIe; each takes a multiprocessor
  network_gbps      one 200 Gbit/s card a GPU in a DGX A100, 400 in a DGX H100; for PCIe hosts, one card of 200 Gbit/s
                    (100 for the RTX 4090) is assumed for all eight

A matmul takes the time of its tiles in waves, or of its memory, whichever is slower. A wave is one tile on each
multiprocessor. The last wave takes as long as a full one, which is what is called wave quantisation; a tile that sticks
out of the matrix takes as long as a whole one.

Between the GPUs of a host there are collectives in rings, and writes into peers' memory. A ring of P GPUs takes P - 1
steps, twice that for an all-reduce. Latencies and the share of the bandwidth that each protocol reaches are those of
NCCL's own cost model (src/graph/tuning.cc); the curve is the best of its protocols.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType

from weft.overlap import speeds
from weft.overlap.plan import Op, Transport
from weft.overlap.speeds import Curve, Curves

DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
ITEM_BYTES: Mapping[str, int] = MappingProxyType({**speeds.ITEM_BYTES, "float16": 2})

# Of the data sheet's memory bandwidth a plain copy gets about nine tenths.
MEMORY_FRACTION = 0.9
# What FlashAttention-2 reports of the peak on the A100: up to 73 % forward, 63 % backward.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.7, 0.6
# One kernel after another in a captured graph.
LAUNCH_SECONDS = 1.3e-6


class Wire(str, Enum):
    """What the GPUs of a host are joined by."""

    NVLINK = "nvlink"
    PCIE = "pcie"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in hosts of `devices`.

    half, single:     flops a second in bfloat16 and float16, and in plain float32, never TensorFloat-32; data sheet
    matmul_fraction:  the part of the peak that large matmuls reach
    memory:           bytes;  bandwidth: bytes a second, of the data sheet
    processors:       streaming multiprocessors: tiles of one wave
    link:             bytes a second that a GPU sends, and receives meanwhile, to the others of its host
    socket:           bytes a second between the two halves of a host, each way; infinite behind a switch of NVLinks
    peers:            whether a GPU can write into another's memory
    channels:         multiprocessors that a collective takes while it runs
    network_gbps:     Gbit/s of all network cards of a host
    """

    name: str
    half: float
    single: float
    matmul_fraction: float
    memory: float
    bandwidth: float
    processors: int
    wire: Wire
    link: float
    channels: int
    network_gbps: float
    socket: float = math.inf
    peers: bool = True
    devices: int = 8

    def flops(self, dtype: str) -> float:
        """Flops a second that a large matmul reaches.

        >>> round(find_gpu("A100").flops("bfloat16") / 1e12)
        268
        """
        return self.peak_of(dtype) * self.matmul_fraction

    def peak_of(self, dtype: str) -> float:
        """The data sheet's flops a second."""
        return self.single if find_dtype(dtype) == "float32" else self.half

    @property
    def copy_rate(self) -> float:
        """Bytes a second, read or written, that a plain kernel reaches."""
        return self.bandwidth * MEMORY_FRACTION


_ALL = (
    Gpu("A100", 312e12, 19.5e12, 267.9 / 312, 80e9, 2039e9, 108, Wire.NVLINK, 12 * 20e9, 24, 8 * 200),
    Gpu("A100-PCIe", 312e12, 19.5e12, 256.4 / 312, 80e9, 1935e9, 108, Wire.PCIE, 24e9, 2, 200, socket=16e9),
    Gpu("H100", 989e12, 66.9e12, 792.1 / 989, 80e9, 3352e9, 132, Wire.NVLINK, 18 * 20.6e9, 24, 8 * 400),
    Gpu("H800", 989e12, 66.9e12, 792.1 / 989, 80e9, 3352e9, 132, Wire.NVLINK, 8 * 20.6e9, 16, 8 * 400),
    # bfloat16 products with float32 sums run at half the rate of float16 sums; GeForce cards cannot map each other.
    Gpu("RTX4090", 165.2e12, 82.6e12, 256.4 / 312, 24e9, 1008e9, 128, Wire.PCIE, 24e9, 2, 100,
        socket=24e9, peers=False),
)  # fmt: skip
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})


def find_gpu(name: str) -> Gpu:
    """The declared GPU of that name, in any case and with or without dashes and blanks.

    >>> find_gpu("rtx-4090").name
    'RTX4090'
    """

    def plain(text: str) -> str:
        return "".join(letter for letter in text.lower() if letter.isalnum())

    for known in GPUS.values():
        if plain(known.name) == plain(name):
            return known
    raise ValueError(f"got the GPU {name!r}; expected one of: {', '.join(GPUS)}")


def find_dtype(name: str) -> str:
    """A dtype by its short or its torch name.

    >>> find_dtype("bf16"), find_dtype("float32")
    ('bfloat16', 'float32')
    """
    full = DTYPES.get(name, name)
    if full not in ITEM_BYTES:
        raise ValueError(f"got the dtype {name!r}; expected one of: {', '.join(DTYPES)}")
    return full


# The tiles of the kernels; small ones only where there are few rows, since they load more for each flop.
_TILES, _LOW_TILES = ((128, 256), (128, 128)), ((64, 256), (64, 128))


@dataclass(frozen=True)
class Matmul:
    """[m, k] x [n, k]^T on one GPU: the tile, how many there are, in how many waves, and seconds without the launch."""

    tile_m: int
    tile_n: int
    tiles: int
    waves: int
    seconds: float


@lru_cache(maxsize=4096)
def _tiled(gpu: Gpu, m: int, n: int, k: int, dtype: str, tile_m: int, tile_n: int) -> Matmul:
    tiles = -(-m // tile_m) * -(-n // tile_n)
    waves = -(-tiles // gpu.processors)
    compute = waves * 2.0 * tile_m * tile_n * k * gpu.processors / gpu.flops(dtype)
    memory = float(m * k + n * k + m * n) * ITEM_BYTES[dtype] / gpu.copy_rate
    return Matmul(tile_m, tile_n, tiles, waves, max(compute, memory))


def tilings(gpu: Gpu, m: int, n: int, k: int, *, dtype: str = "bfloat16") -> tuple[Matmul, ...]:
    """The matmul with each of the tiles, the fastest first."""
    if min(m, n, k) < 1:
        raise ValueError(f"got a matmul of m={m}, n={n}, k={k}; expected sizes of at least 1")
    tiles = _LOW_TILES if m <= 64 else _TILES
    return tuple(sorted((_tiled(gpu, m, n, k, dtype, *tile) for tile in tiles), key=lambda each: each.seconds))


def matmul(gpu: Gpu, m: int, n: int, k: int, *, dtype: str = "bfloat16") -> Matmul:
    """The fastest of the tilings.

    >>> from weft.scale.gpus import find_gpu
    >>> matmul(find_gpu("A100"), 8192, 12288, 6144)  # doctest: +ELLIPSIS
    Matmul(tile_m=128, tile_n=128, tiles=6144, waves=57, seconds=0.00462...)
    """
    return tilings(gpu, m, n, k, dtype=dtype)[0]


def matmul_seconds(gpu: Gpu, m: int, n: int, k: int, *, dtype: str = "bfloat16") -> float:
    """Seconds of a matmul and its launch."""
    return matmul(gpu, m, n, k, dtype=dtype).seconds + LAUNCH_SECONDS


def copy_seconds(gpu: Gpu, nbytes: float) -> float:
    """Seconds of a kernel that reads and writes `nbytes` together and computes next to nothing."""
    return nbytes / gpu.copy_rate + LAUNCH_SECONDS


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
        held = gpu.channels / gpu.processors
        lost = held / rate
    else:
        trips = 2 if op is Op.ALL_REDUCE else 1
        wire = envelope([(trips * _WRITE_LATENCY[gpu.wire], write_rate(gpu, size))])
        held = lost = 0.0
    return Curves(
        wire=wire,
        flops=gpu.flops(dtype),
        add_bytes=gpu.copy_rate,
        cpu_per_byte=lost,
        call_overhead=LAUNCH_SECONDS,
        cpu_per_message=LAUNCH_SECONDS,
        held=held,
    )
