"""Random programs of reshards: several under way, refused calls and overlapped matmuls in between, compared bit by bit.

A case is a few calls on 2 to 4 ranks. `--alone` leaves out what runs at the same time on one group; `--lab` runs on two
hosts with cards of their own.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "ranks"))

import torch
import torch.distributed as dist
from campaign import Tally, case_random, main
from rank_sets import RankSet
from reshard_cases import mode_of, same, torch_warnings_off, with_strides
from reshard_programs import MODES, Move, random_move, random_options

import weft
from weft.comm import Group
from weft.errors import PeerMismatch, RankFailed
from weft.layout import Layout, Mesh, Partial, Replicate, Shard
from weft.reference import shard
from weft.reshard import Executor, Source, plan_tensors, reshard_state_dict

TIMEOUT = 60.0
WORLD = 4


class Program:
    """One case on one rank. `both` are random numbers that all ranks share, `own` are this rank's."""

    def __init__(self, group: Any, hosts: list[int], seed: int, number: int, *, alone: bool) -> None:
        self.group, self.me, self.world = group, dist.get_rank(), dist.get_world_size(group)
        self.both, self.own = case_random(seed, number), random.Random(f"{seed}/{number}/{self.me}")
        per_host = self.both.choice([1, 2, 4])
        self.hosts = [10 * host + rank // per_host for rank, host in enumerate(hosts)]
        self.hosts = [sorted(set(self.hosts)).index(host) for host in self.hosts]
        self.alone = alone
        self.flying: list[Callable[[], None]] = []
        self.done: list[str] = []

    def run(self) -> None:
        """All steps, and at last whatever is still under way."""
        kinds = [self.move, self.gradient, self.state, self.start, self.start, self.refused, self.matmul, self.land]
        kinds += [] if self.alone else [self.together]
        for _ in range(self.both.randint(2, 5)):
            step = self.both.choice(kinds)
            self.done.append(step.__name__)
            step()
            if self.alone:
                self.land()
        while self.flying:
            self.land()

    # Steps --------------------------------------------------------------------------------------------------

    def move(self) -> None:
        """One tensor, sometimes into memory that is there."""
        move, options, mode = random_move(self.both, self.hosts), random_options(self.both), self.both.choice(MODES)
        goal, out = move.result(self.me), None
        with mode_of(mode):
            source = self._given(move)
            if self.both.random() < 0.4 and goal is not None:
                out = with_strides(torch.zeros_like(goal), self.own.choice(["plain", "transposed", "stepped", "last"]))
            kept, version = None if source is None else source.clone(), 0 if mode == "inference" else _version(out)
            result = self._reshard(source, move, out=out, **options)
        self._check(move, result, mode)
        assert out is None or (result is out and (out.is_inference() or out.numel() == 0 or _version(out) > version))
        assert kept is None or same(source, kept), f"the source of {move} was changed"

    def gradient(self) -> None:
        """Forth and back: the gradient of a random function of the result."""
        move, options = random_move(self.both, self.hosts, floating=True), random_options(self.both)
        source = self._given(move)
        if source is not None:
            source = source.requires_grad_()
        if self.alone or self.both.random() < 0.5:
            result = self._reshard(source, move, **options)
        else:
            result = self._reshard(source, move, async_op=True, **options).wait()
        self._check(move, result, "grad")
        spec = move.spec
        weights = torch.randn(spec.shape, generator=torch.Generator().manual_seed(move.seed)).to(spec.dst_dtype)
        if self.me in spec.dst.mesh.ranks:
            result.backward(_cut(weights, spec.dst, self.me))
        else:
            result.sum().backward()
        if source is not None:
            terms = spec.src.holders(len(spec.shape)).shape[1] if spec.src.reduce_op == "avg" else 1
            plain = Layout(
                spec.src.mesh,
                [Replicate() if isinstance(p, Partial) else p for p in spec.src.placements],  # type: ignore[misc]
                spec.src.order,
            )
            expected = _cut(weights, plain, self.me).to(spec.dtype)
            expected = expected / terms if spec.src.reduce_op == "avg" else expected
            assert source.grad is not None, f"no gradient of {move}"
            assert same(source.grad, expected), f"gradient of {move}"

    def state(self) -> None:
        """A state dict whose names lie on different ranks, as those of stages do; each rank says what it has."""
        count = self.both.randint(1, 6)
        moves = [random_move(self.both, self.hosts, f"layer.{i}", ordered=True) for i in range(count)]
        options, mode = random_options(self.both), self.both.choice(MODES)
        later = not self.alone and self.both.random() < 0.5
        in_place = {move.spec.name for move in moves if self.both.random() < 0.5}
        moves = [move if move.spec.name in in_place else _uncast(move) for move in moves]
        with mode_of(mode):
            state, known, dst, out = {}, {}, {}, {}
            for move in moves:
                spec, source, goal = move.spec, self._given(move), move.result(self.me)
                if source is not None:
                    state[spec.name], known[spec.name] = source, Source(spec.shape, spec.dtype, spec.src)
                if goal is not None:
                    dst[spec.name] = spec.dst
                    if spec.name in in_place:
                        out[spec.name] = torch.full(goal.shape, 3.0).to(goal.dtype)
            found = reshard_state_dict(
                state or None,
                dst or None,
                src=known or None,
                out=out or None,
                cast=True,
                group=self.group,
                timeout=TIMEOUT,
                async_op=later,
                **options,  # type: ignore[arg-type]
            )

        def compare() -> None:
            result = found.wait() if later else found
            assert result.keys() == dst.keys()
            for move in moves:
                if move.spec.name in result:
                    self._check(move, result[move.spec.name], mode if move.spec.name not in in_place else "")

        if later:
            self._spoil(list(state.values()))
            self.flying.append(compare)
        else:
            compare()

    def start(self) -> None:
        """A reshard that is left under way; its source is spoiled at once."""
        move = random_move(self.both, self.hosts, large=self.both.random() < 0.3)
        options, mode = random_options(self.both), self.both.choice(MODES)
        with mode_of(mode):
            source = self._given(move)
            handle = self._reshard(source, move, async_op=True, **options)
        self._spoil([] if source is None else [source])
        if self.own.random() < 0.1:
            return  # dropped: the others must get theirs

        def compare() -> None:
            with mode_of(self.own.choice(MODES)):
                result = handle.wait()
            self._check(move, result, mode)

        self.flying.append(compare)

    def together(self) -> None:
        """Executors that are made first, so that their transfers begin at one moment; each runs twice."""
        comm = Group(self.group, timeout=TIMEOUT)
        moves = [random_move(self.both, self.hosts, large=self.both.random() < 0.5) for _ in range(3)]
        moves.append(moves[0])  # equal plans are the ones that could be taken for each other
        with ExitStack() as stack:
            executors = []
            for move in moves:
                plan = plan_tensors([move.spec], chunk_bytes=self.both.choice([1024, 4096]))
                executors.append(stack.enter_context(Executor(plan, comm)))
            for turn in range(2):
                again = [replace(move, seed=move.seed + turn + 10 * i) for i, move in enumerate(moves)]
                under_way = []
                for move, executor in zip(again, executors, strict=True):
                    source, goal = self._given(move), move.result(self.me)
                    out = None if goal is None else torch.zeros(goal.shape, dtype=goal.dtype)
                    pending = executor.start({} if source is None else {0: source}, {} if out is None else {0: out})
                    under_way.append((move, pending, out))
                self.own.shuffle(under_way)
                for move, pending, out in under_way:
                    pending.wait()
                    if out is not None:
                        self._check(move, out, "")

    def land(self) -> None:
        """Waits for some that are under way, in an order of this rank's own."""
        self.own.shuffle(self.flying)
        for _ in range(self.own.randint(1, 3)):
            if self.flying:
                self.flying.pop()()

    def refused(self) -> None:
        """One rank calls wrongly, or all do; everybody gets an error, and nothing is broken."""
        kind = self.both.choice(["shape", "dtype", "mesh", "out", "terms", "ask"])
        wrong = self.both.randrange(self.world)
        mesh = Mesh.of(list(range(self.world)), hosts=self.hosts)
        known = Source((2 * self.world, 3), torch.float32, Layout(mesh, [Shard(0)]))
        x, options = torch.randn(2, 3), {}
        placements: list[object] = [Replicate()]
        if kind == "terms":
            known = Source((2, 3), torch.int64, Layout(mesh, [Partial("avg")]))
            x = x.to(torch.int64)
        elif self.me == wrong and kind == "shape":
            x = x.view(3, 2)
        elif self.me == wrong and kind == "dtype":
            x = x.double()
        elif self.me == wrong and kind == "out":
            options["out"] = torch.zeros(3)
        elif self.me == wrong and kind == "mesh":
            placements = [Shard(5)]
        elif self.me == wrong and kind == "ask":
            options["chunk_bytes"] = 4096
        try:
            weft.reshard(x, mesh, placements, src=known, group=self.group, timeout=TIMEOUT, **options)  # type: ignore[operator]
        except (ValueError, PeerMismatch):
            return
        raise AssertionError(f"a wrong {kind} of rank {wrong} was not refused")

    def matmul(self) -> None:
        """An overlapped matmul on the same group."""
        seed = self.both.randrange(2**20)
        parts = []
        for rank in range(self.world):
            generator = torch.Generator().manual_seed(seed + rank)
            parts.append((torch.randn(8, 16, generator=generator), torch.randn(12, 16, generator=generator)))
        with torch.no_grad():
            y = weft.matmul_all_reduce(*parts[self.me], group=self.group)
            assert torch.allclose(y, sum(x @ w.t() for x, w in parts), atol=1e-3), "matmul_all_reduce"  # type: ignore[arg-type]

    # ------------------------------------------------------------------------------------------------------

    def _given(self, move: Move) -> torch.Tensor | None:
        shard = move.source(self.me)
        return None if shard is None else with_strides(shard, move.stride)

    def _reshard(self, source: torch.Tensor | None, move: Move, **options: Any) -> Any:
        spec = move.spec
        return weft.reshard(  # type: ignore[operator]
            source,
            spec.dst.mesh,
            spec.dst.placements,
            src=Source(spec.shape, spec.dtype, spec.src),
            dtype=spec.dst_dtype,
            group=self.group,
            timeout=TIMEOUT,
            **options,
        )

    def _check(self, move: Move, result: torch.Tensor, mode: str) -> None:
        goal = move.result(self.me)
        if goal is None:
            assert result.numel() == 0
            return
        if move.spec.src.reduce_op == "product" and move.spec.dtype.is_complex:
            # torch's own products of complex numbers depend on where they lie, in their last bit.
            loose = 1e-2 if goal.itemsize < 8 else 1e-4
            right = result.dtype == goal.dtype and torch.allclose(result, goal, rtol=loose)
        else:
            right = same(result, goal)
        assert right, f"{move} gave something else: {result.dtype} {tuple(result.shape)}"
        assert not mode or result.is_inference() == (mode == "inference"), f"{move} in mode {mode}"

    def _spoil(self, sources: list[torch.Tensor]) -> None:
        for source in sources:
            if self.own.random() < 0.7 and source.numel() and not source.is_inference():
                source.data.zero_()


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _cut(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return shard(whole, layout)[rank].clone()


def _uncast(move: Move) -> Move:
    """The same without a cast: only what is written into tells a type."""
    return replace(move, spec=replace(move.spec, dst_dtype=move.spec.dtype))


# Running them -----------------------------------------------------------------------------------------------


class Ranks:
    """What a rank keeps from case to case: its groups of 2, 3 and 4 ranks."""

    def __init__(self, seed: int, alone: bool) -> None:
        self.seed, self.alone = seed, alone
        self.groups = {size: dist.new_group(list(range(size))) for size in range(2, dist.get_world_size() + 1)}
        self.hosts = {
            size: list(Group(group, timeout=TIMEOUT).hosts)
            for size, group in self.groups.items()
            if dist.get_rank() < size
        }


def run_case(ranks: Ranks, number: int) -> None:
    """One case on this rank; nothing where it takes no part."""
    size = case_random(ranks.seed, -1 - number).choice(sorted(ranks.groups))
    if dist.get_rank() >= size:
        return
    program = Program(ranks.groups[size], ranks.hosts[size], ranks.seed, number, alone=ranks.alone)
    try:
        with torch_warnings_off():
            program.run()
    except BaseException as error:
        error.add_note(f"case {number} of seed {ranks.seed} on {size} ranks: {', '.join(program.done)}")
        raise


def campaign(seed: int, first: int, cases: int, *, alone: bool = False, sets: int = 2) -> Tally:
    """Cases on loopback, on `sets` sets of processes side by side."""
    tally = Tally("reshard, alone" if alone else "reshard", seed)
    numbers = iter(range(first, first + cases))
    lock = threading.Lock()

    def work() -> None:
        ranks = RankSet(WORLD, Ranks, run_case, seed, alone)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            failure = ranks.run(number)
            with lock:
                tally.cases += 1
                if failure is not None:
                    tally.failures.append(f"case {number}:\n{failure}")
        ranks.close()

    threads = [threading.Thread(target=work) for _ in range(min(sets, cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tally


def _batch(_: Any, seed: int, first: int, cases: int, alone: bool) -> None:
    ranks = Ranks(seed, alone)
    for number in range(first, first + cases):
        run_case(ranks, number)


def lab_campaign(seed: int, first: int, cases: int, *, alone: bool = False, batch: int = 25) -> Tally:
    """Cases on two hosts of two ranks, each host with its own network card."""
    from weft.lab import Cluster

    tally = Tally("reshard, two hosts" + (", alone" if alone else ""), seed)
    with Cluster(hosts=2, devices=2, gbps=1.0) as cluster:
        for start in range(first, first + cases, batch):
            count = min(batch, first + cases - start)
            try:
                cluster.run(_batch, seed, start, count, alone, timeout=60.0 + 10.0 * count)
            except RankFailed as error:
                tally.failures.append(f"cases from {start} on:\n{error}")
            tally.cases += count
    return tally


def _main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--lab", action="store_true")
    options, rest = parser.parse_known_args()
    main(partial(lab_campaign if options.lab else campaign, alone=options.alone), rest)


if __name__ == "__main__":
    _main()
