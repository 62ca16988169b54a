"""What weft keeps for a process group: its ranks' hosts, buffers, threads and plans.

Made on the first call on a group, which is collective like every call, and dropped when the group is destroyed. The
table of contexts lives at module level, as torch's own table of groups does: a custom op can take a group only by its
name, and whoever takes it by name needs a table to find what belongs to it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch.distributed import ProcessGroup

from weft._torch import group_by_name
from weft.comm import Group
from weft.comm.deadline import Deadline, timeout_of
from weft.comm.priority import make_way_for_compute
from weft.comm.rendezvous import store_of
from weft.comm.tags import Line
from weft.errors import PeerMismatch, PeerTimeout, WeftError, WindowUnavailable
from weft.overlap.agreement import Agreement, Posted, Statement
from weft.overlap.memory import Bank, Need
from weft.overlap.plan import OverlapPlan, Transport
from weft.overlap.planner import Planner
from weft.overlap.weights import WeightCache
from weft.overlap.worker import Worker


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    context: Context | None = None


_contexts: dict[tuple[ProcessGroup, Line], _Entry] = {}
_lock = threading.Lock()


@dataclass
class Call:
    """One call in progress: its bank and deadline, what was told to the others, whether all are known to be here.

    question, plan: see `Statement`
    """

    bank: Bank
    deadline: Deadline
    question: Callable[[], str] | None = None
    plan: object = ""
    posted: Posted | None = None
    agreed: bool = False
    begun: bool = False  # whether others may wait for what this rank does next


class Context:
    """Everything that calls on one group share. Calls on a group run one after the other, in the same order on all
    ranks; calls on different groups, and those of different lines, do not meet.
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float, line: Line = Line.OVERLAP) -> None:
        self.group, self.line = Group(pg, timeout=timeout, line=line), line
        make_way_for_compute()
        self.rank, self.size, self.hosts = self.group.rank, self.group.size, self.group.hosts
        shares_host = len(set(self.hosts)) < self.size
        self.no_windows = ""  # why ranks of a host do not share memory, where they could not
        try:
            self.agreement = Agreement(self.group, windows=shares_host)
        except WindowUnavailable as error:  # on all ranks
            self.no_windows, shares_host = str(error), False
            self.agreement = Agreement(self.group, windows=False)
        self.sender, self.finisher = Worker("weft-overlap"), Worker("weft-overlap-finish")
        self.planner = Planner(self.group, why=self.no_windows or self.group.apart)
        self.weights = WeightCache()
        self._banks = [Bank(pg, line, windows=shares_host, timeout=timeout) for _ in range(2)]
        self.kept: dict[object, object] = {}  # what executors keep for this group
        self._calls = 0  # those that all ranks have met for
        self._failure: str | None = None
        self._turn = threading.Lock()
        self._process = os.getpid()

    def feasible(self, plan: OverlapPlan) -> OverlapPlan:
        """The plan as it can be followed here: by messages where the ranks of a host cannot share memory."""
        if not self.no_windows or plan.transport is not Transport.WINDOWS:
            return plan
        return _by_messages(plan, self.no_windows)

    @contextmanager
    def call(self) -> Iterator[Call]:
        """A call of this rank. After one that failed half-way the group is unusable.

        A call counts, and with it the banks change, when all ranks have met for it. One that was refused before has
        not been, on this rank or on all: the next one takes the same bank.
        """
        if os.getpid() != self._process:
            raise WeftError("this process was forked from the one that made the process group; make a new group here")
        deadline = Deadline.after(self.group.timeout)
        if not self._turn.acquire(timeout=deadline.seconds):
            raise PeerTimeout("the call of another thread on this process group", seconds=deadline.seconds)
        try:
            if self._failure is not None:
                raise WeftError(f"an earlier call on this process group failed ({self._failure}); make a new group")
            bank = self._banks[(self._calls + 1) % 2]
            # Before the ranks meet: whoever has met this rank may read its counters, or add to them.
            bank.counters(self.rank).reset()
            call = Call(bank, deadline)
            try:
                yield call
            except PeerMismatch:
                raise  # on all ranks, and before any byte moved
            except BaseException as error:
                if call.begun or not isinstance(error, ValueError):
                    self._failure = f"{type(error).__name__}: {error}"
                if call.begun:
                    self.group.break_off()  # so that nobody, on no rank and no thread, waits for what will not come
                raise
        finally:
            self._turn.release()

    def reserve(self, call: Call, need: Need, text: str) -> None:
        """Makes room in the call's bank; that is collective, so the ranks meet first."""
        if call.bank.lacks(need):
            self.meet(call, text)
            call.bank.grow(need)

    def post(self, call: Call, text: str) -> None:
        """Tells all ranks what this one will do; `meet` hears from them."""
        if not call.agreed and call.posted is None:
            call.begun = True
            call.posted = self.agreement.post(Statement(text, call.question, call.plan))

    def meet(self, call: Call, text: str) -> None:
        """Returns when all ranks are known to do what `text` says; at once when they are already."""
        if not call.agreed:
            self.post(call, text)
            assert call.posted is not None
            self.agreement.confirm(call.posted, deadline=call.deadline)
            call.agreed = True
            self._calls += 1


@lru_cache(maxsize=1024)
def _by_messages(plan: OverlapPlan, why: str) -> OverlapPlan:
    return replace(plan, transport=Transport.MESSAGES, reason=f"by messages: {why}")


def context_of(pg: ProcessGroup, line: Line = Line.OVERLAP) -> Context:
    """The context of a group; made on the first call, which all ranks must make."""
    with _lock:
        entry = _contexts.get((pg, line))
        if entry is None:
            # torch drops this object of its own when the group is destroyed, and keeps it nowhere else.
            weakref.finalize(store_of(pg), _contexts.pop, (pg, line), None).atexit = False
            entry = _contexts[pg, line] = _Entry()
    # Not under the one lock: making a context waits for the other ranks, which may be busy with another group's.
    with entry.lock:
        if entry.context is None:
            entry.context = Context(pg, timeout=timeout_of(pg), line=line)
        return entry.context


def context_by_name(name: str) -> Context:
    """The context of the group that torch knows as `name`."""
    return context_of(group_by_name(name))
