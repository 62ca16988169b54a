"""The cases of `weft bench reshard`: those of the resharding paper's artefact, at 64 MB; and a scaled Llama."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from weft.layout import Layout, Mesh
from weft.reshard import TensorSpec

_SHAPE = (1024, 1024, 16)  # float32: 64 MB; the paper's last dim is 512
_THIRDS = (3072, 1024, 5)  # divisible by 3 hosts: 60 MB


@dataclass(frozen=True)
class ReshardCase:
    """A tensor of float32 from a mesh of (hosts, devices) and layout to another, on other hosts.

    >>> REPLICATE[-1].name
    '1 device to 4x4'
    """

    name: str
    shape: tuple[int, ...]
    src: tuple[int, int]
    src_notation: str
    dst: tuple[int, int]
    dst_notation: str

    @property
    def hosts(self) -> int:
        """Hosts of the lab."""
        return self.src[0] + self.dst[0]

    @property
    def devices(self) -> int:
        """Devices of each host of the lab; a mesh uses the first ones."""
        return max(self.src[1], self.dst[1])

    def layouts(self) -> tuple[Layout, Layout]:
        """Source and destination, on the ranks of a lab of `hosts` x `devices`."""
        src = lab_mesh(self.src, devices=self.devices, first_host=0)
        dst = lab_mesh(self.dst, devices=self.devices, first_host=self.src[0])
        return Layout.parse(src, self.src_notation), Layout.parse(dst, self.dst_notation)

    def spec(self) -> TensorSpec:
        """The tensor to be moved."""
        src, dst = self.layouts()
        return TensorSpec("tensor", self.shape, torch.float32, src, dst, torch.float32)


def lab_mesh(shape: tuple[int, int], *, devices: int, first_host: int) -> Mesh:
    """The first `shape[1]` devices of `shape[0]` hosts of a lab with `devices` ranks a host."""
    hosts = np.repeat(np.arange(shape[0]) + first_host, shape[1]).reshape(shape)
    return Mesh.of(hosts * devices + np.arange(shape[1]), hosts=hosts, axes=("host", "device"))


def _case(number: int, src: str, dst: str, shape: tuple[int, ...] = _SHAPE) -> ReshardCase:
    sides = []
    for text in (src, dst):
        mesh, notation = text.split(":")
        hosts, devices = mesh.split("x")
        sides.append(((int(hosts), int(devices)), notation))
    (a, src_notation), (b, dst_notation) = sides
    return ReshardCase(f"case {number}: {src} to {dst}", shape, a, src_notation, b, dst_notation)


PAPER = (
    _case(1, "2x4:S0RR", "2x4:S0RR"),
    _case(2, "2x4:RRR", "2x4:S0RR"),
    _case(3, "2x4:RS0R", "2x4:S0RR"),
    _case(4, "2x4:RS01R", "2x4:S01RR"),
    _case(5, "2x4:S1RR", "2x4:S0RR"),
    _case(6, "2x4:S0RR", "3x4:S0RR", _THIRDS),
    _case(7, "1x4:S1RR", "2x4:RRR"),
    _case(9, "2x4:RS0R", "2x4:RRS0"),
)
REPLICATE = tuple(
    ReshardCase(f"1 device to {h}x{d}", _SHAPE, (1, 1), "RRR", (h, d), "RRR")
    for h, d in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2), (4, 4))
)
CASES = PAPER + REPLICATE
QUICK_CASES = (PAPER[2], PAPER[3], REPLICATE[-1])


def llama_state(*, scale: int) -> list[TensorSpec]:
    """A small Llama from a (2, 2) FSDP mesh to a (1, 2) tensor-parallel mesh on another host; bfloat16.

    16 layers of 9 tensors, 6 more around them: 150 tensors, 400 MB at `scale` 1. Fused (qkv, gate and up) and
    unfused projections; dims that 4 ranks do not divide.
    """
    width, hidden, vocabulary = 1150 // scale, 2010 // scale, 16000 // scale
    fsdp = lab_mesh((2, 2), devices=2, first_host=0)
    tensor_parallel = lab_mesh((1, 2), devices=2, first_host=2)
    rows, columns = Shard(0), Shard(1)
    shapes: list[tuple[str, tuple[int, ...], Placement]] = []
    for layer in range(16):
        block = [
            ("attention.qkv", (3 * width // 2, width), rows),
            ("attention.qkv_bias", (3 * width // 2,), rows),
            ("attention.out", (width, width), columns),
            ("mlp.gate_up", (2 * hidden, width), rows),
            ("mlp.down", (width, hidden), columns),
            ("mlp.down_bias", (width,), Replicate()),
            ("norm_1", (width,), Replicate()),
            ("norm_2", (width,), Replicate()),
            ("rotary", (64,), Replicate()),
        ]
        shapes += [(f"layers.{layer}.{name}", shape, placement) for name, shape, placement in block]
    shapes += [
        ("embed", (vocabulary, width), rows),
        ("head.weight", (vocabulary, width), rows),
        ("head.bias", (vocabulary,), rows),
        ("norm", (width,), Replicate()),
        ("adapter.q", (width, width), rows),
        ("adapter.v", (width, width), columns),
    ]
    source = Layout(fsdp, (Shard(0), Shard(0)))
    return [
        TensorSpec(
            name, shape, torch.bfloat16, source, Layout(tensor_parallel, (Replicate(), placement)), torch.bfloat16
        )
        for name, shape, placement in shapes
    ]
