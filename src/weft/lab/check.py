"""Do a lab's links carry what was asked of them? One way, both ways, all at once; and what CPU a message takes.

With TCP cards bytes go over plain sockets, with DMA cards as messages of the ranks' process group.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.comm.deadline import LAB_CONNECT, LAB_RUN
from weft.lab import linux
from weft.lab.cluster import Cluster
from weft.lab.rank import Rank

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 0.05
DMA_TOLERANCE = 0.02  # their wire is worked out, and not measured out by packets
TRIES = 5
"""A link that is off is measured again, and the best try counts: while the hypervisor runs somebody else on
this machine's cores, no link of it gets anywhere."""

_WARM_UP = 0.3  # seconds that are not counted
_CHUNK = 1 << 18  # bytes at a time: they stay in the cache
_MESSAGE = 1 << 22  # bytes of a message, of which
_UNDER_WAY = 3  # are under way at once: the wire never waits for a rank
Flow = tuple[int, int]  # sending rank, receiving rank


@dataclass(frozen=True)
class Row:
    """One measurement; `asked` is None where there is no limit. Rates are Gbit/s of payload.

    stolen: the share of the machine's CPU time that the hypervisor kept for others meanwhile
    cpu:    milliseconds of CPU that sender and receiver took for each MB
    """

    link: str
    asked: float | None
    measured: float
    tries: int = 1
    stolen: float = 0.0
    cpu: float = 0.0
    tolerance: float = TOLERANCE

    @property
    def deviation(self) -> float:
        """How far off, as a share of what was asked: -0.02 is 2 % too slow."""
        return 0.0 if self.asked is None else self.measured / self.asked - 1.0

    @property
    def ok(self) -> bool:
        return abs(self.deviation) <= self.tolerance


@dataclass(frozen=True)
class CheckResult:
    """What was measured in a lab; `ok` when every link is within 5 % of its rate, or 2 % with DMA cards."""

    lab: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


@dataclass(frozen=True)
class _Pattern:
    """Flows that run at once. `each` names them one by one; without it they are added up under `name`."""

    name: str
    flows: tuple[Flow, ...]
    limited: bool = True
    each: tuple[str, ...] = ()


def check(
    hosts: int = 2, gbps: float | None = 1.0, *, devices: int = 2, cards: str = "tcp", seconds: float = 1.7
) -> CheckResult:
    """Starts a lab and measures it; `seconds` is how long each measurement counts, after a short warm-up."""
    if hosts < 2:
        raise ValueError(f"hosts is {hosts}; expected at least 2, because links between hosts are measured")
    with Cluster(hosts, devices, gbps, cards=cards) as cluster:
        rows = tuple(row for pattern in _patterns(hosts, devices) for row in _measure(cluster, pattern, seconds))
        return CheckResult(cluster.describe(), rows)


def _patterns(hosts: int, devices: int) -> Iterator[_Pattern]:
    first, second = 0, devices  # the first ranks of hosts 0 and 1
    yield _Pattern("host 0 to host 1", ((first, second),))
    both = ("host 0 to host 1, both ways at once", "host 1 to host 0, both ways at once")
    yield _Pattern("both ways", ((first, second), (second, first)), each=both)
    if devices > 1:
        yield _Pattern("2 devices of host 0 to host 1, together", ((first, second), (first + 1, second + 1)))
    if hosts > 2:
        ring = tuple((host * devices, (host + 1) % hosts * devices) for host in range(hosts))
        names = tuple(f"host {host} to the next, all hosts at once" for host in range(hosts))
        yield _Pattern("ring", ring, each=names)
        others = tuple((host * devices, 0) for host in range(1, hosts))
        yield _Pattern(f"{hosts - 1} hosts to host 0, together", others)
    if devices > 1:
        yield _Pattern("inside host 0", ((0, 1),), limited=False)


def _measure(cluster: Cluster, pattern: _Pattern, seconds: float) -> list[Row]:
    """The rows of the try whose worst row is best, of as many tries as it takes to be within tolerance."""
    attempts: list[list[Row]] = []
    while len(attempts) < TRIES and not any(all(row.ok for row in rows) for rows in attempts):
        attempts.append(_try(cluster, pattern, seconds))
    best = min(attempts, key=_worst)
    return [replace(row, tries=len(attempts)) for row in best]


def _worst(rows: Sequence[Row]) -> float:
    return max(abs(row.deviation) for row in rows)


def _try(cluster: Cluster, pattern: _Pattern, seconds: float) -> list[Row]:
    spec = cluster.spec
    addresses = ["127.0.0.1" if spec.gbps is None else linux.address(h) for h in range(spec.hosts)]
    asked = spec.gbps if pattern.limited else None
    before, start = _stolen_seconds(), time.monotonic()
    limit = seconds + LAB_RUN.seconds
    if spec.cards == "dma":
        sides = cluster.run(carry, pattern.flows, seconds, timeout=limit)
    else:
        sides = cluster.run(transfer, pattern.flows, addresses, seconds, timeout=limit)
    cores = os.cpu_count() or 1
    stolen = (_stolen_seconds() - before) / ((time.monotonic() - start) * cores)
    rates = [sides[receiver].rates[flow] for flow, (_, receiver) in enumerate(pattern.flows)]
    cpu = 1e3 * sum(side.cpu_seconds for side in sides) / (sum(side.megabytes for side in sides) or 1.0)
    tolerance = DMA_TOLERANCE if spec.cards == "dma" else TOLERANCE
    names, found = (pattern.each, rates) if pattern.each else ((pattern.name,), [sum(rates)])
    return [
        Row(name, asked, rate, stolen=stolen, cpu=cpu, tolerance=tolerance)
        for name, rate in zip(names, found, strict=True)
    ]


def _stolen_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


@dataclass
class FlowsOfRank:
    """Gbit/s of the flows that end at a rank, by their index; what came in all, and the CPU that the rank took."""

    rates: dict[int, float]
    megabytes: float = 0.0
    cpu_seconds: float = 0.0


def carry(rank: Rank, flows: Sequence[Flow], seconds: float) -> FlowsOfRank:
    """As `transfer`, by messages of the group. The last one of a flow begins with a 1."""
    import torch
    import torch.distributed as dist

    def messages() -> list[torch.Tensor]:
        return [torch.zeros(_MESSAGE, dtype=torch.uint8) for _ in range(_UNDER_WAY)]

    def send(flow: int, peer: int) -> None:
        end, is_over, number = time.monotonic() + _WARM_UP + seconds, False, 0
        buffers, works = messages(), deque[dist.Work]()
        while not is_over:
            if len(works) == _UNDER_WAY:
                works.popleft().wait()
            data = buffers[number % _UNDER_WAY]
            is_over = time.monotonic() >= end
            data[0] = int(is_over)
            works.append(rank.group.send([data], peer, flow))
            number += 1
        for work in works:
            work.wait()

    def receive(flow: int, peer: int) -> None:
        buffers, number = messages(), 0
        works = deque(rank.group.recv([data], peer, flow) for data in buffers)
        start, first, last, count = time.monotonic() + _WARM_UP, 0.0, 0.0, 0
        while True:
            works.popleft().wait()
            data = buffers[number % _UNDER_WAY]
            number += 1
            if data[0]:
                break
            last = time.monotonic()
            if first:
                count += _MESSAGE
            elif last >= start:
                first = last
            works.append(rank.group.recv([data], peer, flow))
        found.rates[flow] = count * 8e-9 / (last - first)
        found.megabytes += number * _MESSAGE / 1e6

    found = FlowsOfRank({})
    ends = [(receive, flow, sender) for flow, (sender, receiver) in enumerate(flows) if receiver == rank.rank]
    ends += [(send, flow, receiver) for flow, (sender, receiver) in enumerate(flows) if sender == rank.rank]
    threads = [threading.Thread(target=work, args=(flow, peer)) for work, flow, peer in ends]
    dist.barrier(group=rank.group)
    before = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.cpu_seconds = time.process_time() - before if threads else 0.0
    return found


def transfer(rank: Rank, flows: Sequence[Flow], addresses: Sequence[str], seconds: float) -> FlowsOfRank:
    """Runs the flows that begin or end at this rank."""
    import torch
    import torch.distributed as dist

    incoming = [flow for flow, (_, receiver) in enumerate(flows) if receiver == rank.rank]
    listeners = {flow: socket.create_server((addresses[rank.host], 0)) for flow in incoming}
    ports = torch.zeros(len(flows), dtype=torch.int64)
    for flow, listener in listeners.items():
        ports[flow] = listener.getsockname()[1]
    dist.all_reduce(ports, group=rank.group)

    found = FlowsOfRank({})
    threads = []
    for flow, (sender, receiver) in enumerate(flows):
        if sender == rank.rank:
            out = socket.create_connection(
                (addresses[rank.hosts[receiver]], int(ports[flow])), timeout=LAB_CONNECT.seconds
            )
            threads.append(threading.Thread(target=_send, args=(out,)))
    for flow, listener in listeners.items():
        into, _ = listener.accept()
        listener.close()
        threads.append(threading.Thread(target=_receive, args=(into, seconds, found, flow)))
    dist.barrier(group=rank.group)
    before = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.cpu_seconds = time.process_time() - before if threads else 0.0
    return found


def _send(connection: socket.socket) -> None:
    """Sends until the receiver has had enough and closes."""
    data = bytes(_CHUNK)
    with connection:
        try:
            while True:
                connection.sendall(data)
        except ConnectionError:
            return


def _receive(connection: socket.socket, seconds: float, found: FlowsOfRank, flow: int) -> None:
    """Counts from the first arrival after the warm-up (not included) to the last one in time."""
    buffer = bytearray(_CHUNK)
    count, first, last, total = 0, 0.0, 0.0, 0
    with connection:
        start = time.monotonic() + _WARM_UP
        while last < start + seconds and (size := connection.recv_into(buffer)):
            last, total = time.monotonic(), total + size
            if first:
                count += size
            elif last >= start:
                first = last
    found.rates[flow] = count * 8e-9 / (last - first)
    found.megabytes += total / 1e6


def render(result: CheckResult) -> Table:
    """The result as a table for the terminal."""
    from rich.table import Table

    table = Table(title=result.lab, title_justify="left")
    table.add_column("link")
    for column in ("asked, Gbit/s", "measured", "off by", "CPU, ms/MB", "tries", "CPU stolen"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in result.rows:
        limited = row.asked is not None
        verdict = ("ok" if row.ok else f"off by more than {row.tolerance:.0%}") if limited else "not limited"
        table.add_row(
            row.link,
            f"{row.asked:g}" if limited else "-",
            f"{row.measured:.3g}",
            f"{row.deviation:+.1%}" if limited else "-",
            f"{row.cpu:.2f}",
            str(row.tries),
            f"{row.stolen:.1%}",
            verdict,
        )
    return table
