"""One rank of a run: a process forked from the lab's zygote, which has imported torch already."""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from weft.lab import linux, network
from weft.lab.spec import Ending, How, LabJob, Spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

STACKS_SIGNAL = signal.SIGUSR1
"""On this signal a rank writes the Python stacks of its threads to the file that the lab gave it."""


@dataclass(frozen=True)
class Rank:
    """Who a rank is; the first argument of the function that `Cluster.run` runs.

    rank:   0 .. world - 1; `rank == host * devices + device`
    host:   which network card it sits behind
    device: its place on that host
    hosts:  the host of every rank: `hosts[rank] == host`
    group:  the gloo process group of all ranks, already connected; also torch's default group
    mesh:   all ranks as a (hosts, devices) mesh with the axes "host" and "device"
    """

    rank: int
    world: int
    host: int
    device: int
    hosts: tuple[int, ...]
    group: ProcessGroup
    mesh: DeviceMesh


@dataclass(frozen=True)
class Seat:
    """What the zygote has ready for one rank.

    network: a descriptor of its host's network namespace, None on plain loopback
    memory:  the directory that becomes its /dev/shm, shared by the ranks of one host, None on plain loopback
    store:   a listening descriptor on host 0, for the rendezvous; `port` is its port
    reports: where the Ending goes; the rank then stays until it is told to go, so that no peer loses it
    stacks:  a file for faulthandler
    """

    rank: int
    network: int | None
    memory: str | None
    store: int
    port: int
    reports: Connection
    stacks: int


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
        "127.0.0.1" if seat.network is None else network.address(0),
        seat.port,
        spec.world,
        is_master=seat.rank == 0,
        master_listen_fd=seat.store if seat.rank == 0 else None,
        timeout=limit,
    )
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=spec.world, timeout=limit)
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
