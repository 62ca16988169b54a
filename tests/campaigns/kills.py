"""A rank is killed or stopped at a random moment of overlapped matmuls, reshards, windows, host collectives, agreements
or plans: every survivor ends with a named error, no result before that is wrong, and nothing is left behind.

`python tests/campaigns/kills.py --cases 200 --seed 1`
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
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
from weft.errors import RankFailed, WeftError
from weft.layout import Layout, Mesh, Replicate, Shard
from weft.overlap.executor.context import context_of
from weft.reshard import Source

DEADLINE = 3.0
LIMIT = 120.0  # of a case: only a hang reaches it
# Kills or stops a process after a while; one that was stopped is killed when all others must have given up.
_KILLER = """
import os, signal, sys, time
pid, how, after, end = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
if not sys.stdin.readline():
    sys.exit()  # the rank ended before its time had come, and says why
time.sleep(after)
os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
if how == "stopped":
    time.sleep(end)
    os.kill(pid, signal.SIGKILL)
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
    mesh = Mesh.of(list(range(world)), hosts=list(range(world)) if apart else [0] * world)
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


def work_until_lost(seed: int, number: int) -> str:
    """What a survivor says at the end; the victim says nothing."""
    dice = case_random(seed, number)
    world, kind, how = dice.randint(2, 4), dice.choice(list(WORK)), dice.choice(["killed", "killed", "stopped"])
    victim, after = dice.randrange(world), dice.choice([0.0, dice.random() * 0.05, dice.random()])
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=DEADLINE))
    work = WORK[kind](dice, group)
    killer = None
    if group.rank() == victim:
        arguments = [str(os.getpid()), how, str(after), str(4 * DEADLINE)]
        killer = subprocess.Popen([sys.executable, "-ISc", _KILLER, *arguments], stdin=subprocess.PIPE, text=True)
    rounds = 0
    try:
        for good in work:
            if not good:
                return f"wrong in round {rounds}"
            rounds += 1
            if rounds == 2 and killer is not None:
                assert killer.stdin is not None
                print("go", file=killer.stdin, flush=True)
    except WeftError as error:
        if killer is not None:
            return f"after {rounds} rounds, before it was {how}: {error}"
        return "" if str(error) else "an error without a text"
    except BaseException:
        return f"after {rounds} rounds: {traceback.format_exc()}"
    return "it never ended"


def run_case(seed: int, number: int) -> list[str]:
    dice = case_random(seed, number)
    world, kind, how = dice.randint(2, 4), dice.choice(list(WORK)), dice.choice(["killed", "killed", "stopped"])
    victim = dice.randrange(world)
    name = f"case {number}: {kind}, {world} ranks, rank {victim} {how}"
    try:
        said = run_ranks(work_until_lost, world, seed, number, timeout=LIMIT, killed=[victim])
    except RankFailed as error:
        return [f"{name}: {error}"]
    said[victim] = "" if said[victim] == signal.SIGKILL else f"died of signal {said[victim]}"
    return [f"{name}: rank {rank}: {text}" for rank, text in enumerate(said) if text]


def _left_behind() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "weft" in name}


def campaign(seed: int, first: int, cases: int) -> Tally:
    tally = Tally("kills", seed)
    before = _left_behind()
    for number in range(first, first + cases):
        tally.failures += run_case(seed, number)
        if _left_behind() != before:
            tally.failures.append(f"case {number} left {_left_behind() - before} in /dev/shm")
        tally.cases += 1
    return tally


if __name__ == "__main__":
    main(campaign)
