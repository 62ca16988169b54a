"""A rank is killed or stopped at a random moment of overlapped matmuls, reshards, windows, host collectives, agreements
or plans: every survivor ends with a named error, no result before that is wrong, they go on in a smaller group that is
right, and nothing is left behind. A rank that was only stopped wakes up later, and finds itself given up.

`python tests/campaigns/kills.py --count 200 --seed 1`
"""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
sys.path.insert(0, str(Path(__file__).parent))
from campaign import Tally, case_random, main
from harness import run_ranks
from overlap_programs import Inputs, call, close, random_plan, random_shape

import weft
from weft.comm import Group, Window
from weft.comm.host_collectives import HostGroup
from weft.errors import PeerLost, RankFailed, WeftError
from weft.layout import Layout, Mesh, Replicate, Shard
from weft.overlap.executor.context import context_of
from weft.reshard import Source

DEADLINE = 3.0
LIMIT = 120.0  # of a case: only a hang reaches it
SPARE = 1.0  # seconds beyond the deadline within which every survivor has its error
SMALLER = 1.0  # seconds within which the smaller group is right, once all survivors have come
# Kills or stops a process after a while; one that was stopped wakes up when all others must have gone on without it.
_KILLER = """
import os, signal, sys, time
pid, how, after, end, note = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
if not sys.stdin.readline():
    sys.exit()  # the rank ended before its time had come, and says why
time.sleep(after)
with open(note, "w") as file:
    file.write(str(time.monotonic()))
os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
if how == "stopped":
    time.sleep(end)
    os.kill(pid, signal.SIGCONT)
"""


def overlapped(dice: random.Random, group: dist.ProcessGroup) -> Iterator[bool]:
    """Calls of a few shapes and plans, with other inputs each time."""
    rank, hosts = group.rank(), context_of(group).hosts
    shapes = [random_shape(dice, few=False) for _ in range(3)]
    for number in range(10**6):
        inputs = Inputs(shapes[number % 3], group.size(), f"{dice.random()}")
        plan = random_plan(dice, inputs, rank, hosts)
        y = call(inputs, rank, inputs.x[rank], inputs.w[rank], None, group, plan)
        yield close(y, inputs.expected(inputs.w, rank, bias=False)[0])


def resharded(dice: random.Random, group: dist.ProcessGroup) -> Iterator[bool]:
    """Rows of rank 0's host to columns on all, by messages or through windows, one after the other or in flight."""
    world, rank = group.size(), group.rank()
    apart = dice.random() < 0.5
    mesh = Mesh.of(dist.get_process_group_ranks(group), hosts=list(range(world)) if apart else [0] * world)
    comm = Group(group, timeout=DEADLINE)
    for _ in range(10**6):
        rows, cols = dice.randint(1, 300), dice.randint(1, 300)
        whole = torch.randn(rows, cols, generator=torch.Generator().manual_seed(dice.getrandbits(40)))
        src = Source((rows, cols), torch.float32, Layout(mesh, [Shard(0)]))
        step = -(-rows // world)
        mine = whole[rank * step : (rank + 1) * step].contiguous()
        handles = [
            weft.reshard(mine, mesh, [Replicate()], src=src, group=comm, chunk_bytes=4096, async_op=True)
            for _ in range(dice.choice([1, 1, 3]))
        ]
        yield all(torch.equal(handle.wait(), whole) for handle in handles)


def host_collectives(dice: random.Random, group: dist.ProcessGroup) -> Iterator[bool]:
    lean = HostGroup(group, bank_bytes=4096, timeout=DEADLINE)
    for _ in range(10**6):
        generator = torch.Generator().manual_seed(dice.getrandbits(40))
        parts = [torch.randn(dice.choice([1, 50, 3000]), generator=generator).double() for _ in range(1)] * group.size()
        scale = [float(rank + 1) for rank in range(group.size())]
        total = lean.all_reduce(parts[0] * scale[group.rank()])
        yield torch.allclose(total, parts[0] * sum(scale))


def windows(dice: random.Random, group: dist.ProcessGroup) -> Iterator[bool]:
    """Made, written to by the neighbour, and closed."""
    world, rank = group.size(), group.rank()
    for number in range(10**6):
        with Window.create(group, 4096, counters_per_rank=1, timeout=DEADLINE) as window:
            window.peer((rank + 1) % world).fill_((rank + number) % 200)
            window.counters((rank + 1) % world).add(0)
            window.counters(rank).wait(0, 1, timeout=DEADLINE, what=f"rank {(rank - 1) % world}")
            yield bool((window.local == ((rank - 1) % world + number) % 200).all())


def words(dice: random.Random, group: dist.ProcessGroup) -> Iterator[bool]:
    comm = Group(group, timeout=DEADLINE)
    for number in range(10**6):
        comm.agree("a case", str(number))
        texts = [f"{rank} " * dice.choice([1, 10, 1000]) for rank in range(group.size())]
        yield comm.tell("a text", texts[group.rank()]) == texts


def plans(dice: random.Random, group: dist.ProcessGroup) -> Iterator[bool]:
    for _ in range(10**6):
        sizes = [dice.randint(1, 100) for _ in range(3)]
        plan = weft.plan_overlap("matmul_all_reduce", *sizes, group=group)
        yield (plan.m, plan.n, plan.k) == tuple(sizes)


WORK: dict[str, Callable[[random.Random, dist.ProcessGroup], Iterator[bool]]] = {
    "overlapped": overlapped,
    "resharded": resharded,
    "host collectives": host_collectives,
    "windows": windows,
    "words": words,
    "plans": plans,
}


@dataclass(frozen=True)
class Case:
    """What happens in a case: the same on all ranks, and in the process that starts them."""

    world: int
    kind: str
    how: str
    victim: int
    after: float

    @classmethod
    def of(cls, dice: random.Random) -> Case:
        world, kind, how = dice.randint(2, 4), dice.choice(list(WORK)), dice.choice(["killed", "killed", "stopped"])
        victim, after = dice.randrange(world), dice.choice([0.0, dice.random() * 0.05, dice.random()])
        return cls(world, kind, how, victim, after)

    def __str__(self) -> str:
        return f"{self.kind}, {self.world} ranks, rank {self.victim} {self.how}"


@dataclass(frozen=True)
class Said:
    """What a rank says at the end. Times are those of the machine's clock.

    wrong: what was, if anything
    text:  of the error
    at:    when it was raised
    right: when the smaller group had given right results
    """

    wrong: str = ""
    text: str = ""
    at: float = 0.0
    right: float = 0.0


def work_until_lost(seed: int, number: int, note: str) -> Said:
    """The case on one rank; a victim that is killed says nothing."""
    before, dice = _threads(), case_random(seed, number)
    case = Case.of(dice)
    group = dist.new_group(list(range(case.world)), timeout=timedelta(seconds=DEADLINE))
    is_victim = group.rank() == case.victim
    killer = _killer(case, note) if is_victim else None
    rounds = 0
    try:
        for good in WORK[case.kind](dice, group):
            if not good:
                return Said(f"wrong in round {rounds}")
            rounds += 1
            if rounds == 2 and killer is not None:
                assert killer.stdin is not None
                print("go", file=killer.stdin, flush=True)
        return Said("it never ended")
    except WeftError as error:
        at, text = time.monotonic(), str(error)
    except BaseException:
        return Said(f"after {rounds} rounds: {traceback.format_exc()}")
    if is_victim:
        return Said(_given_up(group) if Path(note).exists() else f"before it was {case.how}: {text}")
    try:
        new, right = _go_on(case, group, f"{seed}/{number}")
    except BaseException:
        return Said(f"after {text!r}: {traceback.format_exc()}")
    for each in (group, new):
        dist.destroy_process_group(each)
    left = _left_running(before)
    return Said(f"threads {sorted(left)} are left" if left else "", text, at, right)


def _killer(case: Case, note: str) -> subprocess.Popen[str]:
    arguments = [str(os.getpid()), case.how, str(case.after), str(4 * DEADLINE), note]
    return subprocess.Popen([sys.executable, "-ISc", _KILLER, *arguments], stdin=subprocess.PIPE, text=True)


def _threads() -> set[str]:
    """By what they do: some wait for the next call, whoever makes it, and one works for gloo."""
    return {thread.name for thread in threading.enumerate() if thread.name not in ("weft-wait", "weft-store")}


def _left_running(before: set[str]) -> set[str]:
    """Threads that are there and were not before, once they have had time to end."""
    deadline = time.monotonic() + DEADLINE
    while _threads() - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return _threads() - before


def _given_up(group: dist.ProcessGroup) -> str:
    """What is wrong with how a rank that was stopped is received."""
    try:
        weft.survivors(group, timeout=DEADLINE)
    except PeerLost as error:
        return "" if "went on without it" in str(error) else f"it is told {error}"
    except BaseException:
        return traceback.format_exc()
    return "it is among the survivors"


def _go_on(case: Case, group: dist.ProcessGroup, seed: str) -> tuple[dist.ProcessGroup, float]:
    """The smaller group, and when it was right in some calls of every kind that matters."""
    new = weft.survivors(group, timeout=2 * DEADLINE + SPARE)
    left = [rank for rank in range(case.world) if rank != case.victim]
    assert dist.get_process_group_ranks(new) == left, dist.get_process_group_ranks(new)
    right = 0.0
    for kind in dict.fromkeys(["overlapped", "resharded", "host collectives", case.kind]):
        work = WORK[kind](random.Random(f"{seed}/{kind}"), new)  # ranks were at different calls of the old group
        for number in range(2):
            assert next(work), f"{kind} is wrong in round {number} of the smaller group"
        right = right if kind == case.kind else time.monotonic()
    return new, right


@dataclass
class Figures:
    """How survivors found out, over all cases: lists have a number for each survivor."""

    raised: list[float] = field(default_factory=list)  # seconds after the victim was killed or stopped
    named: list[bool] = field(default_factory=list)  # whether the error names the victim
    right: list[float] = field(default_factory=list)  # seconds from the last survivor's error to right results

    def add(self, case: Case, lost: float, said: list[Said]) -> None:
        last = max(each.at for each in said)
        self.raised += [each.at - lost for each in said]
        self.named += [re.search(rf"rank {case.victim}\b", each.text) is not None for each in said]
        self.right.append(max(each.right for each in said) - last)

    def __str__(self) -> str:
        n = len(self.raised)
        if not n:
            return "nobody was left of any group"
        late = sum(seconds > DEADLINE + SPARE for seconds in self.raised)
        slow = sum(seconds > SMALLER for seconds in self.right)
        return (
            f"{n} survivors: {n - late} raised within {DEADLINE + SPARE:g} s (slowest {max(self.raised):.2f} s), "
            f"{sum(self.named)} named the right rank; {len(self.right)} smaller groups: {len(self.right) - slow} were "
            f"right within {SMALLER:g} s (slowest {max(self.right):.2f} s)"
        )


def run_case(seed: int, number: int, figures: Figures) -> list[str]:
    case = Case.of(case_random(seed, number))
    name = f"case {number}: {case}"
    killed = [case.victim] if case.how == "killed" else []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        note = Path(folder) / "note"
        try:
            said = run_ranks(work_until_lost, case.world, seed, number, str(note), timeout=LIMIT, killed=killed)
        except RankFailed as error:
            return [f"{name}: {error}"]
        lost = float(note.read_text())
    if killed:
        said[case.victim] = Said("" if said[case.victim] == signal.SIGKILL else f"died of signal {said[case.victim]}")
    wrong = [f"{name}: rank {rank}: {each.wrong}" for rank, each in enumerate(said) if each.wrong]
    if not wrong:
        figures.add(case, lost, [each for rank, each in enumerate(said) if rank != case.victim])
    return wrong


def _left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "weft" in name}


def campaign(seed: int, first: int, cases: int) -> Tally:
    tally, figures = Tally("kills", seed), Figures()
    before = _left_behind()
    for number in range(first, first + cases):
        tally.failures += run_case(seed, number, figures)
        if _left_behind() != before:
            tally.failures.append(f"case {number} left {_left_behind() - before} in /dev/shm")
        tally.cases += 1
    tally.note = str(figures)
    return tally


if __name__ == "__main__":
    main(campaign)
