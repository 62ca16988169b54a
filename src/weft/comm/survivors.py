"""Going on without a rank that died: those who are left agree in the group's store on who they are, and go on.

    here/RANK     this rank has given the old group up, and is ready for another one
    gone/RANK     somebody on its machine has seen that the process has ended, or is stopped
    verdict       who goes on, under which name: the first one that writes it decides for all
    made/RANK     this rank has made the new group, or could not
    outcome       whether all have; if not, there is another round

A verdict is due when every rank is here or gone, or at the deadline. So nobody waits for a dead process that one of the
survivors can see; a rank whose whole machine is lost is waited for until the deadline, as it might only be late. Who is
not in the verdict never gets into the new group, whenever it wakes up: it has no name for it, and is told so.

The members make the group and say so. The first one who knows of all, or that one is gone, decides for all again: does
it count? If not, they hold another *round*, with keys of its own. A round ends in the same way for all its members.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft._torch import cpu_group
from weft.comm.deadline import SURVIVORS, Deadline, listening, timeout_of
from weft.comm.group import close_connections
from weft.comm.processes import is_gone, process_key
from weft.comm.tags import abandon, facts_of, refuse_fork
from weft.comm.tell import Asking, store_of
from weft.errors import PeerLost, PeerTimeout, WeftError

T = TypeVar("T")

_ROUNDS, _DONE = "rounds of survivors", "survivors"
_LOOK_SECONDS = 0.02  # between two looks at who is here: every survivor asks one store
_MADE, _AGAIN = "made", "again"


def survivors(group: ProcessGroup, *, timeout: float | None = None) -> ProcessGroup:
    """The ranks that are left of a group which failed, as a new group: in rank order, with its backends and timeout.

    For every rank that caught `PeerLost` or `PeerTimeout`, and collective among these. Each of them is waited for, up
    to `timeout` seconds (60 by default), as one rank finds out long before another. A process that has ended or is
    stopped is not waited for, if it ran on the machine of a rank that is left. `dist.get_process_group_ranks(new)` says
    who they are.

        try:
            y = weft.matmul_all_reduce(x, w_shard, group=group)
        except (weft.PeerLost, weft.PeerTimeout):
            group = weft.survivors(group)

    A rank that was given up, and comes later, gets `PeerLost`. weft drops what it kept for the old group, and refuses
    calls on it. Nothing is said of what was computed: where a call failed on one rank another may have its result
    already, so ranks compare where they are before they go on. The group's store must still be there: if it was in the
    process of a rank that died (rank 0, where no launcher keeps it), `PeerLost` says so, and only a restart helps.
    """
    refuse_fork(group)
    seconds, facts = SURVIVORS.of(timeout), facts_of(group)
    if _DONE in facts:
        raise WeftError("the survivors of this process group have a new one already; call survivors() on that")
    close_connections(group)  # whoever still waits for this rank need not wait for the deadline
    abandon(group)
    found: list[ProcessGroup] = []
    listening(lambda: found.append(_agree(group, seconds)))
    facts[_DONE] = []
    return found[0]


def _agree(group: ProcessGroup, seconds: float) -> ProcessGroup:
    """Holds rounds until one of them has made a group, or this rank is given up; each takes a member at least."""
    rounds = facts_of(group).setdefault(_ROUNDS, [])
    for _ in range(group.size()):
        rounds.append(None)
        held = _Round(group, len(rounds), Deadline.after(seconds))
        members, name = held.decide()
        if group.rank() not in members:
            raise PeerLost(
                f"rank {group.rank()} was given up: {_named(members)} went on without it. It was stopped, or came "
                "after the deadline; it cannot join their group any more"
            )
        made = _make(group, members, name, seconds)
        if held.settle(members, made is not None) and made is not None:
            return made
        if made is not None:
            dist.destroy_process_group(made)
    raise PeerTimeout(f"{_named(members)}, to make a group of those that are left", seconds=seconds)


def _make(group: ProcessGroup, members: Sequence[int], name: str, seconds: float) -> ProcessGroup | None:
    """The group of these ranks, or None where one of them did not come."""
    ranks = dist.get_process_group_ranks(group)
    with suppress(RuntimeError):  # the base of torch's errors here: a store or a connection that timed out
        return cpu_group(name, [ranks[member] for member in members], timeout=timeout_of(group), like=group)
    return None


class _Round:
    """One attempt to agree on who goes on."""

    def __init__(self, group: ProcessGroup, number: int, deadline: Deadline) -> None:
        self._rank, self._size = group.rank(), group.size()
        self._prefix, self._deadline = f"weft/survivors/{number}", deadline
        self._store = store_of(group)

    def decide(self) -> tuple[list[int], str]:
        """Who goes on, by their rank in the old group, and the name of the new one; the same for all who ask."""
        return self._ask(self._decide, "agree on who is left of the group")

    def settle(self, members: Sequence[int], is_made: bool) -> bool:
        """Whether all members have made the new group: the same for all of them."""
        return self._ask(lambda: self._settle(members, is_made), "make a group of those that are left")

    def _ask(self, call: Callable[[], T], what: str) -> T:
        try:
            return Asking(self._store, self._deadline, f"the attempt to {what}").answer(call)
        except PeerLost as error:
            raise PeerLost(
                f"{error}. Without it nobody can {what}: start the ranks with a launcher that keeps the store in a "
                "process of its own, as torchrun does; this run must be started again"
            ) from error

    def _decide(self) -> tuple[list[int], str]:
        self._store.set(self._key("here", self._rank), "")
        verdict, everybody = self._key("verdict"), set(range(self._size))
        while not self._store.check([verdict]):
            gone = self._gone(everybody)
            here = {rank for rank in everybody if self._store.check([self._key("here", rank)])}
            if self._deadline.left() == 0.0 or here | gone == everybody:
                mine = json.dumps([sorted(here - gone), secrets.token_hex(8)])
                self._store.compare_set(verdict, "", mine)
                break
            time.sleep(min(_LOOK_SECONDS, self._deadline.left()))
        members, token = json.loads(self._store.get(verdict).decode())
        return members, f"weft/survivors/{token}"

    def _settle(self, members: Sequence[int], is_made: bool) -> bool:
        self._store.set(self._key("made", self._rank), _MADE if is_made else _AGAIN)
        outcome, keys = self._key("outcome"), {rank: self._key("made", rank) for rank in members}
        while not self._store.check([outcome]):
            said = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
            silent = set(members) - set(said)
            is_over = self._deadline.left() == 0.0 or bool(self._gone(silent))
            if not silent or _AGAIN in said.values() or is_over:
                mine = _MADE if not silent and _AGAIN not in said.values() else _AGAIN
                self._store.compare_set(outcome, "", mine)
                break
            time.sleep(min(_LOOK_SECONDS, self._deadline.left()))
        return self._store.get(outcome) == _MADE.encode()

    def _gone(self, ranks: Iterable[int]) -> set[int]:
        """Those whose process has ended or is stopped. Ranks on this machine are looked for, and told to the others."""
        gone = set()
        for rank in ranks:
            key, process = self._key("gone", rank), process_key(rank)
            if rank == self._rank:
                continue
            if not self._store.check([key]):
                if not self._store.check([process]) or not is_gone(self._store.get(process).decode()):
                    continue
                self._store.set(key, "")
            gone.add(rank)
        return gone

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._prefix}/{what}" if rank is None else f"{self._prefix}/{what}/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
