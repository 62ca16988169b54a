"""Declared GPUs: what data sheets and public measurements say of them, and nothing that was fitted to a result.

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
ITEM_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})

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
