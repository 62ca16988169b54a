"""How a rank tells all others something small: with a deadline, and a bound on what it believes of a size.

- `tell`: any short text or bytes, as messages of a `Group`. Up to `_FRAME` bytes in one round, what is longer in a
  second one.
- `swap`: the same where all sizes are known beforehand; one round.
- `tell_all`: values that JSON can say, through the group's store, where there is no `Group`: files, set-up.
- `Meeting`: several such steps in the store. Only for set-up (hosts, windows), where a store's latency does not matter.

A size that comes from a peer is compared with the bound before memory is taken for it. Nothing is unpickled.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft._torch import group_store
from weft.comm.deadline import STORE, Deadline, at_work, listening
from weft.comm.tags import Tag, turn
from weft.errors import PeerLost, PeerMismatch, PeerTimeout

T = TypeVar("T")

MOST_BYTES = 1 << 26
"""The longest thing that can be told unless a caller sets another bound: plans of a large model are a tenth of it."""
_FRAME = 512
_LENGTH = 8
# Polling of a store starts fine, because ranks usually arrive together, and coarsens, because P ranks poll one server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


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


@contextmanager
def meeting(
    pg: ProcessGroup, name: str, steps: Sequence[str], *, deadline: Deadline, store: Store | None
) -> Iterator[Meeting]:
    """A meeting of all ranks of `pg`; another one of this name waits until it is over on this rank."""
    with turn(pg, name, deadline):
        yield Meeting(pg, name, steps, deadline=deadline, store=store)


class Meeting:
    """One collective meeting of all ranks of `pg`, made of `steps` that all ranks take in the same order.

    All ranks must hold their meetings of one `name` in the same order; the n-th of each rank is the same
    meeting. The count is kept in the store, one for each rank, and rises even if the meeting then fails, so
    that after a failure on some ranks the next meeting pairs up again. The first step must be of all ranks:
    whoever passed it knows that the previous meeting is over, and removes what it posted there, so that the
    store does not grow.
    """

    def __init__(
        self, pg: ProcessGroup, name: str, steps: Sequence[str], *, deadline: Deadline, store: Store | None
    ) -> None:
        self.rank, self.size = pg.rank(), pg.size()
        self._name, self._steps, self._deadline = name, tuple(steps), deadline
        self._store = store_of(pg) if store is None else store
        self._turn = self._answer(lambda: self._store.add(f"weft/{name}/turn/{self.rank}", 1), "count")

    @property
    def number(self) -> int:
        """Which meeting of its name it is, the same on all ranks: from 1 on."""
        return self._turn

    def post(self, step: str, value: Any) -> None:
        """Posts `value` (anything that JSON can say) as this rank's word for `step`."""
        text = json.dumps(value)
        self._answer(lambda: self._store.set(self._key(step, self.rank), text), step)

    def read(self, step: str, ranks: Sequence[int]) -> list[Any]:
        """What each of `ranks` posted for `step`; `PeerTimeout` names the ranks that did not."""
        texts, missing = self._answer(lambda: self._poll(step, ranks), step)
        if missing:
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise PeerTimeout(f"{who} at step '{step}' of {self._name}", seconds=self._deadline.seconds)
        return [json.loads(text) for text in texts]

    def gather(self, step: str, value: Any) -> list[Any]:
        """Posts `value` and reads what every rank posted, in rank order."""
        self.post(step, value)
        values = self.read(step, range(self.size))
        if step == self._steps[0]:
            self._answer(self._forget_previous, step)
        return values

    def _key(self, step: str, rank: int, *, ago: int = 0) -> str:
        return f"weft/{self._name}/{self._turn - ago}/{step}/{rank}"

    def _forget_previous(self) -> None:
        for step in self._steps:
            self._store.delete_key(self._key(step, self.rank, ago=1))

    def _poll(self, step: str, ranks: Sequence[int]) -> tuple[list[str], list[int]]:
        # Not Store.wait: a FileStore rounds its timeout up by seconds, and a TCPStore's wait keeps its other
        # callers out.
        keys = [self._key(step, rank) for rank in ranks]
        pause = _FIRST_PAUSE
        while not self._store.check(keys):
            if self._deadline.left() == 0.0:
                missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
                if missing:
                    return [], missing
                break  # the last one came just now
            time.sleep(min(pause, self._deadline.left()))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [self._store.get(key).decode() for key in keys], []

    def _answer(self, call: Callable[[], T], step: str) -> T:
        """`call()` in a thread, because a store blocks its client for ever when its server hangs or is cut off."""
        future: Future[T] = Future()

        def ask() -> None:
            with at_work():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)

        threading.Thread(target=ask, name=f"weft-{self._name}", daemon=True).start()
        where = f"at step '{step}' of {self._name}"
        try:
            return future.result(timeout=self._deadline.left() + STORE.seconds)
        except FutureTimeout:
            raise PeerTimeout(
                f"the group's store, which does not answer, {where}", seconds=self._deadline.seconds
            ) from None
        except RuntimeError as error:  # the base of torch's store and network errors
            reason = str(error).splitlines()[0]
            raise PeerLost(f"the process that hosts the group's store is gone, {where}: {reason}") from error


def store_of(pg: ProcessGroup) -> Store:
    """The store that `pg` was made with, under the group's own prefix."""
    try:
        return group_store(pg)
    except KeyError:
        raise ValueError(
            "the process group is not registered with torch.distributed, so its store is unknown; "
            "pass store=, or make the group with init_process_group or new_group"
        ) from None
