"""One clock for all ranks: offsets by ping-pong against rank 0, and a group's timelines on its clock.

Every rank stamps events with its own monotonic clock. Ranks on one machine share that clock (also across
network namespaces), and are found to by their boot id, because an offset of exactly zero is better than the
best measurement. For the others rank 0 answers pings, as in NTP: with `sent` and `received` on the rank's
clock and `replied` on rank 0's, `replied - (sent + received) / 2` is the offset, wrong by at most half the
round trip. The ping with the shortest round trip counts.

What travels are tensors of numbers and of JSON text; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.timeline.value import Timeline

PINGS = 32


@dataclass(frozen=True)
class Ping:
    """One round trip: `sent` and `received` on the asking rank's clock, `replied` on rank 0's."""

    sent: float
    replied: float
    received: float


@dataclass(frozen=True)
class Offset:
    """Rank 0's clock less this rank's, and how far off that can be, both in seconds."""

    seconds: float
    error: float


def offset_of(pings: Sequence[Ping]) -> Offset:
    """The offset from the ping with the shortest round trip.

    >>> offset_of([Ping(1.0, 11.5, 2.0), Ping(3.0, 13.25, 3.5)])
    Offset(seconds=10.0, error=0.25)
    """
    best = min(pings, key=lambda p: p.received - p.sent)
    return Offset(best.replied - (best.sent + best.received) / 2, (best.received - best.sent) / 2)


def gather(timeline: Timeline, *, group: ProcessGroup, device: str = "cpu") -> Timeline:
    """All ranks' timelines on rank 0's clock, lanes named `rank r/...`; every rank calls it and gets it.

    `device` is where the group's backend takes tensors from: `"cpu"` for gloo and mpi, `"cuda"` for nccl.
    """
    offset = measure_offset(group=group, device=device)
    text = timeline.shifted(offset.seconds).to_json().encode("ascii")
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = _all_gather(torch.tensor([own.numel()]), group=group, device=device)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    texts = _all_gather(padded, group=group, device=device)
    ranks = {
        f"rank {rank}": Timeline.from_json(text[: int(size)].numpy().tobytes().decode("ascii"))
        for rank, (size, text) in enumerate(zip(sizes, texts, strict=True))
    }
    return Timeline.merge(ranks, name=timeline.name)


def measure_offset(*, group: ProcessGroup, device: str = "cpu", pings: int = PINGS) -> Offset:
    """What to add to this rank's clock to get rank 0's; every rank of the group calls it."""
    ids = _all_gather(torch.tensor(_clock_id()), group=group, device=device)
    shares_clock = [bool(torch.equal(clock, ids[0])) for clock in ids]
    rank, root = dist.get_rank(group), dist.get_global_rank(group, 0)
    if rank == 0:
        for peer, same in enumerate(shares_clock):
            if not same:
                _answer(dist.get_global_rank(group, peer), group=group, device=device, pings=pings)
    if shares_clock[rank]:
        return Offset(0.0, 0.0)
    return offset_of([_ask(root, group=group, device=device) for _ in range(pings)])


def _answer(peer: int, *, group: ProcessGroup, device: str, pings: int) -> None:
    """Rank 0's side of the pings of one peer."""
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(pings):
        dist.recv(stamp, src=peer, group=group)
        stamp.fill_(time.perf_counter())
        dist.send(stamp, dst=peer, group=group)


def _ask(root: int, *, group: ProcessGroup, device: str) -> Ping:
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    sent = time.perf_counter()
    dist.send(stamp, dst=root, group=group)
    dist.recv(stamp, src=root, group=group)
    replied = float(stamp)
    return Ping(sent, replied, time.perf_counter())


def _all_gather(own: torch.Tensor, *, group: ProcessGroup, device: str) -> list[torch.Tensor]:
    own = own.to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return [tensor.cpu() for tensor in gathered]


def _clock_id() -> list[int]:
    """16 bytes that two processes have in common only if they read the same monotonic clock.

    A time namespace may shift the clock of a container, so it is part of the identity. Where the system does
    not tell (not Linux), the clock counts as this process's own.
    """
    boot_id, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    try:
        identity = f"{boot_id.read_text()} {namespace.readlink()}".encode()
    except OSError:
        identity = os.urandom(16)
    return list(hashlib.sha256(identity).digest()[:16])
