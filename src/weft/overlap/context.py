"""What weft keeps for a process group: its ranks' hosts, buffers, threads and plans.

Made on the first call on a group, which is collective like every call, and dropped when the group is destroyed. The
table of contexts is the one thing in weft that lives at module level, as torch's own table of groups does: a custom
op can take a group only by its name, and whoever takes it by name needs a table to find what belongs to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm import Group
from weft.comm.deadline import Deadline
from weft.comm.priority import make_way_for_compute
from weft.errors import PeerMismatch, WeftError
from weft.overlap.agreement import Agreement, Posted
from weft.overlap.memory import Bank, Need
from weft.overlap.planner import Planner
from weft.overlap.weights import WeightCache
from weft.overlap.worker import Worker


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    context: Context | None = None


_contexts: dict[ProcessGroup, _Entry] = {}
_lock = threading.Lock()


@dataclass
class Call:
    """One call in progress: its bank and deadline, what was told to the others, whether all are known to be here."""

    bank: Bank
    deadline: Deadline
    posted: Posted | None = None
    agreed: bool = False


class Context:
    """Everything that calls on one group share. Calls on a group run one after the other, in the same order on all
    ranks; calls on different groups do not meet.
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float) -> None:
        self.group = Group(pg, timeout=timeout)
        make_way_for_compute()
        self.rank, self.size, self.hosts = self.group.rank, self.group.size, self.group.hosts
        shares_host = len(set(self.hosts)) < self.size
        self.agreement = Agreement(self.group, windows=shares_host)
        self.sender, self.finisher = Worker("weft-overlap"), Worker("weft-overlap-finish")
        self.planner = Planner(self.group)
        self.weights = WeightCache()
        self._banks = [Bank(pg, windows=shares_host, timeout=timeout) for _ in range(2)]
        self.kept: dict[object, object] = {}  # what executors keep for this group
        self._calls = 0
        self._failure: str | None = None
        self._turn = threading.Lock()

    @contextmanager
    def call(self) -> Iterator[Call]:
        """A call of this rank. After one that failed half-way the group is of no more use."""
        with self._turn:
            if self._failure is not None:
                raise WeftError(f"an earlier call on this process group failed ({self._failure}); make a new group")
            self._calls += 1
            bank = self._banks[self._calls % 2]
            # Before the ranks meet: whoever has met this rank may read its counters, or add to them.
            bank.counters(self.rank).reset()
            call = Call(bank, Deadline.after(self.group.timeout))
            try:
                yield call
            except PeerMismatch:
                raise  # on all ranks, and before any byte moved
            except BaseException as error:
                if not isinstance(error, ValueError) or call.posted is not None or call.agreed:
                    self._failure = f"{type(error).__name__}: {error}"
                raise

    def reserve(self, call: Call, need: Need, text: str) -> None:
        """Makes room in the call's bank; that is collective, so the ranks meet first."""
        if call.bank.lacks(need):
            self.meet(call, text)
            call.bank.grow(need)

    def post(self, call: Call, text: str) -> None:
        """Tells all ranks what this one will do; `meet` hears from them."""
        if not call.agreed and call.posted is None:
            call.posted = self.agreement.post(text)

    def meet(self, call: Call, text: str) -> None:
        """Returns when all ranks are known to do what `text` says; at once when they are already."""
        if not call.agreed:
            self.post(call, text)
            assert call.posted is not None
            self.agreement.confirm(call.posted, deadline=call.deadline)
            call.agreed = True


def context_of(pg: ProcessGroup) -> Context:
    """The context of a group; made on the first call, which all ranks must make."""
    with _lock:
        for gone in [other for other in _contexts if other not in dist.distributed_c10d._world.pg_map]:
            del _contexts[gone]  # a destroyed group is no longer in torch's own table
        entry = _contexts.setdefault(pg, _Entry())
    # Not under the one lock: making a context waits for the other ranks, which may be busy with another group's.
    with entry.lock:
        if entry.context is None:
            entry.context = Context(pg, timeout=timeout_of(pg))
        return entry.context


def group_by_name(name: str) -> ProcessGroup:
    """The group that torch knows as `name`."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def context_by_name(name: str) -> Context:
    """The context of the group that torch knows as `name`."""
    return context_of(group_by_name(name))


def timeout_of(pg: ProcessGroup) -> float:
    """The group's own timeout, seconds: the one that it was made with is the deadline of every call."""
    options = pg._get_backend(torch.device("cpu")).options
    return float(options._timeout.total_seconds())
