"""Weights from a trainer's mesh to an inference mesh, at the speed of the wires.

    python examples/02_reshard.py                 in a lab: 3 hosts of 2 devices, cards of 1 Gbit/s
    python examples/02_reshard.py --loopback      without network namespaces: the same, but the cards are not limited

Ranks 0 to 3 hold a model cut by rows over (2, 2) devices, as FSDP does; ranks 4 and 5 run it tensor-parallel.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

import weft.reshard
from weft.lab import Cluster as Lab
from weft.lab import Rank
from weft.layout import Layout, Mesh
from weft.layout.mesh import DeclaredCluster
from weft.reference import shard
from weft.reshard import Source, plan_tensors, reshard_state_dict

TRAINER, ENGINE = Mesh.grid(2, 2), Mesh.grid(1, 2, first_rank=4, first_host=2)
FSDP = Layout(TRAINER, [Shard(0), Shard(0)])
WEIGHTS = {  # name: shape, how the engine wants it
    "embed": ((8000, 512), Layout(ENGINE, [Replicate(), Shard(0)])),
    "qkv": ((1536, 512), Layout(ENGINE, [Replicate(), Shard(0)])),
    "out": ((512, 512), Layout(ENGINE, [Replicate(), Shard(1)])),
    "norm": ((512,), Layout(ENGINE, [Replicate(), Replicate()])),
}


def whole(name: str) -> torch.Tensor:
    """The value of a weight, the same wherever it is asked for."""
    return torch.randn(WEIGHTS[name][0], generator=torch.Generator().manual_seed(len(name)))


def sync(rank: Rank) -> float:
    """What every rank runs: it gives what it has, and gets what it needs."""
    me = rank.rank
    known = {name: Source(shape, torch.float32, FSDP) for name, (shape, _) in WEIGHTS.items()}
    mine = {name: shard(whole(name), FSDP)[me].clone() for name in WEIGHTS} if me < 4 else None
    start = time.perf_counter()
    got = reshard_state_dict(
        mine, {name: dst for name, (_, dst) in WEIGHTS.items()}, src=known, dtype=torch.bfloat16, timeout=60.0
    )
    seconds = time.perf_counter() - start
    for name, tensor in got.items():
        assert torch.equal(tensor, shard(whole(name).bfloat16(), WEIGHTS[name][1])[me]), name
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loopback", action="store_true", help="no namespaces and no limit on the cards")
    gbps = None if parser.parse_args().loopback else 1.0

    specs = [
        weft.reshard.TensorSpec(name, shape, torch.float32, FSDP, dst, torch.bfloat16)
        for name, (shape, dst) in WEIGHTS.items()
    ]
    plan = plan_tensors(specs, cluster=DeclaredCluster.uniform(3, gbps=gbps or 10.0))
    print(plan)
    print(plan.simulate().text(width=100))
    # On plain loopback all ranks are on one host, whatever the meshes say: they may share memory, and need not.
    with Lab(hosts=3, devices=2, gbps=gbps) as lab:
        print(lab)
        seconds = max(lab.run(sync))
    print(f"moved and compared: {seconds * 1e3:.0f} ms with set-up; bound {plan.lower_bound * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
