"""A lab as values (what it is asked to be, what the caller and the lab's process send each other, how a run ended),
and one rank of a run: a process forked from the lab's zygote, which has imported torch already.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import PeerTimeout, RankFailed
from weft.lab import linux
from weft.lab.linux import MAX_GBPS, MAX_HOSTS, MIN_GBPS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


CARDS = ("tcp", "dma")
MAX_DMA_RANKS = 512


@dataclass(frozen=True)
class Spec:
    """A lab: `hosts` hosts of `devices` ranks; rank r is device `r % devices` of host `r // devices`.

    gbps is the payload rate of each host's card in Gbit/s, or None for plain loopback. `cards` are "tcp", or "dma" with
    a latency of `latency_us` microseconds.
    """

    name: str
    hosts: int
    devices: int
    gbps: float | None
    threads: int
    cards: str = "tcp"
    latency_us: float = 0.0
    is_staged: bool = False  # DMA cards copy through shared memory, as where no process may read another's

    def __post_init__(self) -> None:
        for what in ("hosts", "devices", "threads"):
            value = getattr(self, what)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what} is {value!r}; expected a whole number, at least 1")
        if self.hosts > MAX_HOSTS and self.gbps is not None:
            raise ValueError(
                f"hosts is {self.hosts}; the lab's switch has {MAX_HOSTS} addresses (10.77.0.0/24). "
                "Use fewer hosts with more devices each, or gbps=None for plain loopback"
            )
        if self.gbps is not None and not _is_rate(self.gbps):
            raise ValueError(
                f"gbps is {self.gbps!r}; expected a rate in Gbit/s from {MIN_GBPS:g} to {MAX_GBPS:g}, or "
                "None for plain loopback without rate limits"
            )
        self._check_cards()
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name):
            raise ValueError(f"name is {self.name!r}; expected 1 to 64 letters, digits, dots, dashes or underscores")

    def _check_cards(self) -> None:
        if self.cards not in CARDS:
            raise ValueError(f"cards is {self.cards!r}; expected {' or '.join(map(repr, CARDS))}")
        if self.cards == "dma" and (self.gbps is None or self.world > MAX_DMA_RANKS):
            raise ValueError(
                f"cards is 'dma' with gbps {self.gbps} and {self.world} ranks; expected a rate in Gbit/s, which they "
                f"keep, and up to {MAX_DMA_RANKS} ranks"
            )
        number = isinstance(self.latency_us, (int, float)) and not isinstance(self.latency_us, bool)
        if not number or not 0 <= self.latency_us <= 1e6:
            raise ValueError(f"latency_us is {self.latency_us!r}; expected microseconds, from 0 to a million")
        if self.latency_us and self.cards != "dma":
            raise ValueError(
                f"latency_us is {self.latency_us} with cards 'tcp', which have the machine's; leave it out"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.hosts * self.devices

    def describe(self) -> str:
        """One line.

        >>> Spec("a", hosts=2, devices=2, gbps=1.0, threads=1).describe()
        'lab a: 2 hosts x 2 devices, each host behind one full-duplex card of 1 Gbit/s; loopback inside a host is not limited'
        >>> Spec("a", hosts=2, devices=2, gbps=None, threads=1).describe()
        'lab a: 2 hosts x 2 devices on plain loopback: no namespaces, no rate limit, hosts in name only'
        """  # noqa: E501
        shape = f"lab {self.name}: {self.hosts} hosts x {self.devices} devices"
        if self.gbps is None:
            return f"{shape} on plain loopback: no namespaces, no rate limit, hosts in name only"
        if self.cards == "dma":
            latency = f" and {self.latency_us:g} us" if self.latency_us else ""
            return (
                f"{shape}, each host behind one full-duplex DMA card of {self.gbps:g} Gbit/s{latency}; "
                "copies inside a host are not limited"
            )
        return (
            f"{shape}, each host behind one full-duplex card of {self.gbps:g} Gbit/s; "
            "loopback inside a host is not limited"
        )


def _is_rate(gbps: object) -> bool:
    number = isinstance(gbps, (int, float)) and not isinstance(gbps, bool)
    return number and math.isfinite(gbps) and MIN_GBPS <= gbps <= MAX_GBPS  # type: ignore[operator, arg-type]


@dataclass(frozen=True)
class LabRun:
    """What was run: the function's name, on hosts of `devices` ranks, with `timeout` seconds to finish."""

    function: str
    devices: int
    timeout: float

    def who(self, rank: int) -> str:
        """
        >>> LabRun("f", devices=2, timeout=60.0).who(3)
        'rank 3 (host 1, device 1)'
        """
        return f"rank {rank} (host {rank // self.devices}, device {rank % self.devices})"


@dataclass(frozen=True)
class LabJob:
    """One run: `payload` is the pickled `(fn, args)`, which only the ranks unpickle.

    module is where fn is defined, and preparation what multiprocessing's own children get to find it (path,
    directory, main script): the lab's process imports it once, before it forks the ranks.
    """

    payload: bytes
    module: str
    preparation: Mapping[str, object]
    run: LabRun


@dataclass(frozen=True)
class Refusal:
    """The lab's process cannot do what it was asked; `unavailable` when this machine is the reason."""

    text: str
    unavailable: bool = False


class How(Enum):
    """The ways in which a rank's part of a run ends."""

    RETURNED = "returned"
    RAISED = "raised"  # the function raised in the rank
    DIED = "died"  # the process ended without a word: a signal, or os._exit
    STUCK = "stuck"  # still running when the time was over
    STOPPED = "stopped"  # still running when the grace after another rank's failure was over


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    seconds: on the monotonic clock, which all processes of a machine share. For RAISED it is read by the
             rank itself; for DIED it is a time at which the process was known to live, so that a death comes
             before what its peers raise because of it, or at the same time.
    summary: one line, such as `ValueError: boom` or `killed by SIGKILL`
    detail:  the traceback of RAISED, the stacks of STUCK, what faulthandler wrote before DIED
    data:    the pickled result of RETURNED
    """

    rank: int
    how: How
    seconds: float
    summary: str = ""
    detail: str = ""
    data: bytes = b""


def failure(endings: Sequence[Ending], run: LabRun) -> RankFailed | PeerTimeout | None:
    """The error that a run's endings amount to, or None when every rank returned."""
    cause = first_failure(endings)
    if cause is not None:
        return RankFailed(_failed_text(cause, endings, run))
    stuck = [ending for ending in endings if ending.how is How.STUCK]
    if stuck:
        return PeerTimeout(_stuck_text(stuck, endings, run), seconds=run.timeout)
    return None


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that failed first: the cause, where the others only saw their connection to it break."""
    failed = [ending for ending in endings if ending.how in (How.RAISED, How.DIED)]
    return min(failed, key=lambda ending: (ending.seconds, ending.how is How.RAISED), default=None)


def _failed_text(cause: Ending, endings: Sequence[Ending], run: LabRun) -> str:
    lines = [f"{run.who(cause.rank)} of {len(endings)} failed first in `{run.function}`: {cause.summary}"]
    if cause.detail:
        lines.append(cause.detail.rstrip())
    others = [ending for ending in endings if ending is not cause and ending.how is not How.RETURNED]
    if others:
        lines.append(f"{len(others)} of the other ranks ended after it:")
        lines += [f"  {run.who(ending.rank)} {ending.how.value}: {ending.summary:.200}" for ending in others]
    return "\n".join(lines)


def _stuck_text(stuck: Sequence[Ending], endings: Sequence[Ending], run: LabRun) -> str:
    names = ", ".join(str(ending.rank) for ending in stuck)
    count = f"{len(stuck)} of {len(endings)} ranks of `{run.function}`"
    lines = [f"{count} that were still running, ranks {names}; they were stopped. They were here:"]
    for ending in stuck:
        lines += [f"{run.who(ending.rank)}:", ending.detail.rstrip()]
    return "\n".join(lines)


STACKS_SIGNAL = signal.SIGUSR1
"""On this signal a rank writes the Python stacks of its threads to the file that the lab gave it."""


@dataclass(frozen=True)
class Rank:
    """Who a rank is; the first argument of the function that `Cluster.run` runs.

    rank:   0 .. world - 1; `rank == host * devices + device`
    host:   which network card it sits behind
    device: its place on that host
    hosts:  the host of every rank: `hosts[rank] == host`
    group:  the process group of all ranks, gloo's or that of DMA cards, already connected; also torch's default group
    mesh:   all ranks as a (hosts, devices) mesh with the axes "host" and "device"
    """

    rank: int
    world: int
    host: int
    device: int
    hosts: tuple[int, ...]
    group: ProcessGroup
    mesh: DeviceMesh

    def carried(self) -> tuple[int, int]:
        """Bytes that this host's card has sent and received so far, with the headers of TCP; 0 on plain loopback."""
        counted: Any = getattr(self.group, "carried", None)
        if counted is not None:
            return counted()  # type: ignore[no-any-return]
        return parse_carried(Path("/proc/net/dev").read_text(encoding="ascii"), "eth0")


def parse_carried(table: str, card: str) -> tuple[int, int]:
    """The bytes that a card has sent and received, from the text of `/proc/net/dev`.

    >>> parse_carried("  eth0:  10 1 0 0 0 0 0 0  77 2 0 0 0 0 0 0", "eth0")
    (77, 10)
    """
    for line in table.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == card:
            return int(counters.split()[8]), int(counters.split()[0])
    return 0, 0


@dataclass(frozen=True)
class Seat:
    """What the zygote has ready for one rank.

    network: a descriptor of its host's network namespace, None on plain loopback
    memory:  the directory that becomes its /dev/shm, shared by the ranks of one host, None on plain loopback
    store:   a listening descriptor on host 0, for the rendezvous; `port` is its port
    reports: where the Ending goes; the rank then stays until it is told to go, so that no peer loses it
    stacks:  a file for faulthandler
    wire:    a descriptor of the memory in which DMA cards meet, None without such cards
    """

    rank: int
    network: int | None
    memory: str | None
    store: int
    port: int
    reports: Connection
    stacks: int
    wire: int | None = None


def rank_main(spec: Spec, job: LabJob, seat: Seat, zygote: int) -> None:
    """The whole life of a rank's process; it never returns."""
    atexit._clear()  # what the zygote registered is the zygote's
    linux.die_with_parent(zygote)
    os.setsid()
    faulthandler.enable(seat.stacks)
    faulthandler.register(STACKS_SIGNAL, seat.stacks)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # whole lines among the ranks'
    ending = _run(spec, job, seat)
    try:
        seat.reports.send(ending)
        if ending.how is How.RETURNED:
            seat.reports.recv()
    except (EOFError, OSError):
        pass  # the zygote is gone, and so is this process in a moment
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(spec: Spec, job: LabJob, seat: Seat) -> Ending:
    try:
        _take_seat(seat)
        function, args = pickle.loads(job.payload)
        result = function(_connect(spec, seat, job.run.timeout), *args)
        data = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a rank too, and the caller must know
        seconds = time.monotonic()
        outside = error.__traceback__ and error.__traceback__.tb_next  # without this function
        detail = "".join(traceback.format_exception(type(error), error, outside))
        return Ending(seat.rank, How.RAISED, seconds, _one_line(error), detail)
    return Ending(seat.rank, How.RETURNED, time.monotonic(), data=data)


def _one_line(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _take_seat(seat: Seat) -> None:
    if seat.network is not None:
        linux.setns(seat.network, linux.CLONE_NEWNET)
    if seat.memory is not None:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount(seat.memory, "/dev/shm", "", linux.MS_BIND)


def _connect(spec: Spec, seat: Seat, timeout: float) -> Rank:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(spec.threads)
    # The only way to name the card that also holds for the groups which the function makes later
    # (`dist.new_group`, a mesh's): those take no device, and would look up this machine's host name.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if seat.network is None else "eth0"
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1" if seat.network is None else linux.address(0),
        seat.port,
        spec.world,
        is_master=seat.rank == 0,
        master_listen_fd=seat.store if seat.rank == 0 else None,
        timeout=limit,
    )
    backend = "gloo"
    if seat.wire is not None:
        from weft.lab.backend import BACKEND, register

        register(seat.wire, seat.rank // spec.devices)
        backend = BACKEND
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=spec.world, timeout=limit)
    group: Any = dist.group.WORLD
    return Rank(
        rank=seat.rank,
        world=spec.world,
        host=seat.rank // spec.devices,
        device=seat.rank % spec.devices,
        hosts=tuple(rank // spec.devices for rank in range(spec.world)),
        group=group,
        mesh=init_device_mesh("cpu", (spec.hosts, spec.devices), mesh_dim_names=("host", "device")),
    )
