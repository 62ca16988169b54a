"""Carries out one plan, again and again: what is agreed on and made once, and each run of it.

All waits end: a rank that is dead or slow for the group's `timeout` ends the operation everywhere with an error
that names chunk, unit and peer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from weft.comm import Group, Window
from weft.comm.deadline import Deadline
from weft.comm.tags import Line, turn
from weft.layout import check_hosts, check_ranks
from weft.reshard.executor.parts import Parts, check_locals
from weft.reshard.executor.script import Ring, ScriptWriter
from weft.reshard.executor.staging import Rings, Slots, counters_for
from weft.reshard.executor.workers import Assignment, Pending, PlanRun
from weft.reshard.plan import Plan
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
