"""Do a lab's links carry what was asked of them? Plain TCP between ranks, one way, both ways, all at once."""

from __future__ import annotations

import os
import socket
import threading
import time
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
TRIES = 5
"""A link that is off is measured again, and the best try counts: while the hypervisor runs somebody else on
this machine's cores, no link of it gets anywhere."""

_WARM_UP = 0.3  # seconds that are not counted
_CHUNK = 1 << 18  # bytes at a time: they stay in the cache
Flow = tuple[int, int]  # sending rank, receiving rank


@dataclass(frozen=True)
class Row:
    """One measurement; `asked` is None where there is no limit. Rates are Gbit/s of payload.

    stolen: the share of the machine's CPU time that the hypervisor kept for others meanwhile
    """

    link: str
    asked: float | None
    measured: float
    tries: int = 1
    stolen: float = 0.0

    @property
    def deviation(self) -> float:
        """How far off, as a share of what was asked: -0.02 is 2 % too slow."""
        return 0.0 if self.asked is None else self.measured / self.asked - 1.0

    @property
    def ok(self) -> bool:
        return abs(self.deviation) <= TOLERANCE


@dataclass(frozen=True)
class CheckResult:
    """What was measured in a lab; `ok` when every link is within 5 % of its rate."""

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


def check(hosts: int = 2, gbps: float | None = 1.0, *, devices: int = 2, seconds: float = 1.7) -> CheckResult:
    """Starts a lab and measures it; `seconds` is how long each measurement counts, after a short warm-up."""
    if hosts < 2:
        raise ValueError(f"hosts is {hosts}; expected at least 2, because links between hosts are measured")
    with Cluster(hosts, devices, gbps) as cluster:
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
    if devices > 1:
        yield _Pattern("inside host 0", ((0, 1),), limited=False)


def _measure(cluster: Cluster, pattern: _Pattern, seconds: float) -> list[Row]:
    """The rows of the try whose worst row is best, of as many tries as it takes to be within tolerance."""
    attempts: list[list[Row]] = []
    while len(attempts) < TRIES and not any(_worst(rows) <= TOLERANCE for rows in attempts):
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
    received = cluster.run(transfer, pattern.flows, addresses, seconds, timeout=seconds + LAB_RUN.seconds)
    cores = os.cpu_count() or 1
    stolen = (_stolen_seconds() - before) / ((time.monotonic() - start) * cores)
    rates = [received[receiver][flow] for flow, (_, receiver) in enumerate(pattern.flows)]
    if not pattern.each:
        return [Row(pattern.name, asked, sum(rates), stolen=stolen)]
    return [Row(name, asked, rate, stolen=stolen) for name, rate in zip(pattern.each, rates, strict=True)]


def _stolen_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def transfer(rank: Rank, flows: Sequence[Flow], addresses: Sequence[str], seconds: float) -> dict[int, float]:
    """Runs the flows that begin or end at this rank; Gbit/s of those that end here, by their index."""
    import torch
    import torch.distributed as dist

    incoming = [flow for flow, (_, receiver) in enumerate(flows) if receiver == rank.rank]
    listeners = {flow: socket.create_server((addresses[rank.host], 0)) for flow in incoming}
    ports = torch.zeros(len(flows), dtype=torch.int64)
    for flow, listener in listeners.items():
        ports[flow] = listener.getsockname()[1]
    dist.all_reduce(ports, group=rank.group)

    rates: dict[int, float] = {}
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
        threads.append(threading.Thread(target=_receive, args=(into, seconds, rates, flow)))
    dist.barrier(group=rank.group)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def _send(connection: socket.socket) -> None:
    """Sends until the receiver has had enough and closes."""
    data = bytes(_CHUNK)
    with connection:
        try:
            while True:
                connection.sendall(data)
        except ConnectionError:
            return


def _receive(connection: socket.socket, seconds: float, rates: dict[int, float], flow: int) -> None:
    """Counts from the first arrival after the warm-up (not included) to the last one in time."""
    buffer = bytearray(_CHUNK)
    count, first, last = 0, 0.0, 0.0
    with connection:
        start = time.monotonic() + _WARM_UP
        while last < start + seconds and (size := connection.recv_into(buffer)):
            last = time.monotonic()
            if first:
                count += size
            elif last >= start:
                first = last
    rates[flow] = count * 8e-9 / (last - first)


def render(result: CheckResult) -> Table:
    """The result as a table for the terminal."""
    from rich.table import Table

    table = Table(title=result.lab, title_justify="left")
    table.add_column("link")
    for column in ("asked, Gbit/s", "measured", "off by", "tries", "CPU stolen"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in result.rows:
        limited = row.asked is not None
        verdict = ("ok" if row.ok else f"off by more than {TOLERANCE:.0%}") if limited else "not limited"
        table.add_row(
            row.link,
            f"{row.asked:g}" if limited else "-",
            f"{row.measured:.3g}",
            f"{row.deviation:+.1%}" if limited else "-",
            str(row.tries),
            f"{row.stolen:.1%}",
            verdict,
        )
    return table
