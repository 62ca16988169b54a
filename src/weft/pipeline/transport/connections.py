"""How the ranks of a pipeline reach each other: process groups of their own, and a store where failures are told.

A gloo connection takes messages one after the other, and so does the receiver's word that it is ready. A gradient
that comes down would wait for the activation that goes up on the same connection, though the card could do both at
once. Hence a group for messages to higher ranks, one for those to lower ranks, and one for short messages: the
*header* of a tensor, the end of a step, and the loss of a peer.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from weft._torch import cpu_group
from weft.comm import Group, Transfer
from weft.comm.deadline import STORE, Deadline, at_work
from weft.comm.tags import DEFAULT_TAG, Line, Mark
from weft.comm.tell import meeting
from weft.errors import LONGEST_SECONDS, WeftError

T = TypeVar("T")


class Connections:
    """Three groups over the ranks of `pg`. Making them is collective over it; a failure leaves `pg` itself alone.

    `send` and `recv` are for the chunks of tensors, between ranks as the groups number them: a `comm.tell.Endpoint`.
    The other messages name ranks as `pg`'s world does.
    """

    def __init__(self, pg: ProcessGroup, *, timeout: float) -> None:
        self.world = tuple(dist.get_process_group_ranks(pg))
        name = _agree_on_name(pg, timeout)
        self._made: list[ProcessGroup] = []
        try:
            self._up, self._down, self.short = (self._make(f"{name}/{use}", timeout) for use in ("up", "down", "short"))
        except BaseException:
            self._destroy()
            raise
        self.rank, self.size, self.hosts = self._up.rank, self._up.size, self._up.hosts

    def _make(self, name: str, timeout: float) -> Group:
        self._made.append(cpu_group(name, self.world, timeout=timeout))
        group = Group(self._made[-1], timeout=timeout, what="Pipeline")
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

    def send(self, tensor: Tensor, dst: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Starts to send on the connection for that direction."""
        return (self._up if dst > self.rank else self._down).send(tensor, dst, tag=tag)

    def recv(self, tensor: Tensor, src: int, *, tag: int = DEFAULT_TAG) -> Transfer:
        """Starts to receive on the connection for that direction."""
        return (self._up if src < self.rank else self._down).recv(tensor, src, tag=tag)

    def send_header(self, header: Tensor, rank: int, channel: int) -> Transfer:
        """Starts to announce the next tensor of a channel to a rank."""
        return self.short.send(header, self.member(rank), tag=Line.NOTES.data(channel))

    def receive_header(self, header: Tensor, rank: int, channel: int) -> Transfer:
        """Starts to receive such an announcement from a rank."""
        return self.short.recv(header, self.member(rank), tag=Line.NOTES.data(channel))

    def send_end(self, call: Tensor, rank: int) -> Transfer:
        """Starts to tell a rank which step this one has come to the end of; it meets `receive_end`."""
        return self.short.send(call, self.member(rank), tag=Line.NOTES.mark(Mark.END))

    def receive_end(self, call: Tensor, rank: int) -> Transfer:
        """Starts to hear which step a rank has come to the end of."""
        return self.short.recv(call, self.member(rank), tag=Line.NOTES.mark(Mark.END))

    def wait_for_loss(self, rank: int) -> None:
        """Returns when the connection to a rank is gone: it died, or gave up, or all is over."""
        with suppress(WeftError):
            never = self.short.recv(torch.empty(1), self.member(rank), tag=Line.NOTES.mark(Mark.WATCH))
            never.wait(what="nothing", timeout=LONGEST_SECONDS)

    def break_off(self) -> None:
        """Ends all waits of this rank, and those of its peers for it, now."""
        with torch.device("cpu"):
            for group in (self.short, self._up, self._down):
                group.break_off()

    def close(self, *, together: bool) -> None:
        """Ends the groups; `together` once all ranks are here, since they close connections that others may use."""
        if together:
            with suppress(WeftError), torch.device("cpu"):
                self.short.barrier("end of the pipeline")
        # Who waits for a loss would otherwise sit in gloo until the interpreter ends, which aborts the process.
        self.break_off()
        self._destroy()


def _agree_on_name(pg: ProcessGroup, timeout: float) -> str:
    """A name that no group had before: that of the first rank. Collective over `pg`."""
    with meeting(pg, "pipeline", ("name",), deadline=Deadline.after(timeout), store=None, what="Pipeline") as held:
        first = held.gather("name", secrets.token_hex(8))[0]
    return f"weft/pipeline/{int(first, 16):016x}"


class StageFailed(WeftError):
    """A stage on another rank raised, died or hung; the message names rank, stage, action and micro-batch."""


class FailureStore:
    """What the ranks of a pipeline say when something goes wrong. Nothing here raises or waits for long.

    They say it in the store of their process group, which outlives any of them under torchrun. The first rank that
    fails writes there what went wrong, and then closes its connections; whoever loses a connection, or waits for long,
    reads the store first. A rank that waits for too long says for whom, so that the one to blame is found: the rank
    that all others wait for, and that waits for nobody itself.
    """

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
            with at_work(), suppress(RuntimeError):  # the base of torch's store and network errors
                answer.append(call())

        with self._lock:
            if self._asking is not None and self._asking.is_alive():
                return None
            self._asking = threading.Thread(target=ask, name="weft-pipeline-failures", daemon=True)
            self._asking.start()
            self._asking.join(STORE.seconds)
        return answer[0] if answer else None
