"""Random programs of overlapped matmuls: shapes, types, plans and modes, weights that change in every way in between,
calls that are refused, ranks that stop for a moment, a reshard in flight, a thread that plans.

Worlds of 1 to 4 ranks, on one host and on two: ranks of the second are in a network namespace of their own, and every
tenth such set runs in the lab. `python tests/campaigns/overlap.py --cases 10000 --seed 1`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
sys.path.insert(0, str(Path(__file__).parent))
from campaign import Tally, case_random, main
from harness import run_ranks
from overlap_programs import CHANGES, MODES, SWAP, Inputs, call, close, random_plan, random_shape
from overlap_styles import LayerCase

import weft
from weft.comm import Group
from weft.errors import PeerMismatch, RankFailed
from weft.lab import Cluster
from weft.lab.linux import namespaces_available
from weft.layout import Layout, Mesh, Replicate
from weft.overlap import OverlapPlan
from weft.overlap.executor.context import context_of
from weft.reshard import Source

_SET = 1000  # cases that share a set of processes
_SECONDS = 100.0  # the deadline of a group: only a hang reaches it
# Stops whom it is told, for so many milliseconds.
_STOPPER = """
import os, signal, sys, time
for line in sys.stdin:
    pid, milliseconds = map(int, line.split())
    os.kill(pid, signal.SIGSTOP)
    time.sleep(milliseconds / 1e3)
    os.kill(pid, signal.SIGCONT)
"""


@dataclass(frozen=True)
class Setting:
    """Where a case runs."""

    world: int
    hosts: int

    @classmethod
    def of(cls, dice: random.Random) -> Setting:
        world = dice.choice([1, 2, 2, 3, 3, 4])
        return cls(world, dice.choice([1, 2]) if world > 1 else 1)


class Rank:
    """What a rank has for all of its cases."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()
        self.hosts = context_of(group).hosts
        self.stopper = subprocess.Popen([sys.executable, "-ISc", _STOPPER], stdin=subprocess.PIPE, text=True)
        self.comm = Group(group, timeout=_SECONDS)
        self.compiled = 0

    def stop_for(self, milliseconds: int) -> None:
        """This process is stopped for so long, soon."""
        assert self.stopper.stdin is not None
        print(os.getpid(), milliseconds, file=self.stopper.stdin, flush=True)

    def close(self) -> None:
        self.stopper.communicate()


class Case:
    """One program. `failures` says what was wrong on this rank."""

    def __init__(self, on: Rank, seed: int, number: int) -> None:
        self.on, self.shared = on, case_random(seed, number)
        Setting.of(self.shared)
        self.own = random.Random(f"{seed}/{number}/{on.rank}")
        self.failures: list[str] = []
        few = self.shared.random() < 0.4
        self.inputs = Inputs(random_shape(self.shared, few=few), on.world, f"{seed}/{number}")
        self.few, self.bias = few, self.shared.random() < 0.6
        self.weights = [nn.Parameter(w.clone()) for w in self.inputs.w]  # what each rank's weight must be
        self.mine = nn.Parameter(self.inputs.w[on.rank].clone())
        self.story: list[str] = []

    def run(self) -> None:
        with contextlib.ExitStack() as beside:
            if self.on.world > 1 and self.shared.random() < 0.08:
                beside.callback(self._reshard_beside())
            if self.on.world > 1 and self.shared.random() < 0.02:
                beside.callback(self._plan_beside())
            for _ in range(self.shared.randint(1, 3)):
                self._interfere()
                self._compare()
                self._change()

    # What happens in between -----------------------------------------------------------------------------------

    def _interfere(self) -> None:
        if self.own.random() < 0.15:
            self._be_refused()
        if self.on.world > 1 and self.shared.random() < 0.05:
            self._disagree()
        if self.own.random() < 0.05:
            self.on.stop_for(self.own.randint(1, 40))

    def _be_refused(self) -> None:
        """A mistake of this rank alone; the others know nothing of it."""
        plan = self.own.choice(["no plan", str(OverlapPlan(self.inputs.shape.op, 1, 1, 1, "float64", self.on.hosts))])
        self.story.append("refused")
        with contextlib.suppress(ValueError):
            call(self.inputs, self.on.rank, self.inputs.x[self.on.rank], self.mine.detach(), None, self.on.group, plan)
            self.failures.append(f"the plan {plan!r} was taken")

    def _disagree(self) -> None:
        self.story.append("mismatch")
        plan = random_plan(self.shared, self.inputs, self.on.rank, self.on.hosts)
        own = OverlapPlan(**{**vars(plan), "groups": (1,) * (1 + self.on.rank)})
        with contextlib.suppress(PeerMismatch):
            call(self.inputs, self.on.rank, self.inputs.x[self.on.rank], self.mine.detach(), None, self.on.group, own)
            self.failures.append("ranks with different plans agreed")

    def _change(self) -> None:
        ways = [*CHANGES, SWAP]
        way = self.shared.choice(ways)
        self.story.append(way)
        generators = [torch.Generator().manual_seed(self.shared.getrandbits(40)) for _ in self.weights]
        news = [torch.randn(w.shape, generator=g).to(w.dtype) for w, g in zip(self.weights, generators, strict=True)]
        if way == SWAP:
            self.weights = [nn.Parameter(new.clone()) for new in news]
            self.mine = nn.Parameter(news[self.on.rank].clone())
            return
        for weight, new in zip(self.weights, news, strict=True):
            CHANGES[way](weight, new)
        CHANGES[way](self.mine, news[self.on.rank])

    def _reshard_beside(self) -> Any:
        """Rank 0 to the last one, by messages, from now until the end of the case."""
        self.story.append("reshard beside")
        count, last = self.shared.randint(1, 20_000), self.on.world - 1
        values = torch.randn(count, generator=torch.Generator().manual_seed(self.shared.getrandbits(40)))
        src = Source((count,), torch.float32, Layout(Mesh.of([0], hosts=[0]), [Replicate()]))
        source = values if self.on.rank == 0 else None
        target = Mesh.of([last], hosts=[1])
        chunk = self.shared.choice([1024, 4096, None])
        handle = weft.reshard(source, target, [Replicate()], src=src, group=self.on.comm, chunk_bytes=chunk,
                              async_op=True)  # fmt: skip

        def end() -> None:
            found = handle.wait()
            if self.on.rank == last and not torch.equal(found, values):
                self.failures.append("the reshard beside gave other values")

        return end

    def _plan_beside(self) -> Any:
        self.story.append("planning beside")
        sizes = [self.shared.randint(1, 40) for _ in range(3)]

        def plan() -> None:
            try:
                weft.plan_overlap("matmul_reduce_scatter", *sizes, group=self.on.group)
            except BaseException:
                self.failures.append(f"planning beside: {traceback.format_exc()}")

        thread = threading.Thread(target=plan)
        thread.start()
        return thread.join

    # What is compared ------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        mode = "compile" if self.shared.random() < 0.02 else self.shared.choice(MODES[:-1])
        plan: Any = None if self.few else random_plan(self.shared, self.inputs, self.on.rank, self.on.hosts)
        plan = str(plan) if plan is not None and self.shared.random() < 0.5 else plan
        self.story.append(f"{mode} {self.inputs.shape} bias={self.bias} plan={plan}")
        got = self._call(mode, plan)
        want = self.inputs.expected(self.weights, self.on.rank, bias=self.bias)
        names = ("y", "dx", "dw", "db")
        for name, a, b in zip(names, got, want, strict=False):
            if not close(a, b):
                most = float((a.double() - b).abs().max()) if a.shape == b.shape and a.numel() else -1.0
                self.failures.append(f"{name} is off by {most} after {self.story}")

    def _call(self, mode: str, plan: Any) -> list[Tensor]:
        on, inputs = self.on, self.inputs
        x, bias = inputs.x[on.rank].clone(), inputs.bias[on.rank].clone() if self.bias else None
        if mode in ("no_grad", "inference"):
            with torch.inference_mode() if mode == "inference" else torch.no_grad():
                return [call(inputs, on.rank, x, self.mine, bias, on.group, plan)]
        x.requires_grad_()
        if bias is not None:
            bias.requires_grad_()
        run = partial(call, inputs, on.rank, group=on.group, plan=plan)
        if mode == "compile":
            torch._dynamo.reset()
            run = torch.compile(run, backend="aot_eager", dynamic=False)
            y = run(x=x, w=self.mine, bias=bias)
        elif mode == "checkpoint":
            y = checkpoint(lambda a, b, c: run(x=a, w=b, bias=c), x, self.mine, bias, use_reentrant=False)
        else:
            y = run(x=x, w=self.mine, bias=bias)
        y.backward(inputs.dy(on.rank, y.shape[0]))
        found = [y.detach(), x.grad, self.mine.grad, None if bias is None else bias.grad]
        self.mine.grad = None
        return [t for t in found if t is not None]


# Sets of cases on sets of processes ----------------------------------------------------------------------------------


def run_cases(seed: int, numbers: list[int], hosts: int) -> tuple[list[str], int | None]:
    """What was wrong on this rank, by case; and the case at which it could not go on."""
    group = dist.group.WORLD
    assert group is not None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_SECONDS), group)
    if hosts == 2:
        _part_hosts(group)
    failures: list[str] = []
    rank = Rank(group)
    for number in numbers:
        case = Case(rank, seed, number)
        try:
            case.run()
            if case.shared.random() < 0.1:
                layer = LayerCase(case.shared, group)
                case.story.append(layer.story)
                layer.run()
                case.failures += layer.failures
        except BaseException:
            failures.append(f"case {number}, rank {rank.rank}: {case.story}\n{traceback.format_exc()}")
            return failures, number
        failures += [f"case {number}, rank {rank.rank}: {text}" for text in case.failures]
    rank.close()
    return failures, None


def _part_hosts(group: dist.ProcessGroup) -> None:
    """The upper half of the ranks goes into another network namespace; connections that are open stay.

    Where that is not permitted they stay on one host.
    """
    # All are connected, by torch alone: weft asks a rank for its host once.
    dist.all_gather([torch.empty(1) for _ in range(group.size())], torch.ones(1), group=group)
    for shift in range(1, group.size()):
        to, source = (group.rank() + shift) % group.size(), (group.rank() - shift) % group.size()
        sent = dist.isend(torch.ones(1), group=group, group_dst=to)
        dist.recv(torch.empty(1), group=group, group_src=source)
        sent.wait()
    libc, store = ctypes.CDLL(None, use_errno=True), dist.distributed_c10d._get_process_group_store(group)
    leader, network = (group.size() + 1) // 2, 0x40000000
    if group.rank() == leader:
        store.set("network", str(os.getpid()) if libc.unshare(network) == 0 else "0")
    pid = int(store.get("network"))
    if pid and group.rank() > leader:
        with open(f"/proc/{pid}/ns/net") as file:
            libc.setns(file.fileno(), network)
    dist.barrier(group)


def in_lab(rank: Any, seed: int, numbers: list[int]) -> tuple[list[str], int | None]:
    torch.set_num_threads(1)
    return run_cases(seed, numbers, 1)


def run_set(seed: int, numbers: list[int], setting: Setting, *, lab: bool) -> tuple[list[str], int | None]:
    limit = 60.0 + 5.0 * len(numbers)
    try:
        if lab:
            with Cluster(hosts=2, devices=setting.world // 2, gbps=10.0) as cluster:
                results = cluster.run(in_lab, seed, numbers, timeout=limit)
        else:
            results = run_ranks(run_cases, setting.world, seed, numbers, setting.hosts, timeout=limit)
    except RankFailed as error:
        return [f"cases {numbers[0]} to {numbers[-1]}: {error}"], numbers[-1]
    broken = [number for _, number in results if number is not None]
    return [text for texts, _ in results for text in texts], min(broken, default=None)


def campaign(seed: int, first: int, cases: int) -> Tally:
    tally, sets = Tally("overlap", seed), 0
    labs = namespaces_available()[0]
    for start in range(first, first + cases, _SET):
        by_setting: dict[Setting, list[int]] = {}
        for number in range(start, min(start + _SET, first + cases)):
            by_setting.setdefault(Setting.of(case_random(seed, number)), []).append(number)
        for setting, numbers in by_setting.items():
            sets += 1
            lab = labs and setting.hosts == 2 and setting.world in (2, 4) and sets % 10 == 0
            left: list[int] = numbers
            while left:
                failures, broken = run_set(seed, left, setting, lab=lab)
                tally.failures += failures
                left = [] if broken is None else [number for number in left if number > broken]
            tally.cases += len(numbers)
    return tally


if __name__ == "__main__":
    main(campaign)
