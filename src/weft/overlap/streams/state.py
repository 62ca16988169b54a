"""What the stream executor keeps for a group: streams, peers' memory, tables, and the flag of late kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.deadline import Deadline
from weft.errors import PeerLost, PeerTimeout
from weft.kernels.triton import Late
from weft.overlap.agreement import Statement
from weft.overlap.calls import Asked, given_plan
from weft.overlap.context import Context, context_of
from weft.overlap.memory import size_class
from weft.overlap.plan import OverlapPlan
from weft.overlap.running import call_text
from weft.overlap.streams.device import Event, device_of
from weft.overlap.streams.peers import Peers, can_map, map_peers
from weft.overlap.streams.plans import check_plan, default_plan, waited_for

_SMALLEST_BYTES = 1 << 20
_MOST_TABLES = 256
_GRACE_SECONDS = 5.0  # on top of the deadline of every wait, for the end of what waited
_Table = TypeVar("_Table")


@dataclass(frozen=True, eq=False)
class _Watched:
    """The flag of late kernels after a call, on its way to the host."""

    plan: OverlapPlan
    flag: Tensor
    there: Event


class State:
    """Of one rank, for one group on one device. Making it is collective."""

    def __init__(self, context: Context, like: Tensor) -> None:
        self.context, self.rank, self.size = context, context.rank, context.size
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
        self._watched: list[_Watched] = []

    def plan(self, asked: Asked) -> OverlapPlan:
        """The plan to follow."""
        if asked.plan:
            return check_plan(given_plan(self.context, asked), maps=self.maps)
        return default_plan(
            asked.op, asked.m, asked.n, asked.k, asked.dtype_name, self.context.hosts,
            maps=self.maps, tiles_at_once=self.device.tiles_at_once(),
        )  # fmt: skip

    @contextmanager
    def call(self, plan: OverlapPlan, deadline: Deadline, *, bias: bool) -> Iterator[None]:
        """Before: all ranks have once agreed on this. After: everything is in the streams, and its flag is watched.

        Ranks meet on the first call of a kind only: a meeting is the host's, which would hold back the device.
        """
        self._poll()
        text = call_text(plan, bias=bias)
        if text not in self._agreed:
            self.context.agreement.meet(Statement(text), deadline=deadline)
            self._agreed.add(text)
        yield
        self.device.finish(seconds=self.context.group.timeout + _GRACE_SECONDS)
        if self.device.is_capturing():
            self._captured.append((self._peers, *self._tables.values()))
        else:
            self._watched.append(_Watched(plan, *self.device.fetch(self.late.flag)))
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
            self._peers = map_peers(self.pg, size_class(nbytes, _SMALLEST_BYTES), self._like, timeout=self.timeout)
        return self._peers

    def table(self, plan: OverlapPlan, make: Callable[[], _Table]) -> _Table:
        """What `make` gives, made once for a plan: a table takes a copy to the device."""
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
