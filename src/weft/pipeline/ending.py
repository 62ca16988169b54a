"""How a step ends: ranks say that they are through, and return when all have said so.

A stage that raises has said nothing before, so no rank returns what a broken step has made. Words go up a tree and
down again. Its root is the rank that should be through last, so that the others' words are there by then, and the way
down is all that is left to wait for: two short messages for each rank, and as many hops as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm import Transfer
from weft.errors import LONGEST_SECONDS, PeerMismatch, WeftError
from weft.pipeline.cells import Cell
from weft.pipeline.wires import Wires


def call_name(step: int, train: bool) -> str:
    """Which call a rank is in, for errors."""
    return f"{'step' if train else 'eval_step'} number {step}"


class Ending:
    """The end of one step on one rank.

    done:        set when all ranks are through, to None or to the error of two ranks that were in different calls
    waiting_for: whom this rank hears from next, or tells
    """

    def __init__(
        self,
        wires: Wires,
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
