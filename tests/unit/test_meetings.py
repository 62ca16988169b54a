"""Meetings in a store: a step of all ranks is passed by all or by none, whoever is late, and leaves nothing behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

from weft.comm.deadline import Deadline
from weft.comm.tell import Meeting
from weft.errors import PeerLost, PeerTimeout, WeftError

LONG = 30.0


@dataclass(frozen=True)
class Member:
    """As much of a process group as a meeting needs."""

    at: int
    of: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.of


def stores(tmp_path: Path, ranks: int) -> dict[str, Callable[[], list[Store]]]:
    def tcp() -> list[Store]:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [server, *(dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(ranks - 1))]

    def file() -> list[Store]:
        made: list[Store] = [dist.FileStore(str(tmp_path / "store"), ranks) for _ in range(ranks)]
        for store in made:
            store.set_timeout(timedelta(seconds=LONG))
        return made

    return {"tcp": tcp, "file": file, "hash": lambda: [dist.HashStore()] * ranks}


def meet(store: Store, rank: int, size: int, value: Any, seconds: float) -> list[Any]:
    held = Meeting(Member(rank, size), "a test", ("enter", "end"), deadline=Deadline.after(seconds), store=store)  # type: ignore[arg-type]
    found = held.gather("enter", value)
    assert held.gather("end", [value, held.number]) == [[each, held.number] for each in found]
    return found


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_who_comes_late_is_told_and_the_next_meeting_is_good(kind: str, tmp_path: Path) -> None:
    mine = stores(tmp_path, 2)[kind]()
    for seconds in (0.2, 0.3):
        with pytest.raises(PeerTimeout, match=f"waited {seconds:g} s for rank 1 at step 'enter' of a test"):
            meet(mine[0], 0, 2, "early", seconds)
    for seconds in (0.2, 0.3):
        start = time.monotonic()
        with pytest.raises(PeerLost, match=f"rank 0 gave up at step 'enter' of a test: it waited {seconds:g} s for ra"):
            meet(mine[1], 1, 2, "late", LONG)
        assert time.monotonic() - start < LONG / 3
    with ThreadPoolExecutor(2) as pool:
        for turn in range(3):
            found = [pool.submit(meet, mine[rank], rank, 2, [turn, rank], LONG) for rank in range(2)]
            assert [each.result() for each in found] == [[[turn, 0], [turn, 1]]] * 2
    if kind != "file":  # which counts what was deleted
        assert mine[0].num_keys() <= 2 * 2 + 2 * (2 + 1) + (kind == "tcp"), "processes, counts, words of one meeting"


def test_a_word_that_cannot_be_said_ends_the_meeting_of_all() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, store, 1, 2, 1, LONG)
        with pytest.raises(TypeError):
            meet(store, 0, 2, object(), LONG)
        with pytest.raises(PeerLost, match="rank 0 gave up at step 'enter' of a test: it was ended by TypeError"):
            other.result(LONG / 3)


def test_all_ranks_get_through_or_none(tmp_path: Path) -> None:
    """Ranks that come about when the others give up: every meeting ends the same on all of them."""
    dice, ranks = random.Random(3), 3
    mine = stores(tmp_path, ranks)["tcp"]()

    def come(rank: int, turn: int, pause: float) -> list[Any] | None:
        time.sleep(pause)
        try:
            return meet(mine[rank], rank, ranks, [turn, rank], 0.02)
        except WeftError:
            return None

    ends = set()
    with ThreadPoolExecutor(ranks) as pool:
        for turn in range(60):
            waits = [dice.uniform(0.0, 0.045) for _ in range(ranks)]
            jobs: list[Future[list[Any] | None]] = [pool.submit(come, r, turn, waits[r]) for r in range(ranks)]
            found = [job.result() for job in jobs]
            assert all(each == found[0] for each in found), found
            assert found[0] in (None, [[turn, rank] for rank in range(ranks)])
            ends.add(found[0] is None)
    assert ends == {True, False}, "both happened"
