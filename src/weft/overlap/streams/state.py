"""What the stream executor keeps for a group: streams, peers' memory, tables, and the flag of late kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.deadline import THREAD_END, Deadline
from weft.errors import PeerLost, PeerTimeout
from weft.kernels.triton import Late
from weft.overlap.executor.call import Request, call_text
from weft.overlap.executor.context import Context, Statement, context_of
from weft.overlap.executor.resources import SMALLEST_BYTES, size_class
from weft.overlap.plan import Op, OverlapPlan, Transport
from weft.overlap.streams.device import Peers, StreamEvent, can_map, device_of, map_peers
from weft.overlap.streams.plans import check_plan, plan_on_streams


def waited_for(plan: OverlapPlan, number: int) -> str:
    """What a kernel waited for when it gave up on counter `number`.

    >>> plan = OverlapPlan(Op.ALL_GATHER, 64, 32, 8, "float32", (0, 0), tile_m=48)
    >>> waited_for(plan, 0)
    'all_gather_matmul: rows 0 to 48 of x, from rank 0 and 1'
    """
    if plan.op.gathers:
        start, end = number * plan.tile_m, min((number + 1) * plan.tile_m, plan.m)
        bounds = plan.shard_bounds
        ranks = [str(r) for r in range(plan.size) if bounds[r] < end and start < bounds[r + 1]]
        return f"{plan.op.value}: rows {start} to {end} of x, from rank {' and '.join(ranks)}"
    if plan.op is Op.REDUCE_SCATTER and plan.transport is Transport.WINDOWS:
        return f"{plan.op.value}: the part of rank {number}"
    return f"{plan.op.value}: group {number} of this rank's own tiles"


_MOST_TABLES = 256
_Table = TypeVar("_Table")


@dataclass(frozen=True, eq=False)
class _LateFlag:
    """The flag of late kernels after a call, on its way to the host."""

    plan: OverlapPlan
    flag: Tensor
    there: StreamEvent


class State:
    """Of one rank, for one group on one device. Making it is collective."""

    def __init__(self, context: Context, like: Tensor) -> None:
        # Not the context, which keeps this: a circle would keep the group's threads after the group was destroyed.
        self.rank, self.size, self.hosts, self.line = context.rank, context.size, context.hosts, context.line
        self._agreement = context.agreement
        self.pg: ProcessGroup = context.group.pg
        self.timeout = context.group.timeout
        self.late = Late.on(like.device)
        self.device = device_of(like, self.late)
        self.maps = can_map(self.pg, context.hosts, like) and not context.no_windows
        self._like = like.new_empty(0)
        self._peers: Peers | None = None
        self._captured: list[object] = []  # graphs hold addresses of this memory
        self._tables: dict[object, object] = {}
        self._agreed: set[str] = set()
        self._watched: list[_LateFlag] = []

    def plan(self, request: Request) -> OverlapPlan:
        """The plan to follow."""
        if request.plan:
            return check_plan(request.given_plan(self.hosts), maps=self.maps)
        tiles, shape = self.device.tiles_at_once(), request.shape
        if request.op is not Op.ALL_GATHER:
            return plan_on_streams(*shape, self.hosts, maps=self.maps, tiles_at_once=tiles)
        budget = self.device.gather_budget(request.dtype, messages=not self.maps)
        plan = plan_on_streams(*shape, self.hosts, maps=self.maps, tiles_at_once=min(tiles, budget.programs))
        return plan if plan.sequential else replace(plan, reason=f"{plan.reason}; {budget.reason}")

    @contextmanager
    def call(self, plan: OverlapPlan, deadline: Deadline, *, bias: bool) -> Iterator[None]:
        """Before: all ranks have once agreed on this. After: everything is in the streams, and its flag is watched.

        Ranks meet on the first call of a kind only: a meeting is the host's, which would hold back the device.
        """
        self._poll()
        text = call_text(plan, bias=bias)
        if text not in self._agreed:
            self._agreement.meet(Statement(text), deadline=deadline)
            self._agreed.add(text)
        yield
        self.device.finish(seconds=self.timeout + THREAD_END.seconds)
        if self.device.is_capturing():
            self._captured.append((self._peers, *self._tables.values()))
        else:
            self._watched.append(_LateFlag(plan, *self.device.fetch(self.late.flag)))
            self._poll()

    def _poll(self) -> None:
        """Raises `PeerTimeout` if a kernel of an earlier call gave up, as far as that is known without waiting."""
        if self.device.is_capturing():
            return
        while self._watched and self._watched[0].there.query():
            watched = self._watched.pop(0)
            if int(watched.flag):
                raise PeerTimeout(waited_for(watched.plan, int(watched.flag) - 1), seconds=self.timeout)

    def check(self) -> None:
        """Waits for the device, and raises `PeerTimeout` if any kernel gave up."""
        self.device.synchronize()
        self._poll()
        self.late.check("an overlapped matmul", seconds=self.timeout)

    def peers(self, nbytes: int) -> Peers:
        """At least `nbytes` of every rank; collective where there is not enough, and the need is alike on all."""
        if self._peers is None or self._peers.nbytes < nbytes:
            self.device.synchronize()  # nothing may still use what is replaced
            self._tables.clear()
            self._peers = map_peers(self.pg, size_class(nbytes, SMALLEST_BYTES), self._like, timeout=self.timeout)
        return self._peers

    def table(self, plan: OverlapPlan, make: Callable[[], _Table]) -> _Table:
        """What `make` gives, made once for a plan, this rank's sizes among it: a table takes a copy to the device."""
        key = (plan, make.__qualname__)
        if key not in self._tables:
            if len(self._tables) >= _MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = make()
        return cast("_Table", self._tables[key])


def state_of(context: Context, like: Tensor) -> State:
    """The state of a group on the device of `like`; made on the first call, which all ranks make."""
    key = ("streams", like.device)
    if key not in context.kept:
        context.kept[key] = State(context, like)
    return cast("State", context.kept[key])


def check(group: ProcessGroup) -> None:
    """Waits for the devices of `group`'s calls, and raises `PeerTimeout` if a kernel of one gave up waiting.

    A call returns before its kernels have run, so an error shows in a later call; or here, where results matter.
    """
    for kept in context_of(group).kept.values():
        if isinstance(kept, State):
            kept.check()


def by_group(what: str, collective: Callable[[], object]) -> None:
    """Runs a collective of the process group; what it raises becomes `PeerLost`, and says what it was for."""
    try:
        collective()
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise PeerLost(f"{what}: the process group failed: {reason}; a new one is needed to go on") from error


def as_bytes(t: Tensor) -> Tensor:
    """[..., cols] as uint8 [..., bytes]: process groups know few dtypes, and all know this one."""
    return t.view(torch.uint8)
