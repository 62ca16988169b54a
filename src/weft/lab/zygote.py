"""The lab's own processes: a guard, and under it the zygote that imports torch once, forks the ranks and watches them.

    caller ── guard ── zygote ─┬─ rank 0
                               ├─ rank 1 ...
                               └─ commander ── ...      (`command`)

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
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, current_process, spawn
from multiprocessing.connection import Connection

from weft.comm.deadline import LAB_GRACE, LAB_STACKS
from weft.errors import LabUnavailable
from weft.lab import linux
from weft.lab.command import Hosts, fork_commander
from weft.lab.rank import STACKS_SIGNAL, Ending, How, LabJob, Refusal, Seat, Spec, rank_main


def main(fd: int, requests: int, caller: int) -> None:
    """The guard: its ends of the caller's control socket and of that for commands, and the caller's pid."""
    watched = os.pidfd_open(caller)
    if os.getppid() != caller:
        return  # it died before we could watch it
    linux.adopt_orphans()
    guard = os.getpid()
    zygote = os.fork()
    if zygote == 0:
        linux.die_with_parent(guard)
        os.close(watched)
        _zygote(Connection(fd), socket.socket(fileno=requests))
    os.close(fd)
    os.close(requests)
    select.select([watched, os.pidfd_open(zygote)], [], [])
    linux.kill_children()


def _zygote(control: Connection, requests: socket.socket) -> None:
    status = 1
    try:
        linux.adopt_orphans()
        _serve(control, requests)
        status = 0
    except (EOFError, ConnectionError, CallerGone):
        status = 0  # the caller closed the lab
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve(control: Connection, requests: socket.socket) -> None:
    spec: Spec = control.recv()
    try:
        namespaces = () if spec.gbps is None else linux.enter(spec.hosts, spec.gbps)
        _import_once()
        commander = fork_commander(Hosts.make(namespaces, _make_wire(spec), spec.threads), requests, control)
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
            answer = run_job(spec, job, namespaces, control, commander)
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
    current = current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # lets `Cluster` refuse to start from here
    try:
        spawn.prepare(dict(job.preparation))
        importlib.import_module(job.module)
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    sys.stdout.flush()


class CallerGone(Exception):
    """The process that asked for the run has closed its end: nobody waits for the answer."""


def run_job(spec: Spec, job: LabJob, namespaces: Sequence[int], control: Connection, commander: int) -> list[Ending]:
    """The endings of all ranks, by rank. Raises CallerGone when `control` closes meanwhile.

    All that the ranks started is gone then; what the `commander` has started is not touched.
    """
    start = time.monotonic()
    memories = _make_memories(spec)
    wire = _make_wire(spec)
    processes: list[_Process] = []
    try:
        with _listen(namespaces) as store:
            for rank in range(spec.world):
                host = rank // spec.devices
                ours, theirs = Pipe()
                seat = Seat(
                    rank=rank,
                    network=namespaces[host] if namespaces else None,
                    memory=memories[host] if memories else None,
                    store=store.fileno(),
                    port=store.getsockname()[1],
                    reports=theirs,
                    stacks=os.memfd_create("weft-lab-stacks"),
                    wire=wire,
                )
                not_theirs = [control, ours, *(process.reports for process in processes)]
                processes.append(_fork(spec, job, seat, ours, not_theirs, store))
        _Watch(processes, control, start).until_ended(start + job.run.timeout)
        return [process.ending for process in processes if process.ending is not None]
    finally:
        linux.kill_children(spare=commander)
        for process in processes:
            process.close()
        if wire is not None:
            os.close(wire)
        for memory in memories:
            shutil.rmtree(memory)


def _make_memories(spec: Spec) -> list[str]:
    """A directory for each host in the lab's own /dev/shm; on plain loopback there is no such thing."""
    if spec.gbps is None:
        return []
    memories = [f"/dev/shm/host{host}" for host in range(spec.hosts)]
    for memory in memories:
        os.mkdir(memory)
        os.chmod(memory, 0o1777)  # what /dev/shm has
    return memories


def _make_wire(spec: Spec) -> int | None:
    """The wire of one run, which goes with its ranks."""
    if spec.cards != "dma":
        return None
    from weft.lab.card import make_wire

    assert spec.gbps is not None
    return make_wire(spec.hosts, spec.world, gbps=spec.gbps, latency_us=spec.latency_us, staged=spec.is_staged)


def _listen(namespaces: Sequence[int]) -> socket.socket:
    """The rendezvous' listening socket on host 0. It exists before any rank does, so none has to retry."""
    if not namespaces:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    with linux.inside(namespaces[0]):
        return socket.create_server((linux.address(0), 0), backlog=1024)


@dataclass
class _Process:
    """A forked rank. `ending` is None until it is known.

    heard:  nothing more will be read from `reports`
    lost:   the last time at which it was known to live, once it exits
    exited: it is gone and reaped
    """

    rank: int
    pid: int
    pidfd: int
    reports: Connection
    stacks: int
    ending: Ending | None = None
    heard: bool = False
    lost: float | None = None
    exited: bool = False

    @property
    def failed(self) -> bool:
        return self.ending is not None and self.ending.how in (How.RAISED, How.DIED)

    def stack(self) -> str:
        return os.pread(self.stacks, 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.stacks)
        self.reports.close()


def _fork(
    spec: Spec, job: LabJob, seat: Seat, ours: Connection, not_theirs: list[Connection], store: socket.socket
) -> _Process:
    sys.stdout.flush()  # or the rank would print it once more
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for connection in not_theirs:
                connection.close()
            if seat.rank != 0:
                store.close()  # so that it closes with rank 0
            rank_main(spec, job, seat, zygote)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    seat.reports.close()
    return _Process(seat.rank, pid, os.pidfd_open(pid), ours, seat.stacks)


class _Watch:
    """The loop over what the ranks report and how their processes end."""

    def __init__(self, processes: Sequence[_Process], control: Connection, start: float) -> None:
        self.processes = processes
        self.control = control
        self.seen = start  # no process that is not `lost` was exiting at this time
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        for process in processes:
            self.selector.register(process.reports, selectors.EVENT_READ, process)
            self.selector.register(process.pidfd, selectors.EVENT_READ, process)

    def until_ended(self, deadline: float) -> None:
        """Returns when every process has an ending: its own, or the one that its time being over gave it."""
        with self.selector:
            failed = False
            while any(process.ending is None for process in self.processes):
                if not self._next_events(deadline):
                    self._give_up(How.STOPPED if failed else How.STUCK)
                if not failed and any(process.failed for process in self.processes):
                    failed = True
                    deadline = time.monotonic() + LAB_GRACE.seconds
            self._let_go()

    def _let_go(self) -> None:
        """Tells those that wait to exit, and gives them and those that raised the time to do so."""
        going = [process for process in self.processes if not process.exited]
        for process in going:
            if process.ending is not None and process.ending.how is How.RETURNED:
                with suppress(OSError):  # it may have died just now
                    process.reports.send(None)
        deadline = time.monotonic() + LAB_GRACE.seconds
        while not all(process.exited for process in going) and self._next_events(deadline):
            pass

    def _next_events(self, deadline: float) -> bool:
        """Waits for something to happen and takes note of it; False when nothing did until the deadline."""
        events = self.selector.select(max(0.0, deadline - time.monotonic()))
        if not events:
            return False
        # An exiting process closes its connections before its end shows here, so what its peers raise can
        # reach us first. It is exiting by then, though, and so gets the earlier time of the two.
        now = time.monotonic()
        for process in self.processes:
            if process.lost is None and not process.exited and linux.is_exiting(process.pid):
                process.lost = self.seen
        for key, _ in events:
            if key.fileobj is self.control:
                raise CallerGone
            process = key.data
            if key.fileobj is not process.reports:
                self._reap(process)
            elif not process.heard:
                self._hear(process)
        self.seen = now
        return True

    def _hear(self, process: _Process) -> None:
        with suppress(EOFError, OSError):  # it is dying: how, its pidfd will tell
            process.ending = process.reports.recv()
        process.heard = True
        self.selector.unregister(process.reports)

    def _reap(self, process: _Process) -> None:
        self.selector.unregister(process.pidfd)
        process.exited = True
        if not process.heard and process.reports.poll():
            self._hear(process)  # its report arrived with its exit
        _, status = os.waitpid(process.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if process.ending is None or (code != 0 and process.ending.how is How.RETURNED):
            late = " after it had returned" if process.ending is not None else ""
            assert process.lost is not None
            process.ending = Ending(process.rank, How.DIED, process.lost, _exit_text(code) + late, process.stack())

    def _give_up(self, how: How) -> None:
        running = [process for process in self.processes if process.ending is None]
        if how is How.STUCK:
            _ask_for_stacks(running)
        for process in running:
            detail = process.stack() or "  no stack: the process did not answer"
            process.ending = Ending(process.rank, how, time.monotonic(), "it was still running", detail)
            os.kill(process.pid, signal.SIGKILL)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"killed by {name}"


def _ask_for_stacks(processes: Sequence[_Process]) -> None:
    """Has every process write its stacks, and waits until all have, or until one clearly will not."""
    for process in processes:
        os.kill(process.pid, STACKS_SIGNAL)
    deadline = time.monotonic() + LAB_STACKS.seconds
    before: list[str] = []
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = [process.stack() for process in processes]
        if all(now) and now == before:
            return
        before = now
