"""One clock for all ranks: offsets by ping-pong against rank 0, and a group's timelines on its clock.

Every rank stamps events with its own monotonic clock. Ranks on one machine share that clock (also across
network namespaces), and are found to by their boot id, because an offset of exactly zero is better than the
best measurement. For the others rank 0 answers pings, as in NTP: with `sent` and `received` on the rank's
clock and `replied` on rank 0's, `replied - (sent + received) / 2` is the offset, wrong by at most half the
round trip. The ping with the shortest round trip counts.

What travels are numbers and JSON text; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.deadline import Deadline, timeout_of
from weft.comm.group import Group
from weft.comm.tags import Line, Mark, turn
from weft.comm.tell import tell_all
from weft.timeline.timeline import Timeline

PINGS = 32
_MOST_BYTES = 1 << 30  # of a rank's timeline


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
    with _Dial(group, device) as dial:
        offset = dial.offset(PINGS)
        texts = dial.tell("timelines", timeline.shifted(offset.seconds).to_json())
    ranks = {f"rank {rank}": Timeline.from_json(text) for rank, text in enumerate(texts)}
    return Timeline.merge(ranks, name=timeline.name)


def measure_offset(*, group: ProcessGroup, device: str = "cpu", pings: int = PINGS) -> Offset:
    """What to add to this rank's clock to get rank 0's; every rank of the group calls it."""
    with _Dial(group, device) as dial:
        return dial.offset(pings)


class _Dial:
    """The clocks of a group's ranks: messages of their own, beside everything else that is under way on the group."""

    def __init__(self, pg: ProcessGroup, device: str) -> None:
        self._pg, self._device = pg, device
        self._timeout = timeout_of(pg, device)
        self._tag = Line.CLOCKS.mark(Mark.PING)
        self._turn = turn(pg, "the clocks of a group", Deadline.after(self._timeout))
        self._group: Group | None = None

    def __enter__(self) -> _Dial:
        self._turn.__enter__()
        if self._device == "cpu":
            self._group = Group(self._pg, timeout=self._timeout, line=Line.CLOCKS)
        return self

    def __exit__(self, *error: Any) -> None:
        self._turn.__exit__(*error)

    def tell(self, what: str, mine: str) -> list[str]:
        """What each rank gave; through the store where messages are a device's."""
        if self._group is None:
            return tell_all(f"{what} of a group", mine, group=self._pg, timeout=self._timeout)
        return self._group.tell(what, mine, most=_MOST_BYTES)

    def offset(self, pings: int) -> Offset:
        """What to add to this rank's clock to get rank 0's."""
        ids, rank = self.tell("clocks", _clock_id()), self._pg.rank()
        if rank == 0:
            for peer in (peer for peer, clock in enumerate(ids) if clock != ids[0]):
                self._answer(peer, pings)
        return Offset(0.0, 0.0) if ids[rank] == ids[0] else offset_of([self._ask() for _ in range(pings)])

    def _answer(self, peer: int, pings: int) -> None:
        """Rank 0's side of the pings of one peer."""
        stamp = torch.zeros(1, dtype=torch.float64, device=self._device)
        for _ in range(pings):
            self._receive(stamp, peer)
            stamp.fill_(time.perf_counter())
            self._send(stamp, peer)

    def _ask(self) -> Ping:
        stamp = torch.zeros(1, dtype=torch.float64, device=self._device)
        sent = time.perf_counter()
        self._send(stamp, 0)
        self._receive(stamp, 0)
        replied = float(stamp)
        return Ping(sent, replied, time.perf_counter())

    def _send(self, stamp: Tensor, peer: int) -> None:
        if self._group is None:
            dist.send(stamp, group=self._pg, group_dst=peer, tag=self._tag)
        else:
            self._group.send(stamp, peer, tag=self._tag).wait(what="a ping")

    def _receive(self, stamp: Tensor, peer: int) -> None:
        if self._group is None:
            dist.recv(stamp, group=self._pg, group_src=peer, tag=self._tag)
        else:
            self._group.recv(stamp, peer, tag=self._tag).wait(what="a ping")


def _clock_id() -> str:
    """A text that two processes have in common only if they read the same monotonic clock.

    A time namespace may shift the clock of a container, so it is part of the identity. Where the system does
    not tell (not Linux), the clock counts as this process's own.
    """
    boot_id, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    try:
        identity = f"{boot_id.read_text()} {namespace.readlink()}".encode()
    except OSError:
        identity = os.urandom(16)
    return hashlib.sha256(identity).hexdigest()
