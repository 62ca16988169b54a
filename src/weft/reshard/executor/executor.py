"""`Executor` carries out one plan, again and again: what is agreed on and made once, and each run of it. `TransferJob`
is one move of some tensors as the user asks for it: planned, checked, carried out.

All waits end: a rank that is dead or slow for the group's `timeout` ends the operation everywhere with an error that
names chunk, unit and peer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import Group, Window
from weft.comm.deadline import Deadline
from weft.comm.tags import Line, turn
from weft.errors import PeerMismatch
from weft.layout import check_hosts, check_ranks
from weft.layout.mesh import DeclaredCluster
from weft.reshard.executor.parts import Parts, check_locals
from weft.reshard.executor.script import Ring, ScriptWriter
from weft.reshard.executor.staging import Rings, Slots, counters_for
from weft.reshard.executor.workers import Assignment, Pending, PlanRun
from weft.reshard.plan import Plan
from weft.reshard.planner import plan_tensors
from weft.reshard.spec import TensorSpec
from weft.reshard.tensors import check_apart, check_source, check_target, mark_written, memory_of
from weft.timeline import record

DEFAULT_STAGING = 256 << 20


class Executor:
    """Carries out one plan, any number of times, with the same buffers. Making one is collective.

    It keeps the tensors of its last run, to find its way in them faster if they come again, until `close`.

    All ranks of the group make it, also those that the plan does not name. They compare the plans' digests
    here, before a byte moves.

        with Executor(plan, group) as executor:
            executor.run({0: source_shard}, {0: destination_shard})
    """

    def __init__(
        self, plan: Plan, group: Group, *, max_staging_bytes: int = DEFAULT_STAGING, note: str = "ready"
    ) -> None:
        """`note` is compared among the ranks as well: what else they must have in common."""
        self.plan, self.group = plan, group
        world = tuple(dist.get_process_group_ranks(group.pg))
        hosts = dict(zip(world, group.hosts, strict=True))
        check_ranks(plan.ranks, hosts)
        with turn(group.pg, Line.RESHARD.title, Deadline.after(group.timeout)):
            text = f"{plan!r}, max_staging_bytes {max_staging_bytes}, {note}"
            lease = group.lease("reshard", text, tags=len(plan.chunks), line=Line.RESHARD)
            self._release = weakref.finalize(self, lease.release)  # by `close`, or with the executor
            check_hosts(plan.meshes, hosts)
            self.rank = world[group.rank]
            writer = ScriptWriter(plan)
            received, own = writer.is_published()
            largest = int((plan.chunks.stop - plan.chunks.start).max(initial=0))
            slot = max(64, -(-largest // 64) * 64)
            self.slots = slots = Slots.within(max_staging_bytes, slot=slot, published=received, own=own)
            counts = {Ring.RECEIVED: slots.receive if received else 0, Ring.OWN: slots.share if own else 0}
            self._window = _share(group, sum(counts.values()) * slots.size)
        self.script = writer.of(self.rank)
        self._job = Assignment(plan, self.script, self.rank, world, slots, lease)
        self.rings = Rings(self._window, world, rank=self.rank, counts=counts, slot_bytes=slots.size)
        self._busy: Pending | None = None
        self._known: dict[str, Parts] = {}

    def start(
        self,
        src: Mapping[int, Tensor],
        dst: Mapping[int, Tensor],
        *,
        on_bytes: Callable[[int], None] | None = None,
        also_written: Sequence[Tensor] = (),
        then: Callable[[], None] | None = None,
    ) -> Pending:
        """Starts to move: `src` and `dst` are this rank's local tensors, by the plan's index of the tensor.

        The sources may not change, and the destinations are not ready, until the handle is waited for.
        `on_bytes` is told, on another thread, of every chunk that has landed. When all is done, on such a thread too,
        the destinations and what is `also_written` (DTensors around them) are marked as written to; `then` is called.
        """
        if self._busy is not None:
            self._busy.wait()
        known = dict(self._known)
        before, after = self._parts(src, "src"), self._parts(dst, "dst")
        if self._known != known:
            self._known.clear()  # unless they may be used
            check_apart(before.by_name, after.by_name)
            self._known = {"src": before, "dst": after}
        run = PlanRun(
            self._job,
            before,
            after,
            self.group,
            self.rings,
            timeout=self.group.timeout,
            recorder=record.current(),
            on_bytes=on_bytes,
        )
        written = [*(dst[index] for index in self.plan.boxes_of(self.rank, "dst")), *also_written]

        def end() -> None:
            mark_written(written)
            if then is not None:
                then()

        self._busy = Pending(run, run.workers(), end)
        return self._busy

    def _parts(self, tensors: Mapping[int, Tensor], side: str) -> Parts:
        """Where the chunks lie in the tensors; the same as in the run before if they are the same."""
        boxes = check_locals(self.plan, self.rank, tensors, side)
        mine = {index: memory_of(tensors[index]) for index in boxes}
        if side not in self._known or not self._known[side].is_of(mine):
            for index in boxes:
                (check_source if side == "src" else check_target)(self.plan.tensors[index].name, tensors[index])
            self._known[side] = Parts(self.plan, mine, boxes)
        return self._known[side]

    def run(self, src: Mapping[int, Tensor], dst: Mapping[int, Tensor]) -> None:
        """`start`, and wait."""
        self.start(src, dst).wait()

    def close(self) -> None:
        """Frees the staging memory and lets go of the tensors, when a transfer that is under way has ended."""
        if self._busy is not None:
            self._busy.join()
        self._known.clear()
        self.rings.close()
        if self._window is not None:
            self._window.close()
        self._release()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._busy is not None and kind is not None and not issubclass(kind, Exception):
            self._busy.abandon()  # an interrupt does not wait for the peers
        self.close()


def _share(group: Group, nbytes: int) -> Window | None:
    """Memory that the ranks of a host share, `nbytes` of each, with the counters of rings. Collective."""
    if nbytes == 0:
        return None
    neighbours = max(group.hosts.count(host) for host in group.hosts)
    counters = counters_for(neighbours)
    return Window.create(group.pg, nbytes, counters_per_rank=counters, timeout=group.timeout, line=Line.RESHARD)


@dataclass(frozen=True)
class TransferOptions:
    """How to move: what the planner and the executor take."""

    cluster: DeclaredCluster | None
    strategy: str
    chunk_bytes: int | None
    max_staging_bytes: int


class TransferJob:
    """Tensors to move, with this rank's shards of both sides. Making one is collective.

    src, out: the memory of local tensors by name; what is missing in `out` is made here
    written:  the users' tensors that `out` is the memory of
    note:     what else the ranks must have in common
    """

    def __init__(
        self,
        comm: Group,
        specs: Sequence[TensorSpec],
        src: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
        options: TransferOptions,
        *,
        device: torch.device,
        note: str,
        written: Sequence[Tensor] = (),
    ) -> None:
        self.comm, self.specs, self.options = comm, tuple(specs), options
        self.rank = dist.get_process_group_ranks(comm.pg)[comm.rank]
        self.device, self._written = device, tuple(written)
        plan = plan_tensors(specs, cluster=options.cluster, strategy=options.strategy, chunk_bytes=options.chunk_bytes)
        self.src = {i: src[spec.name] for i, spec in enumerate(specs) if spec.name in src}
        self.out = {i: out[spec.name] for i, spec in enumerate(specs) if spec.name in out}
        for i, spec in enumerate(specs):
            if self.rank in spec.dst.mesh.ranks and i not in self.out:
                shape = spec.dst.local_shape(spec.shape, self.rank)
                self.out[i] = torch.empty(shape, dtype=spec.dst_dtype, device=device)
        problem = self._problem(plan)
        try:
            state = "ready" if problem is None else f"refused: {problem}"
            self.executor = Executor(plan, comm, max_staging_bytes=options.max_staging_bytes, note=f"{note}, {state}")
        except PeerMismatch:
            if problem is not None:
                raise problem from None
            raise

    def _problem(self, plan: Plan) -> ValueError | None:
        try:
            for tensors, side in ((self.src, "src"), (self.out, "dst")):
                check_locals(plan, self.rank, tensors, side)
        except ValueError as error:
            return error
        return None

    def run(self, *, progress: bool = False) -> dict[str, Tensor]:
        """Moves, and returns this rank's shards of the result by name."""
        shown = progress and self.rank == min(min(spec.dst.mesh.ranks) for spec in self.specs)
        total = sum(tensor.numel() * self.specs[i].wire_dtype.itemsize for i, tensor in self.out.items())
        with self.executor, progress_bar(total, show=shown) as advance:
            on_bytes = advance if shown else None
            self.executor.start(self.src, self.out, on_bytes=on_bytes, also_written=self._written).wait()
        return self.result()

    def start(self) -> Pending:
        """Starts to move copies of the sources, which may change then; the executor is closed when all is done."""
        read = self.executor.script.tensors_read(self.executor.plan)
        self.src = {i: tensor.clone() if i in read else tensor for i, tensor in self.src.items()}
        return self.executor.start(self.src, self.out, also_written=self._written, then=self.executor.close)

    def result(self) -> dict[str, Tensor]:
        """This rank's shards by name; an empty tensor where it is outside of the destination."""
        empty = {spec.name: torch.empty(0, dtype=spec.dst_dtype, device=self.device) for spec in self.specs}
        return {**empty, **{self.specs[i].name: tensor for i, tensor in self.out.items()}}


class Handle:
    """A reshard under way. `wait` returns what the function would have returned.

    The source was copied: it may be changed or freed at once. What is written into (`out=`, DTensors of a state dict)
    holds anything until `wait` has returned. A handle may be dropped: the transfer goes on without it, as the other
    ranks need it.
    """

    def __init__(self, pending: Pending, finish: Callable[[], Any]) -> None:
        self._pending, self._finish = pending, finish
        self._lock = threading.Lock()
        self._is_finished = False
        self._result: Any = None
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def wait(self) -> Any:
        """The result; raises what went wrong. Waiting again gives the same."""
        with self._lock:
            if not self._is_finished:
                self._pending.wait()
                # The result is of the mode in which it was asked for, wherever it is waited for.
                with torch.inference_mode(self._modes[0]), torch.set_grad_enabled(self._modes[1]):
                    self._result = self._finish()
                self._is_finished = True
                self._finish = _nothing  # it holds the tensors
            return self._result

    def __repr__(self) -> str:
        return f"<Handle of a reshard, {'finished' if self._is_finished else 'not waited for yet'}>"


def _nothing() -> None:
    pass


@contextmanager
def progress_bar(total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function that is told of bytes, from any thread; it draws a bar on a terminal's stderr if `show`."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("reshard"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task("reshard", total=total)
        yield lambda count: bar.advance(task, count)
