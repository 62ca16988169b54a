"""This rank's DMA card, and a channel on it for each process group: messages between ranks, by tag.

What is real and what is modelled stands in `csrc/wire.h`: bytes really move, from the sender's memory into the
receiver's, in one copy; when they may is worked out from the clock and the rates of the cards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from weft import _core

CHUNK_BYTES = 256 * 1024  # copied at once, about: enough for a wake-up of the card to be worth it
STAGING_BYTES = 512 << 20  # of each rank, where its memory may not be read; only what is touched is taken
_ANYBODY = _core.WIRE_ANYBODY


class Fault(IntEnum):
    """How a message ended, in the order of the native core."""

    NONE = 0
    CLOSED = 1
    GAVE_UP = 2
    DIED = 3
    SIZES = 4
    UNREADABLE = 5
    OWN_GAVE_UP = 6
    FULL = 7
    LATE = 8


_SAID = {
    Fault.CLOSED: "Connection closed by peer: it closed the group",
    Fault.GAVE_UP: "Connection closed by peer: it gave up a wait in this group",
    Fault.DIED: "Connection closed by peer: its process died",
    Fault.UNREADABLE: "its memory cannot be read",
    Fault.OWN_GAVE_UP: "this rank gave up an earlier wait in this group, which closed its connections",
}


def make_wire(hosts: int, ranks: int, *, gbps: float, latency_us: float, staged: bool = False) -> int:
    """A descriptor of the memory in which the cards of all hosts meet; whoever inherits it may take part.

    `staged` messages are copied through that memory, which is done anyway where processes may not read each other's.
    """
    wire = os.memfd_create("weft-wire", os.MFD_CLOEXEC)
    staging = STAGING_BYTES if staged or why_staged() is not None else 0
    _core.make_wire(wire, hosts, gbps * 1e9 / 8, latency_us * 1e-6, CHUNK_BYTES, staging, ranks)
    return wire


def why_staged() -> str | None:
    """Why messages must be copied through shared memory on this machine; None where ranks may read each other's.

    A child is asked to read its parent, after the parent has allowed everybody to, as cards do.
    """
    value = torch.zeros(1, dtype=torch.uint8)
    here, address = os.getpid(), value.data_ptr()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reason = _core.why_unreadable(here, address)
            os.write(theirs, reason.encode()[:200] or b" ")
        finally:
            os._exit(0)
    os.close(theirs)
    said = os.read(ours, 200).decode(errors="replace")
    os.close(ours)
    os.waitpid(child, 0)
    return said.strip() or None if said else "the test of it failed"


Card = _core.Card


def open_card(wire: int, host: int) -> Card:
    """This process's card on the wire behind the descriptor, as one of `host`. It is there until the process ends."""
    return Card(wire, host)


class CardChannel:
    """What one process group has of this rank's card. Making one is collective: ranks meet in the `store`."""

    def __init__(self, card: Card, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._card = card
        self._endpoint = card.open()
        store.set(f"card/{rank}", str(self._endpoint))
        names = [f"card/{peer}" for peer in range(size)]
        store.wait(names, timeout)
        self._endpoints = [int(value) for value in store.multi_get(names)]
        card.watch(self._endpoints)
        self.hosts = tuple(card.host_of(endpoint) for endpoint in self._endpoints)
        self._dropped: list[tuple[_core.CardMessage, Tensor]] = []

    def send(self, data: Tensor, peer: int, tag: int) -> CardTransfer:
        """Starts to send `data`, contiguous; it must stay as it is until the transfer is waited for."""
        return self._transfer(self._card.send, self._endpoint, self._endpoints[peer], tag, data, f"send to rank {peer}")

    def recv(self, data: Tensor, peer: int | None, tag: int) -> CardTransfer:
        """Starts to receive into `data`, contiguous, from a rank, or from anybody."""
        source = _ANYBODY if peer is None else self._endpoints[peer]
        what = "receive from any rank" if peer is None else f"receive from rank {peer}"
        return self._transfer(self._card.receive, source, self._endpoint, tag, data, what)

    def _transfer(self, call: object, source: int, target: int, tag: int, data: Tensor, what: str) -> CardTransfer:
        assert callable(call)
        if self._dropped:
            self._dropped = [entry for entry in self._dropped if not self._over(entry[0])]
        message = call(source, target, tag, data.data_ptr(), data.numel() * data.element_size())
        return CardTransfer(self, message, data, what)

    def wait(self, message: _core.CardMessage, seconds: float, what: str, size: int) -> int | None:
        """Until it is over; the rank that sent it."""
        fault, source, theirs = self._card.wait(message, seconds)
        if fault == Fault.NONE:
            return self._endpoints.index(source) if source in self._endpoints else None
        if fault == Fault.LATE:
            self.give_up()
            self._card.wait(message, self.timeout.total_seconds())  # it has failed, and nobody writes to it any more
            raise RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms for {what}")
        if fault == Fault.SIZES:
            raise RuntimeError(f"{what}: this rank has {size} bytes for it, the other one {theirs}")
        raise RuntimeError(f"{what}: {_SAID[Fault(fault)]}")

    def drop(self, message: _core.CardMessage, data: Tensor) -> None:
        """Nobody will wait for it: its memory is kept until it is over."""
        self._dropped.append((message, data))

    def _over(self, message: _core.CardMessage) -> bool:
        if not self._card.is_over(message):
            return False
        self._card.wait(message, 0.0)
        return True

    def is_over(self, message: _core.CardMessage) -> bool:
        return self._card.is_over(message)

    def carried(self) -> tuple[int, int]:
        """Bytes that the card of this rank's host has sent, and received."""
        return self._card.carried()

    @property
    def reads_memory(self) -> bool:
        """Whether messages are read from the sender's memory, and not from a copy that it made."""
        return self._card.reads_memory

    def give_up(self) -> None:
        """Ends all that this rank has under way in the group, and what its peers wait for from it."""
        self._card.give_up(self._endpoint)

    def close(self) -> None:
        """Peers that wait for this rank hear that it has left. Harmless when closed."""
        self._card.close(self._endpoint)


class CardTransfer:
    """A message under way; keep its memory as it is until `wait` returns."""

    def __init__(self, channel: CardChannel, message: _core.CardMessage, data: Tensor, what: str) -> None:
        self._channel, self._message, self._data, self._what = channel, message, data, what
        self._is_waited_for = False
        self.source: int | None = None

    def wait(self, seconds: float | None = None) -> None:
        """Returns when the memory may be used again (sent) or holds the message (received); harmless when it has."""
        if self._is_waited_for:
            return
        limit = self._channel.timeout.total_seconds() if seconds is None else seconds
        size = self._data.numel() * self._data.element_size()
        try:
            self.source = self._channel.wait(self._message, limit, self._what, size)
        except RuntimeError:
            self._is_waited_for = True
            raise
        self._is_waited_for = True

    def is_over(self) -> bool:
        return self._is_waited_for or self._channel.is_over(self._message)

    def __del__(self) -> None:
        if not getattr(self, "_is_waited_for", True):
            self._channel.drop(self._message, self._data)


def wait_all(transfers: Sequence[CardTransfer], seconds: float | None = None) -> None:
    """Waits for all of them, each for so long at most."""
    for transfer in transfers:
        transfer.wait(seconds)
