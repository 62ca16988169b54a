"""How a rank tells all others something small: with a deadline, and a bound on what it believes of a size.

- `tell`: any short text or bytes, as messages of a `Group`. Up to `_FRAME` bytes in one round, what is longer in a
  second one.
- `swap`: the same where all sizes are known beforehand; one round.
- `tell_all`: values that JSON can say, through the group's store, where there is no `Group`: files, set-up.
- `know_all`: what a rank says of itself once and for all, in the store; kept with the group.
- `Meeting`: several steps in the store. Only for set-up (windows, reshards), where a store's latency does not matter.

A size that comes from a peer is compared with the bound before memory is taken for it. Nothing is unpickled.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft._torch import group_store
from weft.comm.deadline import STORE, Deadline, at_work, listening
from weft.comm.processes import process_key, this_process
from weft.comm.tags import Tag, facts_of, refuse_unusable, turn
from weft.errors import PeerLost, PeerMismatch, PeerTimeout, WeftError

T = TypeVar("T")

MOST_BYTES = 1 << 26
"""The longest thing that can be told unless a caller sets another bound: plans of a large model are a tenth of it."""
_FRAME = 512
_LENGTH = 8
# Polling of a store starts fine, because ranks usually arrive together, and coarsens, because P ranks poll one server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
_MET = "met"


class Arrival(Protocol):
    """A message under way; see `comm.Transfer`."""

    def wait_until(self, deadline: Deadline, *, what: str) -> None: ...


class Endpoint(Protocol):
    """Who can be told: what `comm.Group` is to this module."""

    rank: int
    size: int

    def send(self, tensor: Tensor, dst: int, *, tag: int) -> Arrival: ...

    def recv(self, tensor: Tensor, src: int, *, tag: int) -> Arrival: ...

    def break_off(self) -> None: ...


def tell(
    group: Endpoint, mine: bytes, *, tag: Tag, deadline: Deadline, what: str, most: int = MOST_BYTES
) -> list[bytes]:
    """What each rank gave as `mine`, of any length up to `most` bytes. Collective.

    `PeerMismatch` if a rank says that it has more. A rank with too much of its own raises `ValueError`, before it has
    told anything: whether it fits must not depend on the rank.
    """
    if len(mine) > most:
        raise ValueError(f"{what} has {len(mine)} bytes, expected up to {most}")
    room = _FRAME - _LENGTH
    frame = (len(mine).to_bytes(_LENGTH, "big") + mine[:room]).ljust(_FRAME, b"\0")
    frames = swap(group, frame, [_FRAME] * group.size, tag=tag, deadline=deadline, what=what)
    lengths = [checked_length(int.from_bytes(frame[:_LENGTH], "big"), most, what, r) for r, frame in enumerate(frames)]
    found = [frame[_LENGTH : _LENGTH + length] for frame, length in zip(frames, lengths, strict=True)]
    if max(lengths) <= room:
        return found
    rests = swap(group, mine[room:], [max(0, n - room) for n in lengths], tag=tag, deadline=deadline, what=what)
    return [start + rest for start, rest in zip(found, rests, strict=True)]


def checked_length(length: int, most: int, what: str, rank: int) -> int:
    """`length`, once it is no more than was agreed on.

    >>> checked_length(3, 10, "a text", 1)
    3
    """
    if not 0 <= length <= most:
        raise PeerMismatch(f"rank {rank} announces {length} bytes as {what}, expected 0 to {most}")
    return length


def swap(group: Endpoint, mine: bytes, sizes: Sequence[int], *, tag: Tag, deadline: Deadline, what: str) -> list[bytes]:
    """What each rank gave as `mine`, `sizes[rank]` bytes; directly, so that a timeout can name the rank."""
    outgoing = (
        torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        if mine
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    incoming = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
    incoming[group.rank] = outgoing
    swap_tensors(group, [outgoing] * group.size, incoming, tag=tag, deadline=deadline, what=what)
    return [data.numpy().tobytes() for data in incoming]


def swap_tensors(
    group: Endpoint,
    outgoing: Sequence[Tensor] | Mapping[int, Tensor],
    incoming: Sequence[Tensor] | Mapping[int, Tensor],
    *,
    tag: Tag,
    deadline: Deadline,
    what: str,
    ranks: Iterable[int] | None = None,
) -> None:
    """outgoing[r] goes to rank r and incoming[r] comes from it; contiguous, of sizes that both sides know.

    Among all ranks of the group, or some `ranks` of it, who all call it.
    """
    peers = [rank for rank in (range(group.size) if ranks is None else ranks) if rank != group.rank]
    transfers = [group.recv(incoming[peer], peer, tag=tag) for peer in peers]
    transfers += [group.send(outgoing[peer], peer, tag=tag) for peer in peers]

    def wait() -> None:
        for transfer in transfers:
            transfer.wait_until(deadline, what=what)

    listening(wait, on_interrupt=group.break_off)


def tell_all(what: str, mine: Any, *, group: ProcessGroup | None, timeout: float) -> list[Any]:
    """What each rank says, in rank order; values that JSON can say. Collective, and a barrier.

    Without a process group there is one rank. `PeerTimeout` names the ranks that did not come.

    >>> tell_all("a test", ["nothing"], group=None, timeout=1.0)
    [['nothing']]
    """
    if group is None and not dist.is_initialized():
        return [mine]
    if (length := len(json.dumps(mine))) > MOST_BYTES:
        raise ValueError(f"{what} has {length} bytes to tell, expected up to {MOST_BYTES}")
    pg: Any = dist.group.WORLD if group is None else group
    with meeting(pg, what, ("said",), deadline=Deadline.after(timeout), store=None) as held:
        return held.gather("said", mine)


def know_all(pg: ProcessGroup, name: str, mine: Any, *, deadline: Deadline, what: str) -> list[Any]:
    """What each rank says of itself under this `name`: the same in every call, so that only the first one waits.

    This is no meeting. It does not matter in which of its calls a rank says it: calls of different kinds may come in
    another order on every rank, and one that ran out of time leaves nothing behind that the next could stumble over.
    `what` is what the user called, for the error.
    """
    refuse_unusable(pg)
    facts = facts_of(pg)
    if name not in facts:
        asking = Asking(store_of(pg), deadline, f"the start of {what}")
        asking.answer(lambda: _say_process(pg, asking.store))
        keys = [f"weft/{name}/{rank}" for rank in range(pg.size())]
        asking.answer(lambda: asking.store.set(keys[pg.rank()], json.dumps(mine)))
        texts, missing = asking.answer(lambda: asking.read(keys))
        if missing:
            raise PeerTimeout(f"{_ranks(missing)} at {asking.where}", seconds=deadline.seconds)
        facts[name] = [json.loads(text) for text in texts]
    return facts[name]


@contextmanager
def meeting(
    pg: ProcessGroup, name: str, steps: Sequence[str], *, deadline: Deadline, store: Store | None, what: str = ""
) -> Iterator[Meeting]:
    """A meeting of all ranks of `pg`; another one of this name waits until it is over on this rank."""
    with turn(pg, name, deadline):
        yield Meeting(pg, name, steps, deadline=deadline, store=store, what=what)


class Meeting:
    """One collective meeting of all ranks of `pg`, made of `steps` that all ranks take in the same order.

    All ranks must hold their meetings of one `name` in the same order; the n-th of each rank is the same
    meeting. The count is kept in the store, one for each rank, and rises even if the meeting then fails, so
    that after a failure on some ranks the next meeting pairs up again. The first step must be of all ranks:
    whoever passed it knows that the previous meeting is over, and removes what it posted there, so that the
    store does not grow.

    A step of all ranks (`gather`) is passed by all of them or by none: the first rank that sees all words, or that
    gives up, writes so in the store, and what stands there counts for everybody. So a rank that comes after another
    one gave up is told at once, and does not take that one's word for the word of a rank that is here.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        name: str,
        steps: Sequence[str],
        *,
        deadline: Deadline,
        store: Store | None,
        what: str = "",
    ) -> None:
        """`what` is what the user called, for errors."""
        refuse_unusable(pg)
        self.rank, self.size = pg.rank(), pg.size()
        self._name, self._steps, self._deadline = name, tuple(steps), deadline
        self._title = f"{what} ({name})" if what and what != name else name
        self._store = store_of(pg) if store is None else store
        self._turn = self._at("count").answer(lambda: self._count(pg))

    @property
    def number(self) -> int:
        """Which meeting of its name it is, the same on all ranks: from 1 on."""
        return self._turn

    def post(self, step: str, value: Any) -> None:
        """Posts `value` (anything that JSON can say) as this rank's word for `step`."""
        text = json.dumps(value)
        self._at(step).answer(lambda: self._store.set(self._key(step, self.rank), text))

    def read(self, step: str, ranks: Sequence[int]) -> list[Any]:
        """What each of `ranks` posted for `step`; `PeerTimeout` names the ranks that did not."""
        asking, keys = self._at(step), [self._key(step, rank) for rank in ranks]
        texts, missing = asking.answer(lambda: asking.read(keys))
        if missing:
            raise self._late([ranks[index] for index in missing], asking)
        return [json.loads(text) for text in texts]

    def gather(self, step: str, value: Any) -> list[Any]:
        """Posts `value` and reads what every rank posted, in rank order; on all ranks, or none gets through."""
        asking, keys = self._at(step), [self._key(step, rank) for rank in range(self.size)]
        verdict = self._key(step, "verdict")
        try:
            self.post(step, value)
            texts, missing = asking.answer(lambda: asking.read(keys, unless=verdict))
            said = self._settle(asking, verdict, missing)
        except WeftError:
            raise
        except BaseException as error:  # Ctrl-C, or a word that cannot be said
            asking.is_over = True
            with suppress(WeftError):
                self._settle(asking, verdict, [], ended=type(error).__name__)
            raise
        if said != _MET:
            raise self._given_up(asking, **json.loads(said))
        if missing:  # the last one came just now
            texts, _ = asking.answer(lambda: asking.read(keys))
        if step == self._steps[0]:
            asking.answer(self._forget_previous)
        return [json.loads(text) for text in texts]

    def _settle(self, asking: Asking, verdict: str, missing: Sequence[int], *, ended: str = "") -> str:
        """What counts for all ranks: that they met, or who gave up and why. This rank's view, if it is the first."""
        why = {"by": self.rank, "seconds": asking.deadline.seconds, "missing": list(missing), "ended": ended}
        mine = json.dumps(why) if missing or ended else _MET
        return asking.answer(lambda: self._store.compare_set(verdict, "", mine).decode())

    def _given_up(self, asking: Asking, *, by: int, seconds: float, missing: list[int], ended: str) -> WeftError:
        """What to raise where rank `by` gave up, by a time-out or an exception of its own."""
        if by == self.rank:
            return self._late(missing, asking)
        again = "All ranks give up this call; the next one is good if all ranks make it"
        if not ended and self.rank not in missing:
            return PeerTimeout(f"{_ranks(missing)} at {asking.where}, and rank {by} gave up. {again}", seconds=seconds)
        why = f"was ended by {ended}" if ended else f"waited {seconds:g} s for {_ranks(missing)}"
        return PeerLost(f"rank {by} gave up at {asking.where}: it {why}. {again}")

    def _late(self, missing: Sequence[int], asking: Asking) -> PeerTimeout:
        return PeerTimeout(f"{_ranks(missing)} at {asking.where}", seconds=self._deadline.seconds)

    def _count(self, pg: ProcessGroup) -> int:
        _say_process(pg, self._store)
        return self._store.add(f"weft/{self._name}/turn/{self.rank}", 1)

    def _at(self, step: str) -> Asking:
        return Asking(self._store, self._deadline, f"step '{step}' of {self._title}")

    def _key(self, step: str, who: int | str, *, ago: int = 0) -> str:
        return f"weft/{self._name}/{self._turn - ago}/{step}/{who}"

    def _forget_previous(self) -> None:
        """Also of those before it, where they failed. One rank forgets what counted for all."""
        ago = 1
        while self._store.check([self._key(self._steps[0], self.rank, ago=ago)]):
            for step in self._steps:
                self._store.delete_key(self._key(step, self.rank, ago=ago))
            for step in self._steps if self.rank == 0 else ():
                self._store.delete_key(self._key(step, "verdict", ago=ago))
            ago += 1


class Asking:
    """Questions to a store until a deadline. `where` the caller is, for errors."""

    def __init__(self, store: Store, deadline: Deadline, where: str) -> None:
        self.store, self.deadline, self.where = store, deadline, where
        self.is_over = False  # nobody waits for the answer any more

    def read(self, keys: Sequence[str], *, unless: str | None = None) -> tuple[list[str], list[int]]:
        """The values of all keys; or none of them, and which keys were missing at the deadline.

        All are missing where there is a key `unless` before that.
        """
        # Not Store.wait: a FileStore rounds its timeout up by seconds, and a TCPStore's wait keeps its other
        # callers out.
        pause = _FIRST_PAUSE
        while not self.store.check(list(keys)):
            if self.is_over or (unless is not None and self.store.check([unless])):
                return [], list(range(len(keys)))
            if self.deadline.left() == 0.0:
                missing = [index for index, key in enumerate(keys) if not self.store.check([key])]
                if missing:
                    return [], missing
                break  # the last one came just now
            time.sleep(min(pause, self.deadline.left()))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [self.store.get(key).decode() for key in keys], []

    def answer(self, call: Callable[[], T]) -> T:
        """`call()` in a thread, because a store blocks its client for ever when its server hangs or is cut off."""
        future: Future[T] = Future()

        def ask() -> None:
            with at_work():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)

        threading.Thread(target=ask, name="weft-store", daemon=True).start()
        try:
            return future.result(timeout=self.deadline.left() + STORE.seconds)
        except FutureTimeout:
            raise PeerTimeout(
                f"the group's store, which does not answer, at {self.where}", seconds=self.deadline.seconds
            ) from None
        except RuntimeError as error:  # the base of torch's store and network errors
            reason = str(error).splitlines()[0]
            raise PeerLost(f"the process that hosts the group's store is gone, at {self.where}: {reason}") from error


def _say_process(pg: ProcessGroup, store: Store) -> None:
    """Once for each group: who is left after a failure looks for those that do not answer."""
    facts = facts_of(pg)
    if "process" not in facts:
        store.set(process_key(pg.rank()), this_process())
        facts["process"] = []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def store_of(pg: ProcessGroup) -> Store:
    """The store that `pg` was made with, under the group's own prefix."""
    try:
        return group_store(pg)
    except KeyError:
        raise ValueError(
            "the process group is not registered with torch.distributed, so its store is unknown; "
            "pass store=, or make the group with init_process_group or new_group"
        ) from None
