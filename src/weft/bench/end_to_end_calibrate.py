"""What the speed of links and the bounds of `weft bench end_to_end` are chosen by: this machine, and torch's own step.

The links of a place are as slow as it takes for torch's packed training step to spend `share` of its time on them:
its time on a link that hardly limits it, and the bytes that leave a card meanwhile, are both measured.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.bench import noise
from weft.bench.end_to_end_cases import Load, Place
from weft.bench.end_to_end_inputs import train_batch
from weft.bench.end_to_end_train import Form, TorchTrainer
from weft.bench.harness import Case, System, measure
from weft.bench.ranks import slowest, start_together
from weft.kernels import linear
from weft.lab import Cluster, Rank
from weft.lab.network import MAX_GBPS, MIN_GBPS
from weft.overlap.weights import pack

RUN_TIMEOUT = 7200.0  # of all systems of a place, vLLM loading included
FAST_GBPS = 40.0  # beyond what gloo sends here
_STEPS = 3
_PROBE = (256, 1024, 1024)  # m, k, n
_READ_FLOATS = 1 << 26  # 256 MB: no cache holds it


@dataclass(frozen=True)
class Machine:
    """What all cores together can do: flops a second in matmuls, bytes a second read from memory (0: not measured)."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class TorchStep:
    """torch's packed training step where links hardly limit it, and the bytes that it sends from each card."""

    seconds: float
    card_bytes: float

    def gbps(self, share: float) -> float:
        """The rate at which sending takes `share` of the step.

        >>> TorchStep(seconds=2.0, card_bytes=1e9).gbps(0.5)
        4.0
        """
        sending = self.seconds * share / (1 - share)
        return min(MAX_GBPS, max(MIN_GBPS, self.card_bytes * 8e-9 / sending))


def measure_machine(*, decoding: bool) -> Machine:
    """With one rank a core, as the rows have them; only decoding is bound by memory."""
    with Cluster(1, min(2, os.cpu_count() or 1), None) as lab:
        found = lab.run(_rank_machine, decoding)
    return Machine(sum(m.flops for m in found), sum(m.bandwidth for m in found))


def _rank_machine(rank: Rank, decoding: bool) -> Machine:
    """One rank's part while all are at work."""
    m, k, n = _PROBE
    x, w = torch.randn(m, k), pack(torch.randn(n, k))
    flops = 2.0 * m * k * n / _seconds(lambda: linear(x, w))
    data = torch.ones(_READ_FLOATS if decoding else 0)
    return Machine(flops, data.nbytes / _seconds(data.sum) if decoding else 0.0)


def _seconds(call: System) -> float:
    return measure(Case("probe", {"call": call}), meter=noise.Meter(root=os.getppid()), agree=slowest).median("call")


def torch_step(place: Place, load: Load) -> TorchStep:
    """Measures it, in a lab of its own."""
    with Cluster(place.hosts, place.devices, FAST_GBPS) as lab:
        found = lab.run(_rank_step, place, load, timeout=RUN_TIMEOUT)
    return TorchStep(max(step.seconds for step in found), max(step.card_bytes for step in found))


def _rank_step(rank: Rank, place: Place, load: Load) -> TorchStep:
    batch = train_batch(load.train_lengths, place.size.vocabulary, multiple=place.ranks)
    trainer = TorchTrainer(place.size, batch, rank_mesh(rank))
    trainer.step(Form.PACKED)  # the first one connects ranks and makes the optimiser's state
    seconds, before = [], sent_bytes()
    for _ in range(_STEPS):
        start_together()
        start = time.perf_counter()
        trainer.step(Form.PACKED)
        seconds.append(slowest(time.perf_counter() - start))
    return TorchStep(statistics.median(seconds), (sent_bytes() - before) / _STEPS)


def rank_mesh(rank: Rank) -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh("cpu", (rank.world,), mesh_dim_names=("tp",))


def sent_bytes(card: str = "eth0") -> int:
    """What this host's card has sent so far, headers and all; 0 on a host without one."""
    return parse_sent(Path("/proc/net/dev").read_text(encoding="ascii"), card)


def parse_sent(table: str, card: str) -> int:
    """The bytes that a card has sent, from the text of `/proc/net/dev`.

    >>> parse_sent("  eth0:  10 1 0 0 0 0 0 0  77 2 0 0 0 0 0 0", "eth0")
    77
    """
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == card:
            return int(counters.split()[8])
    return 0
