"""Moves the bytes of a plan: messages between ranks, and copies inside a host.

    receive thread   posts receives a few ahead, in order; reduces terms; passes chunks on; publishes them
    send thread      packs and sends what this rank holds, a few ahead; publishes it inside the host
    copy thread      copies what others published, and what this rank has already

Chunks that lie in one piece of memory are sent from there and received there. All waits end: a rank that is
dead or slow for `timeout` seconds ends the operation everywhere with an error that names chunk, unit and peer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import Group
from weft.comm.deadline import Deadline
from weft.comm.tags import Line, Span, turn
from weft.errors import PeerTimeout, WeftError
from weft.layout import Box, Layout, check_hosts, check_ranks
from weft.reshard.executor.lanes import LandingLane, Lane, OutgoingLane, TakingLane
from weft.reshard.executor.parts import Parts
from weft.reshard.executor.script import Script, ScriptWriter
from weft.reshard.executor.staging import Rings, Slots, Stopped
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
        self._world = tuple(dist.get_process_group_ranks(group.pg))
        check_ranks(plan.ranks, self._hosts())
        with turn(group.pg, Line.RESHARD.title, Deadline.after(group.timeout)):
            self._open(max_staging_bytes, note)

    def _hosts(self) -> dict[int, int]:
        """The host of each rank, by its number in the world."""
        return dict(zip(self._world, self.group.hosts, strict=True))

    def _open(self, max_staging_bytes: int, note: str) -> None:
        plan, group = self.plan, self.group
        text = f"{plan!r}, max_staging_bytes {max_staging_bytes}, {note}"
        lease = group.lease("reshard", text, tags=len(plan.chunks), line=Line.RESHARD)
        self.tags: Span = lease
        self._release = weakref.finalize(self, lease.release)  # by `close`, or with the executor
        check_hosts(plan.meshes, self._hosts())
        self.rank = self._world[group.rank]
        writer = ScriptWriter(plan)
        self.script = writer.of(self.rank)
        received, own = writer.is_published()
        largest = int((plan.chunks.stop - plan.chunks.start).max(initial=0))
        slot = max(64, -(-largest // 64) * 64)
        self.slots = Slots.within(max_staging_bytes, slot=slot, published=received, own=own)
        self.rings = Rings(group, self.slots, received=received, own=own, world=self._world)
        self._runs = 0
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
        lane = Lane(self, before, after, self._runs, record.current(), on_bytes or _ignore)
        written = [*(dst[index] for index in self.plan.boxes_of(self.rank, "dst")), *also_written]

        def end() -> None:
            mark_written(written)
            if then is not None:
                then()

        self._runs += 1
        self._busy = Pending(self, lane, end)
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

    def peer(self, rank: int) -> int:
        """The group's number of a rank of the plan."""
        return self._world.index(rank)

    def close(self) -> None:
        """Frees the staging memory and lets go of the tensors, when a transfer that is under way has ended."""
        if self._busy is not None:
            self._busy.join()
        self._known.clear()
        self.rings.close()
        self._release()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._busy is not None and kind is not None and not issubclass(kind, Exception):
            self._busy.abandon()  # an interrupt does not wait for the peers
        self.close()


class Pending:
    """A reshard under way; `wait` for it. Sources must not change before that."""

    def __init__(self, executor: Executor, lane: Lane, end: Callable[[], None] | None = None) -> None:
        """`end` is called by the last of the threads; at once if there is nothing to do."""
        self._executor = executor
        self._lane = lane
        self._end = end or _do_nothing
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        works: list[LandingLane | OutgoingLane | TakingLane] = [LandingLane(lane), OutgoingLane(lane), TakingLane(lane)]
        self._threads = [
            threading.Thread(target=self._do, args=(work.run,), name=f"weft-reshard-{work.name}", daemon=True)
            for work in works
            if work.has_work
        ]
        self._running = len(self._threads)
        self._done = threading.Event()
        for thread in self._threads:
            thread.start()
        if not self._threads:
            self._end()
            self._done.set()

    def wait(self) -> None:
        """Returns when this rank's part is done; raises what went wrong.

        Of several errors it is the one of a thread that ran out of time: what the others lost, they lost by
        that.
        """
        try:
            self.join()
        except BaseException:  # a signal handler raised, as Ctrl-C does
            self.abandon()
            raise
        if self._errors:
            raise min(self._errors, key=lambda error: not isinstance(error, PeerTimeout))

    def join(self) -> None:
        """Returns when this rank's part is done, or has failed; at once for a thread of its own."""
        # Not by joining threads: Python 3.11 takes a thread for ended whose join was interrupted.
        if threading.current_thread() not in self._threads:
            self._done.wait()

    def abandon(self) -> None:
        """Ends it now, on the peers too: they lose this rank."""
        if not self._done.is_set():
            self._fail(WeftError("the transfer was interrupted"))

    def _do(self, run: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():  # so that tensors made in that mode can be written to, too
                run()
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)
        with self._lock:
            self._running -= 1
            is_last = self._running == 0
        if is_last:
            try:
                self._end()
            except BaseException as error:
                self._errors.append(error)
            self._done.set()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._errors.append(error)
            first = len(self._errors) == 1
        if first:
            self._lane.wait.stop.set()
            self._executor.rings.fail()
            self._lane.break_off()


def _do_nothing() -> None:
    pass


def _ignore(_: int) -> None:
    pass


def check_locals(plan: Plan, rank: int, tensors: Mapping[int, Tensor], side: str) -> dict[int, Box]:
    """The boxes of this rank's tensors, by index, once they are what the plan says; `side` is "src" or "dst"."""
    boxes = plan.boxes_of(rank, side)
    for index, box in boxes.items():
        spec = plan.tensors[index]
        expected = tuple(b - a for a, b in box), spec.dtype if side == "src" else spec.dst_dtype
        given = tensors.get(index)
        got = None if given is None else (tuple(given.shape), given.dtype)
        if got != expected:
            layout: Layout = getattr(spec, side)
            raise ValueError(
                f"local {side} tensor of {spec.name!r} on rank {rank} is {got}, expected {expected} (shape, dtype) for "
                f"{layout.notation(len(spec.shape))} of {spec.shape}; give the shard that the layout says"
            )
    return boxes


def tensors_read(plan: Plan, script: Script) -> set[int]:
    """The tensors, by index, of which a rank reads its source shard: to send it, to keep it, or to add it."""
    chunks = [each.chunk for each in script.sends] + [each.chunk for each in script.receives if each.adds]
    streams = np.unique(plan.chunks.stream[chunks]) if chunks else np.zeros(0, np.int64)
    units = plan.units
    sent = units.tensor[np.isin(units.stream, streams)]
    return {int(index) for index in np.unique(np.concatenate([sent, units.tensor[script.keeps]]))}
