"""The lab's own processes: a guard, and under it the zygote that imports torch once and forks the ranks.

    caller ── guard ── zygote ─┬─ rank 0
                               └─ rank 1 ...

Nothing outlives the caller, however it ends. The guard waits for the caller's death on a pidfd (not on a
pipe, which a child of the caller may have inherited) and runs nobody else's code, so it cannot be kept from
ending what is below it. What is below it has the kernel's parent-death signal set, in case that the guard
itself is killed. Namespaces, links, queues and the lab's /dev/shm belong to these processes alone and go too.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import sys
import traceback
from multiprocessing import process, spawn
from multiprocessing.connection import Connection

from weft.errors import LabUnavailable
from weft.lab import linux, network
from weft.lab.spec import Ending, LabJob, Refusal, Spec
from weft.lab.supervise import CallerGone, run_job


def main(fd: int, caller: int) -> None:
    """The guard: `fd` is its end of the caller's control socket, `caller` the caller's pid."""
    watched = os.pidfd_open(caller)
    if os.getppid() != caller:
        return  # it died before we could watch it
    linux.adopt_orphans()
    guard = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        linux.die_with_parent(guard)
        os.close(watched)
        _zygote(Connection(fd))
    os.close(fd)
    select.select([watched, os.pidfd_open(zygote)], [], [])
    linux.kill_children()


def _zygote(control: Connection) -> None:
    status = 1
    try:
        linux.adopt_orphans()
        _serve(control)
        status = 0
    except (EOFError, ConnectionError, CallerGone):
        status = 0  # the caller closed the lab
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve(control: Connection) -> None:
    spec: Spec = control.recv()
    try:
        namespaces = () if spec.gbps is None else network.enter(spec.hosts, spec.gbps)
        _import_once()
    except LabUnavailable as error:
        control.send(Refusal(str(error), unavailable=True))
        return
    except BaseException:
        control.send(Refusal(traceback.format_exc()))
        return
    control.send(None)
    while True:
        job: LabJob = control.recv()
        answer: list[Ending] | Refusal
        try:
            _find_function(job)
            answer = run_job(spec, job, namespaces, control)
        except CallerGone:
            raise
        except BaseException:  # whatever the user's module raised on import, SystemExit included
            answer = Refusal(traceback.format_exc())
        control.send(answer)


def _import_once() -> None:
    """Imports what every rank needs, so that a rank starts in milliseconds.

    One thread only: a thread pool that this process had started would be missing in its forks, and the
    first parallel region there would wait for it forever.
    """
    import torch
    import torch.distributed.tensor

    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank does not touch, and so does not copy, what all of them share


def _find_function(job: LabJob) -> None:
    """Does what multiprocessing does in a spawned child, so that the ranks can unpickle the function."""
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # lets `Cluster` refuse to start from here
    try:
        spawn.prepare(dict(job.preparation))
        importlib.import_module(job.module)
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    sys.stdout.flush()
