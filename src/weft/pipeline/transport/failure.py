"""How a failure of one stage becomes known to all ranks, with the stage, the action and the micro-batch.

The ranks have a board: the store of their process group, which outlives any of them under torchrun. The first
rank that fails writes there what went wrong, and then closes its connections; whoever loses a connection, or waits
for long, looks at the board first. A rank that waits for too long says for whom, so that the one to blame is
found: the rank that all others wait for, and that waits for nobody itself.

How a step ends: ranks say that they are through, and return when all have said so.

A stage that raises has said nothing before, so no rank returns what a broken step has made. Words go up a tree and
down again. Its root is the rank that should be through last, so that the others' words are there by then, and the way
down is all that is left to wait for: two short messages for each rank, and as many hops as the tree is deep.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from weft.comm import Transfer
from weft.errors import LONGEST_SECONDS, PeerMismatch, WeftError
from weft.pipeline.transport.connections import Connections
from weft.pipeline.transport.threads import Cell

T = TypeVar("T")

# How long the store may take to answer; a store whose server hangs never does.
_ANSWER_SECONDS = 1.0


class StageFailed(WeftError):
    """A stage on another rank raised, died or hung; the message names rank, stage, action and micro-batch."""


class Board:
    """What the ranks of a pipeline say when something goes wrong. Nothing here raises or waits for long."""

    def __init__(self, store: Store, rank: int) -> None:
        """`store` is one of this pipeline alone, as that of a group of its own is."""
        self._store, self.rank, self._prefix = store, rank, "weft/pipeline"
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    def post(self, text: str) -> str:
        """Says what failed on this rank; returns what was said first, which is what to blame."""
        mine = json.dumps({"rank": self.rank, "text": text})
        key = f"{self._prefix}/failed"
        found = self._ask(lambda: self._store.compare_set(key, "", mine))
        return text if found is None else str(json.loads(found)["text"])

    def read(self) -> str | None:
        """What failed first, if anything has."""
        key = f"{self._prefix}/failed"
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else str(json.loads(found)["text"])

    def say_waiting(self, ranks: tuple[int, ...], what: str) -> None:
        """Says for which ranks this one has been waiting for a while."""
        text = json.dumps({"ranks": list(ranks), "what": what})
        self._ask(lambda: self._store.set(f"{self._prefix}/waits/{self.rank}", text))

    def say_going_on(self) -> None:
        """Takes back what `say_waiting` said."""
        self._ask(lambda: self._store.delete_key(f"{self._prefix}/waits/{self.rank}"))

    def blame(self, ranks: tuple[int, ...]) -> str:
        """Whom the ranks that this one waits for are waiting for themselves, down to those that say nothing."""
        seen = {self.rank}
        chain: list[str] = []
        while True:
            said = {rank: self._waits(rank) for rank in ranks if rank not in seen}
            seen |= said.keys()
            silent = [rank for rank, words in said.items() if words is None]
            if silent or not said:
                who = f"rank {', '.join(map(str, silent or ranks))}"
                return "; ".join([*chain, f"{who} says nothing: it is stopped, dead or computing"])
            rank, words = next(iter(said.items()))
            assert words is not None
            chain.append(f"rank {rank} waits for {words['what']}")
            ranks = tuple(words["ranks"])

    def _waits(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._prefix}/waits/{rank}"
        found = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    def _ask(self, call: Callable[[], T]) -> T | None:
        """`call()` in a thread: a store blocks its client for ever when its server hangs.

        One question at a time: while the last one has no answer, the next ones have none either, at once, and the
        thread that waits stays the only one.
        """
        answer: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the base of torch's store and network errors
                answer.append(call())

        with self._lock:
            if self._asking is not None and self._asking.is_alive():
                return None
            self._asking = threading.Thread(target=ask, name="weft-pipeline-board", daemon=True)
            self._asking.start()
            self._asking.join(_ANSWER_SECONDS)
        return answer[0] if answer else None


def call_name(step: int, train: bool) -> str:
    """Which call a rank is in, for errors."""
    return f"{'step' if train else 'eval_step'} number {step}"


class StepEnding:
    """The end of one step on one rank.

    done:        set when all ranks are through, to None or to the error of two ranks that were in different calls
    waiting_for: whom this rank hears from next, or tells
    """

    def __init__(
        self,
        wires: Connections,
        ranks: Sequence[int],
        *,
        step: int,
        train: bool,
        start: Callable[[Callable[[], None]], None],
        lost: set[int],
    ) -> None:
        """`ranks`: all of the step, the last to end first; `start` runs a job beside; `lost` learns who died."""
        self._wires, self._start, self._lost = wires, start, lost
        self._call = (step, train)
        here = ranks.index(wires.world[wires.rank])
        self._parent = ranks[(here - 1) // 2] if here else None
        self._children = tuple(ranks[2 * here + 1 : 2 * here + 3])
        self.done = Cell()
        self.waiting_for: tuple[int, ...] = ()
        above = () if self._parent is None else (self._parent,)
        # Now, not when they are wanted: a message then comes without a word that it may.
        self._inbox = {peer: self._listen(peer) for peer in (*self._children, *above)}

    def say(self) -> None:
        """This rank is through; returns at once."""
        self._start(self._meet)

    def _listen(self, peer: int) -> tuple[Tensor, Transfer | None]:
        note = torch.empty(2, dtype=torch.int64, device="cpu")
        try:
            return note, self._wires.receive_end(note, peer)
        except WeftError:
            return note, None

    def _meet(self) -> None:
        try:
            for child in self._children:
                self._hear(child)
            if self._parent is not None:
                self._tell((self._parent,))
                self._hear(self._parent)
            self._tell(self._children)
        except WeftError as error:
            if isinstance(error, PeerMismatch):
                self.done.set(error)
            self._lost.update(self.waiting_for)  # whoever waits for this end finds them there
        else:
            self.done.set()

    def _hear(self, peer: int) -> None:
        self.waiting_for = (peer,)
        note, transfer = self._inbox[peer]
        if transfer is None:
            raise WeftError(f"rank {peer} is gone")
        transfer.wait(what="the end of the step", timeout=LONGEST_SECONDS)
        step, train = note.tolist()
        if (step, bool(train)) != self._call:
            here, there = call_name(*self._call), call_name(step, bool(train))
            raise PeerMismatch(
                f"this rank is at the end of {here} and rank {peer} at that of {there}; call step and eval_step in the "
                "same order on all ranks"
            )

    def _tell(self, peers: Sequence[int]) -> None:
        self.waiting_for = tuple(peers)
        note = torch.tensor(self._call, dtype=torch.int64, device="cpu")
        for transfer in [self._wires.send_end(note, peer) for peer in peers]:
            transfer.wait(what="the end of the step", timeout=LONGEST_SECONDS)
