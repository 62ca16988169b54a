"""The process groups of a pipeline: connections of their own, so that nothing waits behind a long message.

A gloo connection takes messages one after the other, and so does the receiver's word that it is ready. A gradient
that comes down would wait for the activation that goes up on the same connection, though the card could do both at
once. Hence a group for messages to higher ranks, one for those to lower ranks, and one for short notes.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft._torch import gloo_group
from weft.comm import Group, Transfer
from weft.comm.deadline import Deadline
from weft.comm.tags import DEFAULT_TAG, Line, Mark
from weft.comm.tell import Meeting
from weft.errors import LONGEST_SECONDS, WeftError


class Connections:
    """Three groups over the ranks of `pg`. Making them is collective over it; a failure leaves `pg` itself alone."""

    def __init__(self, pg: ProcessGroup, *, timeout: float) -> None:
        self.world = tuple(dist.get_process_group_ranks(pg))
        name = _agree_on_name(pg, timeout)
        self._made: list[ProcessGroup] = []
        try:
            self.up, self.down, self.notes = (self._make(f"{name}/{use}", timeout) for use in ("up", "down", "notes"))
        except BaseException:
            self._destroy()
            raise
        self.rank, self.size, self.hosts = self.up.rank, self.up.size, self.up.hosts

    def _make(self, name: str, timeout: float) -> Group:
        self._made.append(gloo_group(name, self.world, timeout=timeout))
        group = Group(self._made[-1], timeout=timeout)
        # gloo connects when a message is first sent, and cannot tell that a rank died before that.
        group.barrier("pipeline")
        return group

    def _destroy(self) -> None:
        for pg in self._made:
            with suppress(ValueError):  # destroyed already, with all groups of the process
                dist.destroy_process_group(pg)
        self._made = []

    def member(self, rank: int) -> int:
        """The groups' number of a rank."""
        return self.world.index(rank)

    def send_note(self, note: Tensor, rank: int, number: int) -> Transfer:
        """Starts to send a short message to a rank; it meets the `receive_note` of the same number."""
        return self.notes.send(note, self.member(rank), tag=Line.NOTES.data(number))

    def receive_note(self, note: Tensor, rank: int, number: int) -> Transfer:
        """Starts to receive a short message from a rank."""
        return self.notes.recv(note, self.member(rank), tag=Line.NOTES.data(number))

    def send_end(self, note: Tensor, rank: int) -> Transfer:
        """Starts to tell a rank how this one came to the end of a step; it meets `receive_end`."""
        return self.notes.send(note, self.member(rank), tag=Line.NOTES.mark(Mark.END))

    def receive_end(self, note: Tensor, rank: int) -> Transfer:
        """Starts to hear how a rank came to the end of a step."""
        return self.notes.recv(note, self.member(rank), tag=Line.NOTES.mark(Mark.END))

    def wait_for_loss(self, rank: int) -> None:
        """Returns when the connection to a rank is gone: it died, or gave up, or all is over."""
        with suppress(WeftError):
            never = self.notes.recv(torch.empty(1), self.member(rank), tag=Line.NOTES.mark(Mark.WATCH))
            never.wait(what="nothing", timeout=LONGEST_SECONDS)

    def break_off(self) -> None:
        """Ends all waits of this rank, and those of its peers for it, now."""
        with torch.device("cpu"):
            for group in (self.notes, self.up, self.down):
                group.break_off()

    def close(self, *, together: bool) -> None:
        """Ends the groups; `together` once all ranks are here, since they close connections that others may use."""
        if together:
            with suppress(WeftError), torch.device("cpu"):
                self.notes.barrier("end of the pipeline")
        # Who waits for a loss would otherwise sit in gloo until the interpreter ends, which aborts the process.
        self.break_off()
        self._destroy()


def _agree_on_name(pg: ProcessGroup, timeout: float) -> str:
    """A name that no group had before: that of the first rank. Collective over `pg`."""
    meeting = Meeting(pg, "pipeline", ("name",), deadline=Deadline.after(timeout), store=None)
    first = meeting.gather("name", secrets.token_hex(8))[0]
    return f"weft/pipeline/{int(first, 16):016x}"


class Connection(Group):
    """The groups as one, for the chunks of a channel. Waits have no deadline here: whoever needs a tensor has one."""

    def __init__(self, wires: Connections) -> None:
        self._wires = wires
        self.pg, self.rank, self.size, self.hosts = wires.up.pg, wires.rank, wires.size, wires.hosts
        self.timeout, self.line, self.apart = LONGEST_SECONDS, wires.up.line, wires.up.apart

    def send(self, tensor: Tensor, dst: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Sends on the connection for that direction."""
        group = self._wires.up if dst > self.rank else self._wires.down
        return group.send(tensor, dst, tag=tag)

    def recv(self, tensor: Tensor, src: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Receives on the connection for that direction."""
        group = self._wires.up if src < self.rank else self._wires.down
        return group.recv(tensor, src, tag=tag)
