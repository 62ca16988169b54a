"""How the ranks of a group meet in its store: each posts a short text, all read all, within a deadline.

Only for set-up (hosts, windows), where a store's latency does not matter; data goes through `Group` and
`Window`. The texts are JSON, never pickles.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft._torch import group_store
from weft.comm.deadline import Deadline
from weft.comm.tags import turn
from weft.errors import PeerLost, PeerTimeout

T = TypeVar("T")

# Polling starts fine, because ranks usually arrive together, and coarsens, because P ranks poll one server.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
# What a store call may take after the deadline before its server counts as hung.
_GRACE_SECONDS = 1.0


def store_of(pg: ProcessGroup) -> Store:
    """The store that `pg` was made with, under the group's own prefix."""
    try:
        return group_store(pg)
    except KeyError:
        raise ValueError(
            "the process group is not registered with torch.distributed, so its store is unknown; "
            "pass store=, or make the group with init_process_group or new_group"
        ) from None


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
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=ask, name=f"weft-{self._name}", daemon=True).start()
        where = f"at step '{step}' of {self._name}"
        try:
            return future.result(timeout=self._deadline.left() + _GRACE_SECONDS)
        except FutureTimeout:
            raise PeerTimeout(
                f"the group's store, which does not answer, {where}", seconds=self._deadline.seconds
            ) from None
        except RuntimeError as error:  # the base of torch's store and network errors
            reason = str(error).splitlines()[0]
            raise PeerLost(f"the process that hosts the group's store is gone, {where}: {reason}") from error
