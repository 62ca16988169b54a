"""What weft keeps for a process group, and how its ranks agree before each call.

*The context* of a group holds its ranks' hosts, buffers, threads and plans. It is made on the first call on the group,
which is collective like every call, and dropped when the group is destroyed. The table of contexts lives at module
level, as torch's own table of groups does: a custom op can take a group only by its name, and whoever takes it by name
needs a table to find what belongs to it.

*Agreement.* A rank tells the digest of its plan, shapes, types and library version; it goes on when it has everybody's.
Inside a host the digest is a word in a window, across hosts a message of 16 bytes. The ranks do this on every call, not
only on the first of a kind: a rank that takes another branch of the model would otherwise meet the wrong message. It
costs no time to speak of, because the matmul runs meanwhile, and it is what makes buffers reusable (see `resources`).
The meeting has two halves, so that a rank can work between them: `post` tells, `confirm` hears.

*What rides.* In a short call (see `overlap.short`) the data goes with the digest, in one message. A rank does not know
how long the messages of others are, who may be about to do something else, so receives have room for the longest, and
a message may be shorter; its first bytes are the digest, and only where that is the rank's own are the rest looked at.

If anybody differs, everybody notices, since every rank then sees a digest that is not its own. Then all exchange texts
and raise PeerMismatch, which names both sides. No data has moved. Where they differ only in the plan, and nobody was
given one, it is `PlansDiffer`: a rank has heard of a plan a moment before another. All take rank 0's, and call again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import group_by_name
from weft.comm import Counters, Group, Transfer, Window
from weft.comm.deadline import Deadline, listening, timeout_of
from weft.comm.group import differences, make_way_for_compute
from weft.comm.tags import Line, Mark, refuse_unusable, when_abandoned
from weft.comm.tell import store_of, swap_tensors
from weft.errors import PeerMismatch, PeerTimeout, WeftError, WindowUnavailable
from weft.overlap.blocks import Topology
from weft.overlap.executor.planner import Planner
from weft.overlap.executor.resources import Bank, OutputMemory, WeightCache, Worker
from weft.overlap.plan import OverlapPlan, Transport
from weft.overlap.short import RIDE_BYTES

PAYLOAD_AT = 64
"""Where the data begins in a message with a digest: rows stay as aligned as they were."""
_DIGEST_BYTES = 16
_EPOCH = 1 << 30  # calls after which counting starts anew: a counter has 31 bits, and a service runs for months


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    context: Context | None = None


_contexts: dict[tuple[ProcessGroup, Line], _Entry] = {}
_lock = threading.Lock()


def context_of(pg: ProcessGroup, line: Line = Line.OVERLAP) -> Context:
    """The context of a group; made on the first call, which all ranks must make."""
    refuse_unusable(pg)
    with _lock:
        entry = _contexts.get((pg, line))
        if entry is None:
            # torch drops this object of its own when the group is destroyed, and keeps it nowhere else.
            weakref.finalize(store_of(pg), _contexts.pop, (pg, line), None).atexit = False
            when_abandoned(pg, line, partial(_contexts.pop, (pg, line), None))
            entry = _contexts[pg, line] = _Entry()
    # Not under the one lock: making a context waits for the other ranks, which may be busy with another group's.
    with entry.lock:
        if entry.context is None:
            entry.context = Context(pg, timeout=timeout_of(pg), line=line)
        return entry.context


def context_by_name(name: str) -> Context:
    """The context of the group that torch knows as `name`."""
    return context_of(group_by_name(name))


class Context:
    """Everything that calls on one group share. Calls on a group run one after the other, in the same order on all
    ranks; calls on different groups, and those of different lines, do not meet.
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float, line: Line = Line.OVERLAP) -> None:
        what = f"the first of {line.title} on the process group"
        self.group, self.line = Group(pg, timeout=timeout, line=line, what=what), line
        make_way_for_compute()
        self.rank, self.size, self.hosts = self.group.rank, self.group.size, self.group.hosts
        shares_host = len(set(self.hosts)) < self.size
        self.no_windows = ""  # why ranks of a host do not share memory, where they could not
        try:
            self.agreement = Agreement(self.group, windows=shares_host)
        except WindowUnavailable as error:  # on all ranks
            self.no_windows, shares_host = str(error), False
            self.agreement = Agreement(self.group, windows=False)
        self.outputs = OutputMemory()
        self.sender, self.finisher = Worker("weft-overlap"), Worker("weft-overlap-finish")
        self.planner = Planner(self.group, why=self.no_windows or self.group.apart)
        self.weights = WeightCache()
        self._banks = [Bank(pg, line, windows=shares_host, timeout=timeout) for _ in range(2)]
        self.kept: dict[object, object] = {}  # what executors keep for this group
        self._calls = 0  # those that all ranks have met for
        self._failure: str | None = None
        self._turn = threading.Lock()

    def feasible(self, plan: OverlapPlan) -> OverlapPlan:
        """The plan as it can be followed here: by messages where the ranks of a host cannot share memory."""
        if not self.no_windows or plan.transport is not Transport.WINDOWS:
            return plan
        return _by_messages(plan, self.no_windows)

    @contextmanager
    def call(self) -> Iterator[OverlapCall]:
        """A call of this rank. After one that failed half-way the group is unusable.

        A call counts, and with it the banks change, when all ranks have met for it. One that was refused before has
        not been, on this rank or on all: the next one takes the same bank.
        """
        refuse_unusable(self.group.pg)
        deadline = Deadline.after(self.group.timeout)
        if not self._turn.acquire(timeout=deadline.seconds):
            raise PeerTimeout("the call of another thread on this process group", seconds=deadline.seconds)
        try:
            if self._failure is not None:
                raise WeftError(f"an earlier call on this process group failed ({self._failure}); make a new group")
            bank = self._banks[(self._calls + 1) % 2]
            # Before the ranks meet: whoever has met this rank may read its counters, or add to them.
            bank.counters(self.rank).reset()
            call = OverlapCall(bank, deadline)
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

    def post(self, call: OverlapCall, text: str) -> None:
        """Tells all ranks what this one will do; `meet` hears from them."""
        if not call.agreed and call.announcement is None:
            call.begun = True
            call.announcement = self.agreement.post(Statement(text, call.question, call.plan))

    def meet(self, call: OverlapCall, text: str) -> None:
        """Returns when all ranks are known to do what `text` says; at once when they are already."""
        if not call.agreed:
            self.post(call, text)
            self.land(call)

    def expect(self, call: OverlapCall) -> None:
        """Opens the receives of what will ride, so that it need not wait at its sender; `ride` must follow."""
        call.begun = True
        self.agreement.expect()

    def ride(self, call: OverlapCall, text: str, messages: Mapping[int, Tensor]) -> None:
        """`post`, with data: see `Agreement.post`. Also where ranks have met before, to make room."""
        call.begun = True
        call.announcement = self.agreement.post(Statement(text, call.question, call.plan), messages)

    def land(self, call: OverlapCall) -> None:
        """Returns when all ranks have told the same, and what rides is there."""
        assert call.announcement is not None
        self.agreement.confirm(call.announcement, deadline=call.deadline)
        if not call.agreed:
            call.agreed = True
            self._calls += 1


@dataclass
class OverlapCall:
    """One call in progress: its bank and deadline, what was told to the others, whether all are known to be here.

    question, plan: see `Statement`
    """

    bank: Bank
    deadline: Deadline
    question: Callable[[], str] | None = None
    plan: object = ""
    announcement: Announcement | None = None
    agreed: bool = False
    begun: bool = False  # whether others may wait for what this rank does next


@lru_cache(maxsize=1024)
def _by_messages(plan: OverlapPlan, why: str) -> OverlapPlan:
    return replace(plan, transport=Transport.MESSAGES, reason=f"by messages: {why}")


# Agreement --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """What a rank says before a call: `text` must be the same on all ranks.

    Where the plan is the group's own, `question` gives the text without it, and `plan` is it, or "" for none yet. Both
    are asked for only where ranks differ.
    """

    text: str
    question: Callable[[], str] | None = None
    plan: object = ""


@dataclass(frozen=True)
class Announcement:
    """What this rank has told the others, and the messages that say so, and what they tell it."""

    said: Statement
    number: int
    transfers: tuple[Transfer, ...]


class PlansDiffer(PeerMismatch):
    """On all ranks: they ask for the same matmul and know different plans of their group for it."""

    def __init__(self, plan: str) -> None:
        super().__init__(f"ranks know different plans of their group; rank 0 follows {plan or 'none'}")
        self.plan = plan


class Agreement:
    """The meeting of a group's ranks, held once at the start of each call, in the same order on all ranks."""

    def __init__(self, group: Group, *, windows: bool) -> None:
        self._group, self._tag = group, group.line.mark(Mark.START)
        self._window: Window | None = None
        self._local: tuple[int, ...] = ()
        self._slots: dict[int, memoryview] = {}
        self._counters: dict[int, Counters] = {}
        if windows:
            self._window = Window.create(
                group.pg, 2 * _DIGEST_BYTES, counters_per_rank=2, timeout=group.timeout, line=group.line
            )
            self._local = tuple(rank for rank in self._window.ranks if rank != group.rank)
            self._slots = {rank: _as_memory(self._window.peer(rank)) for rank in self._window.ranks}
            self._counters = {rank: self._window.counters(rank) for rank in self._window.ranks}
        self._remote = tuple(r for r in range(group.size) if r != group.rank and r not in self._local)
        self._calls = 0
        self._expected: tuple[Transfer, ...] = ()
        size = PAYLOAD_AT + RIDE_BYTES if group.takes_shorter else _DIGEST_BYTES
        with torch.inference_mode(False):  # calls of every mode receive here
            self.inboxes = {rank: torch.empty(size, dtype=torch.uint8) for rank in self._remote}

    def meet(self, said: Statement, *, deadline: Deadline) -> None:
        """Returns when all ranks are here with the same text."""
        self.confirm(self.post(said), deadline=deadline)

    def carries(self, topology: Topology) -> bool:
        """Whether data may ride: in this group, and by plans for which the same ranks share memory as here."""
        rank = self._group.rank
        here = {rank, *self._local} == set(topology.local(rank))
        return here and (self._group.takes_shorter or not self._remote)

    def expect(self) -> None:
        """Opens the receives of the next meeting."""
        if not self._expected:
            inboxes = self.inboxes.items()
            self._expected = tuple(self._group.recv(data, peer, tag=self._tag) for peer, data in inboxes)

    def post(self, said: Statement, messages: Mapping[int, Tensor] | None = None) -> Announcement:
        """Tells the others what this rank is about to do, and returns at once; `confirm` must follow.

        messages: for each rank of another host uint8 [PAYLOAD_AT + n], whose first bytes take the digest. Theirs are in
        `inboxes` after `confirm`, until the next meeting. Ranks of this host find data in windows: it must be there.
        """
        self._calls += 1
        digest = _digest(said.text)
        if self._window is not None:
            word, count = _count(self._calls)
            own = self._counters[self._group.rank]
            if count == 2:  # all ranks have met in this epoch, so none waits for the last of the one before
                own.tensor[1 - word] = 0
            self._slots[self._group.rank][self._slot(self._calls)] = digest
            own.add(word)
        self.expect()
        transfers, self._expected = list(self._expected), ()
        if self._remote:
            mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
            for peer in self._remote:
                message = mine
                if messages is not None:
                    message = messages[peer]
                    message[:_DIGEST_BYTES] = mine
                transfers.append(self._group.send(message, peer, tag=self._tag))
        return Announcement(said, self._calls, tuple(transfers))

    def confirm(self, mine: Announcement, *, deadline: Deadline) -> None:
        """Returns when all ranks have posted the same; PeerMismatch names both sides when they have not."""
        what = f"the start of {mine.said.text.split(' ', 1)[0]}"
        told: list[bytes] = []
        for rank in self._local:
            left, (word, count) = max(deadline.left(), 1e-3), _count(mine.number)
            self._counters[rank].wait(word, count, timeout=left, what=f"rank {rank} at {what}")
            told.append(bytes(self._slots[rank][self._slot(mine.number)]))
        self._wait(mine.transfers, deadline, what)
        told += [bytes(inbox[:_DIGEST_BYTES].numpy()) for inbox in self.inboxes.values()]
        digest = _digest(mine.said.text)
        if any(other != digest for other in told):
            raise self._mismatch(mine.said)

    def _mismatch(self, said: Statement) -> PeerMismatch:
        """What to raise on all ranks, once all texts are known."""
        # Not cut short by a deadline that a slow peer has used up: the error to tell is the mismatch.
        question = None if said.question is None else said.question()
        words = self._group.tell("the mismatch of a call", json.dumps([said.text, question, str(said.plan)]))
        texts, questions, plans = zip(*map(json.loads, words), strict=True)
        if questions[0] is not None and len(set(questions)) == 1:
            return PlansDiffer(plans[0])
        return PeerMismatch(differences([f"overlap: {text}" for text in texts]))

    def _wait(self, transfers: tuple[Transfer, ...], deadline: Deadline, what: str) -> None:
        def wait() -> None:
            for transfer in transfers:
                transfer.wait_until(deadline, what=what)

        if transfers:
            listening(wait, on_interrupt=self._group.break_off)

    @staticmethod
    def _slot(number: int) -> slice:
        # Two places in turn, as with banks: who writes this one again has seen that its readers are a call further.
        return slice(number % 2 * _DIGEST_BYTES, (number % 2 + 1) * _DIGEST_BYTES)

    def gather(self, numbers: Tensor, *, deadline: Deadline, what: str) -> list[list[int]]:
        """What each rank gave as `numbers`, int64 [n]; after `meet`."""
        found = [torch.empty_like(numbers) for _ in range(self._group.size)]
        found[self._group.rank] = numbers
        tag = self._group.line.mark(Mark.COUNTS)
        swap_tensors(self._group, [numbers] * self._group.size, found, tag=tag, deadline=deadline, what=what)
        return [data.tolist() for data in found]


@lru_cache(maxsize=4096)
def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]


def _count(number: int) -> tuple[int, int]:
    """Which of two counters tells of call `number`, from 1 on, and what it is then.

    >>> _count(1), _count(_EPOCH), _count(_EPOCH + 1), _count(2 * _EPOCH + 1)
    ((0, 1), (0, 1073741824), (1, 1), (0, 1))
    """
    epoch, count = divmod(number - 1, _EPOCH)
    return epoch % 2, count + 1


def _as_memory(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)
